"""The calls of DeepSpeed's engine that save and load."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from hexad.config import HexadError

from . import gathered, saved
from .accessors import Accessors


class Checkpoints(Accessors):
    """The part of :class:`~hexad.compat.deepspeed.engine.DeepSpeedEngine` that saves and loads."""

    micro_steps: int
    _passes: int

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
        tag = f"global_step{self.global_steps}" if tag is None else str(tag)
        saved.save(
            self, self._engine, save_dir, tag, client_state or {}, save_latest, exclude_frozen_parameters
        )
        return True

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
        everything = not load_module_only
        return saved.load(
            self,
            self._engine,
            load_dir,
            tag,
            strict=load_module_strict,
            optimizer=load_optimizer_states and everything,
            schedule=load_lr_scheduler_states and everything,
            counters=everything,
        )

    def save_16bit_model(
        self, save_dir: str, save_filename: str = "pytorch_model.bin", exclude_frozen_parameters: bool = False
    ) -> bool:
        """Write the module's ``state_dict``, in the format that it computes in, to one file, on the first
        rank; a name ending in ``.safetensors`` writes that format. All ranks together."""
        state = self._state_dict(exclude_frozen_parameters, first_only=True)
        return saved.save_model(state, save_dir, save_filename, self._engine.mesh)

    def module_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, torch.Tensor]:
        """The module's ``state_dict`` with complete values, on every rank; all ranks together.

        Raises:
            HexadError: with tensor or pipeline ranks, none of which has the complete module.
        """
        return self._state_dict(exclude_frozen_parameters)

    def _zero3_consolidated_16bit_state_dict(
        self, exclude_frozen_parameters: bool = False
    ) -> dict[str, torch.Tensor] | None:
        """As :meth:`module_state_dict`, on the first rank; None on others. transformers and accelerate call
        it by this name."""
        found = self._state_dict(exclude_frozen_parameters, first_only=True)
        return None if self.global_rank else found

    def _state_dict(self, exclude_frozen: bool, first_only: bool = False) -> dict[str, torch.Tensor]:
        mesh = self._engine.mesh
        if mesh.tensor.size * mesh.pipeline.size > 1:
            raise HexadError(
                f"module_state_dict: found {mesh.tensor.size} tensor and {mesh.pipeline.size} pipeline "
                "ranks, each with a part of the module; call save_checkpoint, and load it without these"
            )
        return gathered.state_dict(self._engine, self._module, exclude_frozen, first_only)

    def zero_gather_16bit_weights_on_model_save(self) -> bool:
        """Whether complete weights can be gathered: always."""
        return True
