"""``deepspeed.utils.zero_to_fp32``: the float32 weights in an engine's checkpoint, of Hexad or DeepSpeed."""

import os
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from hexad.checkpoint.manifest import MANIFEST_FILE
from hexad.checkpoint.reader import Checkpoint
from hexad.config import HexadError

from .import_checkpoint import read_state, tag_directory
from .saved_state import SavedState

_PREFIX = "model."


def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: str | os.PathLike[str],
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
    lazy_mode: bool = False,
) -> dict[str, Tensor]:
    """The complete master weights, and buffers, in a checkpoint of any layout, by the module's names; tied
    ones by all of theirs.

    Args:
        checkpoint_dir: that was saved to.
        tag: of the checkpoint; by default the latest.
        exclude_frozen_parameters: leave out what the optimizer does not update.
        lazy_mode: accepted without effect.

    Raises:
        HexadError: there is none, or it is damaged.
    """
    source = Path(checkpoint_dir) if tag is None else Path(checkpoint_dir) / str(tag)
    directory = tag_directory(source)
    if (directory / MANIFEST_FILE).is_file():
        return _of_checkpoint(directory, exclude_frozen_parameters)
    return _of_state(read_state(directory), exclude_frozen_parameters)


def _of_checkpoint(directory: Path, trained_only: bool) -> dict[str, Tensor]:
    with Checkpoint(directory) as checkpoint:
        names = [
            name.removeprefix(_PREFIX) for name in checkpoint.manifest.tensors if name.startswith(_PREFIX)
        ]
        if trained_only:
            moments = {
                name.split(".", 2)[2] for name in checkpoint.manifest.tensors if name[:10] == "optimizer."
            }
            names = [name for name in names if name in moments or not moments]
        state = {name: _widened(checkpoint.read(_PREFIX + name)) for name in names}
        kept = checkpoint.manifest.progress.get("deepspeed", {})
        return _with_shared(state, kept.get("shared", {}))


def _of_state(state: SavedState, trained_only: bool) -> dict[str, Tensor]:
    trained = {name for values in state.moments.values() for name in values}
    names = [name for name in state.weights if not trained_only or name in trained or not trained]
    return _with_shared({name: _widened(state.weights[name].read(name)) for name in names}, state.aliases)


def _with_shared(state: dict[str, Tensor], shared: Mapping[str, str]) -> dict[str, Tensor]:
    """With further names of tied weights, as tensors in the same memory."""
    return state | {name: state[saved] for name, saved in shared.items() if saved in state}


def _widened(values: Tensor) -> Tensor:
    return values.float() if values.is_floating_point() else values


def convert_zero_checkpoint_to_fp32_state_dict(
    checkpoint_dir: str | os.PathLike[str],
    output_dir: str | os.PathLike[str],
    max_shard_size: str | None = "5GB",
    safe_serialization: bool = False,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
) -> None:
    """Write the weights of :func:`get_fp32_state_dict_from_zero_checkpoint` to a directory.

    Args:
        checkpoint_dir, tag, exclude_frozen_parameters: as there.
        output_dir: receives ``pytorch_model.bin``, or several files and their index.
        max_shard_size: of a file; None: one file.
        safe_serialization: write ``model.safetensors`` instead.

    Raises:
        HexadError: as there, or several files are needed and huggingface_hub is not installed.
    """
    state = get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag, exclude_frozen_parameters)
    folder = Path(output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    name, kind = ("model", "safetensors") if safe_serialization else ("pytorch_model", "bin")
    if max_shard_size is None:
        _write(state, folder / f"{name}.{kind}")
        return
    try:
        from huggingface_hub import save_torch_state_dict
    except ImportError:
        raise HexadError("max_shard_size: needs pip install huggingface_hub; use None for one file") from None
    pattern = f"{name}{{suffix}}.{kind}"
    save_torch_state_dict(
        state,
        folder,
        filename_pattern=pattern,
        max_shard_size=max_shard_size,
        safe_serialization=safe_serialization,
    )


def _write(state: dict[str, Tensor], path: Path) -> None:
    if path.suffix == ".bin":
        torch.save(state, path)
        return
    from safetensors.torch import save_file

    # The format has no ties: the first name is kept.
    once = {values.data_ptr(): name for name, values in reversed(state.items())}
    kept = {n: values for n, values in state.items() if not values.numel() or once[values.data_ptr()] == n}
    save_file(kept, path, metadata={"format": "pt"})


def load_state_dict_from_zero_checkpoint(
    model: nn.Module, checkpoint_dir: str | os.PathLike[str], tag: str | None = None
) -> nn.Module:
    """Load these weights into a module on the CPU, which is returned. Names that only one of them has are
    left out."""
    state = get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag)
    model.cpu().load_state_dict(state, strict=False)
    return model
