"""States of the device's random generator by name, as Megatron-LM and DeepSpeed have them: tensor ranks draw
some numbers alike, and others apart."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from hexad.config import HexadError

from . import world

MODEL_PARALLEL, DATA_PARALLEL = "model-parallel-rng", "data-parallel-rng"
"""Names of states, as Megatron-LM's."""


class RngTracker:
    """States of the generator by name: inside :meth:`fork` one of them is in force."""

    def __init__(self) -> None:
        self._states: dict[str, Tensor] = {}

    def is_initialized(self) -> bool:
        """Whether there is any."""
        return bool(self._states)

    def reset(self) -> None:
        """Forget all states."""
        self._states = {}

    def get_states(self) -> dict[str, Tensor]:
        """The states."""
        return dict(self._states)

    def set_states(self, states: dict[str, Tensor]) -> None:
        """Replace the states."""
        self._states = dict(states)

    def add(self, name: str, seed: int) -> None:
        """Add the state of a seed.

        Raises:
            HexadError: there is one of this name.
        """
        if name in self._states:
            raise HexadError(f"rng tracker: found the state {name!r} already; use another name")
        generator = _device()
        before = generator.get_rng_state()
        generator.manual_seed(seed)
        self._states[name] = generator.get_rng_state()
        generator.set_rng_state(before)

    @contextmanager
    def fork(self, name: str = MODEL_PARALLEL) -> Iterator[None]:
        """Use a state while inside, and keep how far it got.

        Raises:
            HexadError: there is none of this name.
        """
        if name not in self._states:
            known = ", ".join(self._states) or "none: call model_parallel_cuda_manual_seed"
            raise HexadError(f"rng tracker: found no state {name!r}; known: {known}")
        generator = _device()
        before = generator.get_rng_state()
        generator.set_rng_state(self._states[name])
        try:
            yield
        finally:
            self._states[name] = generator.get_rng_state()
            generator.set_rng_state(before)


def _device() -> Any:
    """The module of the generator that ranks compute with."""
    mesh = world.last_mesh()
    if mesh is not None:
        return torch.cuda if mesh.device.type == "cuda" else torch
    return torch.cuda if torch.cuda.is_available() else torch


tracker = RngTracker()
"""States of this process."""


def get_cuda_rng_tracker(*_: Any, **__: Any) -> RngTracker:
    """The states of the device's generator."""
    return tracker


_seeds: list[int] = []


def model_seed() -> int | None:
    """The seed of the last :func:`seed_ranks`; None before it."""
    return _seeds[0] if _seeds else None


def seed_ranks(seed: int, tensor_rank: int) -> None:
    """Seed the generators: the default one and the data ranks' as ``seed``, the tensor ranks' apart."""
    _seeds[:] = [seed]
    tracker.reset()
    _device().manual_seed(seed)
    tracker.add(DATA_PARALLEL, seed)
    tracker.add(MODEL_PARALLEL, seed + 2718 + tensor_rank)
