"""Rotary factors are the same on every device."""

import math
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hexad.model.configuration import load_config
from hexad.model.positions import Rotary

YARN = {"type": "yarn", "factor": 4.0, "original_positions": 16}
LONG = {"type": "longrope", "factor": 4.0, "original_positions": 16, "short_factors": [1.0] * 4,
        "long_factors": [2.0] * 4}  # fmt: skip
LLAMA = {"type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
         "original_positions": 16}  # fmt: skip


def rotary(scaling: dict[str, Any] | None, device: str) -> Rotary:
    model = {"layers": 1, "hidden": 32, "heads": 4, "rope_theta": 5e5, "rope_scaling": scaling}
    return Rotary(load_config({"model": model}).model, torch.device(device))


def test_factors_are_rounded_exact_values() -> None:
    """Of float32 angles, which are products of float32 numbers."""
    positions = torch.tensor([0, 1, 7, 4095, 131071])
    cos, sin = rotary(None, "cpu").factors(positions, lambda: positions, torch.float64)
    frequencies = (1.0 / 5e5 ** (torch.arange(0, 8, 2).float() / 8)).tolist()
    for row, position in enumerate(positions.tolist()):
        angles = torch.tensor([position * frequency for frequency in frequencies]).tolist()
        for function, factors in ((math.cos, cos), (math.sin, sin)):
            wanted = torch.tensor([function(angle) for angle in angles])
            assert factors[row, 0].tolist() == wanted.tolist()


@pytest.mark.parametrize("scaling", [None, LLAMA, YARN, LONG], ids=["plain", "llama3", "yarn", "longrope"])
def test_devices_do_not_compute_frequencies(scaling: dict[str, Any] | None) -> None:
    computed = []

    class Listed(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = function(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor) and result.device.type == "meta":
                computed.append(function.overloadpacket)
            return result

    with Listed():
        rotary(scaling, "meta")
    assert set(computed) == {torch.ops.aten._to_copy}
