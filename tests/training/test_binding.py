"""Cores of a rank near its GPU."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from hexad.launching import binding

GPU = torch.device("cuda", 0)
ADDRESS = "0000:3b:00.0"


def system(root: Path, online: str, near: str | None) -> Path:
    """A tree of sysfs with one device."""
    cpus = root / "devices/system/cpu"
    cpus.mkdir(parents=True)
    (cpus / "online").write_text(f"{online}\n")
    device = root / "bus/pci/devices" / ADDRESS
    device.mkdir(parents=True)
    if near is not None:
        (device / "local_cpulist").write_text(f"{near}\n")
    return root


@pytest.mark.parametrize(
    ("online", "near", "allowed", "expected"),
    [
        ("0-7", "4-7", set(range(8)), {4, 5, 6, 7}),
        ("0-15", "0-3,8-11", set(range(16)), {0, 1, 2, 3, 8, 9, 10, 11}),
        ("0-7", "4-7", {4, 5}, set()),  # the launcher has chosen cores
        ("0-7", "4-7", {0, 1}, set()),
        ("0-7", "0-7", set(range(8)), set()),  # one socket
        ("0-7", None, set(range(8)), set()),
        ("0-7", "", set(range(8)), set()),
        ("0-7", "what", set(range(8)), set()),
        ("0-3,5-7", "5-7", {0, 1, 2, 3, 5, 6, 7}, {5, 6, 7}),  # a core is offline
    ],
)
def test_cores_near_a_device(
    online: str, near: str | None, allowed: set[int], expected: set[int], tmp_path: Path
) -> None:
    assert binding.cores_to_use(allowed, ADDRESS, system(tmp_path, online, near)) == expected
    assert binding.cores_to_use(allowed, "0000:00:00.0", tmp_path) == set()
    assert binding.cores_to_use(allowed, None, tmp_path) == set()


def test_the_address_is_that_of_sysfs(monkeypatch: pytest.MonkeyPatch) -> None:
    known = SimpleNamespace(pci_domain_id=0, pci_bus_id=0x3B, pci_device_id=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: known)
    assert binding.pci_address(GPU) == ADDRESS
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace())
    assert binding.pci_address(GPU) is None


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core")
@pytest.mark.parametrize("setting", ["auto", "none"])
def test_all_threads_are_bound_and_released(
    setting: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    allowed = os.sched_getaffinity(0)
    one = min(allowed)
    monkeypatch.setattr(binding, "pci_address", lambda device: ADDRESS)
    online = ",".join(map(str, sorted(allowed)))
    monkeypatch.setattr(binding, "_SYSTEM", system(tmp_path, online, str(one)))
    end = threading.Event()
    waiting = threading.Thread(target=end.wait)
    waiting.start()
    try:
        with binding.near_gpu(GPU, setting):
            bound = {one} if setting == "auto" else allowed
            assert os.sched_getaffinity(0) == bound
            assert os.sched_getaffinity(waiting.native_id or 0) == bound
        assert os.sched_getaffinity(0) == os.sched_getaffinity(waiting.native_id or 0) == allowed
        with binding.near_gpu(torch.device("cpu"), setting):
            assert os.sched_getaffinity(0) == allowed
    finally:
        end.set()
        waiting.join()
