"""The weights that ``model.load`` names: those that a run begins with, and to which adapters belong.

A checkpoint of adapters (``model.lora``) holds no frozen weights but a reference to them: where they were
loaded from, and a text that identifies them, so that adapters are never added to other weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hexad.comm import agreed, from_first, identical
from hexad.config import Config, ConfigError, HexadError, blaming
from hexad.config.load import read_yaml
from hexad.model.inventory import ModelInventory
from hexad.model.pretrained import HUGGING_FACE, hugging_face_directory
from hexad.parallel.sharding import fill_initial
from hexad.topology.mesh import Axis

from .directory import CheckpointDirectory, check_same_model, find_checkpoint
from .hugging_face.weights import opened_model
from .manifest import Manifest, manifest_checksum
from .reader import chosen, load
from .tensor_file import Chunk


@dataclass(frozen=True)
class Base:
    """A reference to weights.

    Attributes:
        load: as ``model.load`` names them, with an absolute path; None where they are a run's initial values.
        identity: a text that other weights do not have.
    """

    load: str | None
    identity: str

    @classmethod
    def drawn(cls, config: Config) -> Base:
        """A reference to the initial values of a run."""
        return cls(None, f"initial values of run.seed {config.run.seed}")

    @classmethod
    def of(cls, manifest: Manifest) -> Base | None:
        """The base weights of the adapters in a checkpoint; None for one that holds all weights."""
        reference = manifest.progress.get("base")
        return None if reference is None else cls(**reference)

    def source(self, config: Config) -> str | None:
        """The weights' location: ``model.load`` if it is given, as they may have moved; of a run that it
        names, the checkpoint they were."""
        configured = config.model.load
        if configured is None or self.load is None:
            return configured or self.load
        of_run = not configured.startswith(HUGGING_FACE) and Path(self.load).is_relative_to(
            absolute(configured)
        )
        return self.load if of_run else configured

    def check(self, base: Base) -> None:
        """Refuse a base with other weights than this one.

        Raises:
            ConfigError: naming both.
        """
        if base.identity != self.identity:
            was = self.load or self.identity
            raise ConfigError(
                "model.load",
                f"found {base.load or base.identity}, which is not what the checkpoint's adapters were "
                f"trained with ({was}); name the same weights",
            )


def absolute(load: str) -> str:
    """``model.load`` with an absolute path."""
    directory = hugging_face_directory(load)
    return f"{HUGGING_FACE}{directory.resolve()}" if directory is not None else str(Path(load).resolve())


def removal_notice(base: Base) -> str | None:
    """A warning about a base that another run may remove, which keeps its newest checkpoints only; None for
    any other base."""
    if base.load is None or hugging_face_directory(base.load) is not None:
        return None
    checkpoint = Path(base.load)
    run = checkpoint.parent.parent
    if CheckpointDirectory(run).path != checkpoint.parent:
        return None
    try:
        keep = read_yaml(run / "config.yaml")["checkpoint"]["keep"]
    except (OSError, ValueError, HexadError, TypeError, KeyError):  # no run that could continue
        return None
    return (
        f"the adapters need {checkpoint}, which run {run} removes when it has {keep} newer checkpoints "
        "(checkpoint.keep): before that run continues, copy the checkpoint, and name the copy in model.load"
    )


def load_weights(config: Config, name: str, chunks: Sequence[Chunk], axis: Axis) -> Base:
    """Fill chunks named ``model.<global name>`` with the weights that ``name`` (as ``model.load``) names, all
    ranks of ``axis`` together: each reads what it holds. ``config``: whose model they belong to.

    Raises:
        AgreedError: they are missing, damaged, of another model, or not the same on all ranks.
    """
    directory = hugging_face_directory(name)
    with blaming("model.load"):
        if directory is None:
            path = chosen(lambda: find_checkpoint(name), axis, Path(name))
            assert path is not None
            load(
                path, chunks, axis, config.checkpoint.verify, lambda manifest: _check(path, manifest, config)
            )
            return Base(absolute(str(path)), from_first(lambda: manifest_identity(path), axis))
        with ExitStack() as stack:
            source, identity = agreed(
                lambda: stack.enter_context(opened_model(directory, config.model)), axis
            )
            identical("what model.load names", identity, axis)
            agreed(lambda: source.fill(chunks), axis)
            return Base(absolute(name), identity)


def load_base(base: Base, config: Config, chunks: Sequence[Chunk], axis: Axis) -> None:
    """Fill chunks with the weights that adapters were trained with; initial values of a run are drawn.

    Raises:
        AgreedError: as for :func:`load_weights`, or they are other weights.
    """
    name = base.source(config)
    loaded = Base.drawn(config) if name is None else load_weights(config, name, chunks, axis)
    agreed(lambda: base.check(loaded), axis)
    if name is None:
        weights = ModelInventory(config.model).weights()
        for chunk in chunks:
            rectangle = chunk.rectangle.named(chunk.name.removeprefix("model."))
            fill_initial(chunk.tensor.detach(), rectangle, weights[rectangle.name], config.run.seed)


def base_of(checkpoint: Path, manifest: Manifest) -> Base:
    """The base weights of the adapters in a checkpoint.

    Raises:
        HexadError: the checkpoint does not name them.
    """
    base = Base.of(manifest)
    if base is None:
        raise HexadError(
            f"checkpoint {checkpoint} holds adapters without a reference to the weights that they belong to; "
            "save with hexad.training.saves.Saves, which records them"
        )
    return base


def load_model_weights(source: Path | str, config: Config, chunks: Sequence[Chunk], axis: Axis) -> None:
    """Fill chunks with all that a model computes with, all ranks together: of a checkpoint, with the base of
    its adapters, or of a Hugging Face directory (``hf:DIR``).

    Raises:
        AgreedError: as for :func:`load_weights` and :func:`load_base`.
    """
    if isinstance(source, str):
        load_weights(config, source, chunks, axis)
        return
    weights = ModelInventory(config.model).weights() if config.model.lora is not None else {}
    based = {f"model.{name}" for name, weight in weights.items() if weight.fixed}
    adapter_chunks = [chunk for chunk in chunks if chunk.name not in based]
    manifest = load(source, adapter_chunks, axis, config.checkpoint.verify)
    if config.model.lora is not None:
        base = agreed(lambda: base_of(source, manifest), axis)
        load_base(base, config, [chunk for chunk in chunks if chunk.name in based], axis)


def _check(path: Path, manifest: Manifest, config: Config) -> None:
    if Base.of(manifest) is not None:
        raise HexadError(
            f"checkpoint {path} holds adapters, not complete weights; export the merged model (hexad "
            f"checkpoint export) and load that with {HUGGING_FACE}DIR"
        )
    check_same_model(path, manifest.config, config, adapters=False)


def manifest_identity(path: Path) -> str:
    """The identity of a checkpoint's weights: its manifest's checksum."""
    return (manifest_checksum(path) or b"").hex()


def recorded(base: Base | None) -> Mapping[str, Any]:
    """The entry of a base in a checkpoint's progress; empty without one."""
    return {} if base is None else {"base": asdict(base)}
