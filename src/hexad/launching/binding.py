"""Binding a rank on a GPU to the cores of the GPU's socket. Copies between host and GPU, and an optimizer on
the host, then use memory that is near. Linux."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

log = logging.getLogger(__name__)
_SYSTEM = Path("/sys")


@contextmanager
def near_gpu(device: torch.device, setting: str) -> Iterator[None]:
    """Bind this process and its threads to the cores near its GPU, as long as this lasts.

    Nothing is changed with ``run.cpu_binding: none``, on a CPU, where the launcher has bound the process
    already (it may use fewer cores than the host has), and where the host does not say which cores are near.
    """
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()
    chosen = set()
    if setting == "auto" and device.type == "cuda":
        chosen = cores_to_use(allowed, pci_address(device), _SYSTEM)
    if not chosen:
        yield
        return
    log.debug("bound to the %d of %d cores near the GPU", len(chosen), len(allowed))
    _bind(allowed, chosen)
    try:
        yield
    finally:
        _bind(chosen, allowed)


def pci_address(device: torch.device) -> str | None:
    """The address of a GPU among PCI devices, such as ``0000:3b:00.0``; None if PyTorch does not know it."""
    properties = torch.cuda.get_device_properties(device)
    numbers = [getattr(properties, f"pci_{part}_id", None) for part in ("domain", "bus", "device")]
    if None in numbers:
        return None
    domain, bus, slot = numbers
    return f"{domain:04x}:{bus:02x}:{slot:02x}.0"


def cores_to_use(allowed: set[int], address: str | None, system: Path) -> set[int]:
    """The cores near a PCI device, of those that this process may use; empty: change nothing.

    Args:
        allowed: cores that the process may use now.
        address: of the device.
        system: where sysfs is mounted.
    """
    if address is None:
        return set()
    online = _cores(system / "devices/system/cpu/online")
    near = _cores(system / "bus/pci/devices" / address / "local_cpulist") & allowed
    return near if allowed == online and near != allowed else set()


def _cores(path: Path) -> set[int]:
    """Cores of a file of sysfs, such as ``0-31,64-95``; empty without the file."""
    cores: set[int] = set()
    with suppress(OSError, ValueError):
        for part in filter(None, path.read_text(encoding="ascii").strip().split(",")):
            first, _, last = part.partition("-")
            cores |= set(range(int(first), int(last or first) + 1))
    return cores


def _bind(before: set[int], after: set[int]) -> None:
    """Bind all threads of this process that were bound to ``before``."""
    for name in os.listdir("/proc/self/task"):
        with suppress(OSError):  # a thread that has ended
            if os.sched_getaffinity(int(name)) == before:
                os.sched_setaffinity(int(name), after)
