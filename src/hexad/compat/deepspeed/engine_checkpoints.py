"""What DeepSpeed's engine saves and loads: checkpoints of any layout, and models in one file."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from hexad.checkpoint.reader import chosen
from hexad.comm import agreed, identical
from hexad.config import HexadError
from hexad.engine.engine import Engine

from ..facade import tags
from ..facade.accumulation import Accumulation
from .config import CheckedConfig
from .saved_state import COUNTERS
from .zero_files import written_by_deepspeed


class EngineCheckpoints(nn.Module, ABC):
    """The part of :class:`~hexad.compat.deepspeed.engine.DeepSpeedEngine` that saves and loads."""

    _engine: Engine
    _config: CheckedConfig
    _accumulation: Accumulation
    lr_scheduler: Any
    module: Any
    global_steps: int
    micro_steps: int

    def save_checkpoint(
        self,
        save_dir: str,
        tag: str | None = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Save weights, optimizer, schedule and counters to ``save_dir/tag``, all ranks together; any layout
        loads them. ``client_state`` is what the script adds: numbers, texts, tensors, containers of these.

        Raises:
            HexadError: ``save_dir`` is empty, or ``client_state`` holds something else.
        """
        if not save_dir:
            raise HexadError(f"save_checkpoint: found save_dir {save_dir!r}, expected a directory")
        world = self._engine.mesh.world
        identical("save_checkpoint", {"save_dir": str(save_dir)}, world)
        tag = f"global_step{self.global_steps}" if tag is None else str(tag)
        tag = tags.common(tag, world, self._config.keys.checkpoint.tag_validation)
        progress = agreed(lambda: self._progress(client_state or {}), world)
        chunks = self._engine.chunks()
        if exclude_frozen_parameters:
            untrained = self._engine.modules.untrained
            frozen = {f"model.{value.name}" for value in untrained if isinstance(value.tensor, nn.Parameter)}
            chunks = [chunk for chunk in chunks if chunk.name not in frozen]
        where = tags.TagDirectory(save_dir, tag, save_latest)
        tags.save(chunks, self._engine.config, self._engine.mesh, where, progress)
        return True

    def _progress(self, client_state: Mapping[str, Any]) -> dict[str, Any]:
        if not isinstance(client_state, Mapping):
            raise HexadError(f"client_state: found a {type(client_state).__name__}, expected a dictionary")
        schedule = None if self.lr_scheduler is None else self.lr_scheduler.state_dict()
        kept = {
            "counters": {name: getattr(self, name) for name in COUNTERS},
            "scheduler": None if schedule is None else tags.encoded(schedule, "lr_scheduler"),
            "client_state": tags.encoded(dict(client_state), "client_state"),
            "shared": _shared_names(self.module),
        }
        return {**self._engine.progress(), "deepspeed": kept}

    def load_checkpoint(
        self,
        load_dir: str,
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Callable[..., Any] | None = None,
    ) -> tuple[str | None, dict[str, Any] | None]:
        """Load what :meth:`save_checkpoint` has saved, in any layout; all ranks together.

        Args:
            load_dir: that was saved to.
            tag: of the checkpoint; by default the latest.
            load_module_strict: refuse a checkpoint that lacks parameters or persistent buffers of the module,
                or has others. Otherwise these are unchanged or ignored, and a warning names them.
            load_optimizer_states: as well as weights.
            load_lr_scheduler_states: as well as weights.
            load_module_only: weights, but no counters either.
            custom_load_fn: None.

        Returns:
            the directory and the ``client_state``; (None, None) where ``load_dir`` names no latest one.

        Raises:
            HexadError: it is damaged, of another module, or was written by DeepSpeed; or ranks name others.
        """
        if custom_load_fn is not None:
            raise HexadError(
                "load_checkpoint: found custom_load_fn, which is not supported; load into the module before"
            )
        if not isinstance(load_dir, str | os.PathLike):
            raise HexadError(f"load_checkpoint: found load_dir {load_dir!r}, expected a directory")
        axis = self._engine.mesh.world
        identical("load_checkpoint", {"load_dir": str(load_dir), "tag": tag}, axis)
        path = chosen(lambda: tags.find(load_dir, tag, written_by_deepspeed), axis, Path(load_dir))
        if path is None:
            return None, None
        optimizer = load_optimizer_states and not load_module_only
        progress = tags.load(self._engine, path, optimizer, load_module_strict, "load_module_strict=False")
        kept = progress.get("deepspeed", {})
        if not load_module_only:
            self._restore_counts(progress, kept)
        self._accumulation.finish()
        self._begin()  # accumulated gradients are discarded
        self.micro_steps -= self.micro_steps % self._config.batch.accumulation
        schedule = load_lr_scheduler_states and not load_module_only
        if schedule and self.lr_scheduler is not None and kept.get("scheduler") is not None:
            self.lr_scheduler.load_state_dict(tags.decoded(kept["scheduler"]))
        state = kept.get("client_state")
        return str(path), {} if state is None else tags.decoded(state)

    def _restore_counts(self, progress: Mapping[str, Any], kept: Mapping[str, Any]) -> None:
        """Restore the counters; a run's own checkpoint has only the engine's."""
        engine = self._engine
        engine.restore_counts(progress)
        skipped = engine.step - progress.get("updates", engine.step)
        of_run = dict(zip(COUNTERS, (engine.step, engine.samples, skipped)))
        for name, value in {**of_run, **kept.get("counters", {})}.items():
            setattr(self, name, value)

    def save_16bit_model(
        self, save_dir: str, save_filename: str = "pytorch_model.bin", exclude_frozen_parameters: bool = False
    ) -> bool:
        """Write the module's ``state_dict``, in the format that it computes in, to one file, on the first
        rank; a name ending in ``.safetensors`` writes that format. All ranks together."""
        state = self._engine.state_dict(exclude_frozen_parameters, first_only=True)
        return tags.save_model(state, save_dir, save_filename, self._engine.mesh)

    def module_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Tensor]:
        """The module's ``state_dict`` with complete values, on every rank; all ranks together.

        Raises:
            HexadError: with tensor or pipeline ranks, none of which has the complete module.
        """
        return self._engine.state_dict(exclude_frozen_parameters)

    def _zero3_consolidated_16bit_state_dict(
        self, exclude_frozen_parameters: bool = False
    ) -> dict[str, Tensor] | None:
        """The module's complete ``state_dict`` on the first rank; None on others. transformers and accelerate
        call it by this name."""
        state = self._engine.state_dict(exclude_frozen_parameters, first_only=True)
        return None if self._engine.mesh.rank else state

    def zero_gather_16bit_weights_on_model_save(self) -> bool:
        """Whether complete weights can be gathered: always."""
        return True

    @abstractmethod
    def _begin(self) -> None:
        """Begin to accumulate gradients."""


def _shared_names(module: nn.Module) -> dict[str, str]:
    """Further names of a module's tied parameters -> the first ones, by which checkpoints have them."""
    first: dict[nn.Parameter, str] = {}
    names = ((name, parameter) for name, parameter in module.named_parameters(remove_duplicate=False))
    known = [(name, first.setdefault(parameter, name)) for name, parameter in names]
    return {name: saved for name, saved in known if name != saved}
