"""Resident memory does not grow with what a step has freed."""

import ctypes
import gc
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hexad.engine import state


def _resident() -> int:
    """Bytes."""
    text = Path("/proc/self/status").read_text(encoding="utf-8")
    match = re.search(r"VmRSS:\s+(\d+) kB", text)
    assert match is not None
    return int(match[1]) * 1024


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="the C library has no malloc_trim")
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_what_is_free_between_blocks_in_use_is_given_back() -> None:
    size, count = 96 * 1024, 3000  # below the size from which glibc maps blocks one by one
    blocks = [torch.ones(size // 4) for _ in range(count)]
    before = _resident()
    kept = blocks[::10]
    del blocks
    gc.collect()
    state.give_back()
    assert before - _resident() > 0.8 * size * count * 0.9
    assert all(bool((block == 1).all()) for block in kept)


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="the C library has no mallopt")
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="counts page faults")
def test_what_is_free_is_kept_until_then() -> None:
    """In a process of its own. By itself glibc maps the first blocks one by one, and then returns the heap's
    end after rounds that leave no small block of anyone's behind it: chance, so the rounds are added up."""
    program = """
import resource
import sys
import torch
from hexad.engine import state

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

if "keep" in sys.argv:
    state.keep_free()
def round():
    blocks = [torch.ones(2**20) for _ in range(32)]  # 128 MiB: 32768 pages

round()
before = faults()
for _ in range(6):
    round()
print(faults() - before)
"""
    counts = {}
    for argument in ("keep", "leave"):
        command = [sys.executable, "-c", program, argument]
        counts[argument] = int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    assert 4 * counts["keep"] < counts["leave"]


def test_memory_is_given_back_once_it_has_grown(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = iter([900, 1000, 1049, 1051, 1020, 1049, 1200, 1100, 1051])
    monkeypatch.setattr(state, "resident", lambda: next(sizes))
    monkeypatch.setattr(state, "give_back", lambda: None)
    of_engine = state.Heap()
    # The second step begins with nothing free: it tells what a step needs. The fifth too, but more.
    answers = [of_engine.step_ended() for _ in range(9)]
    assert answers == [True, False, False, True, False, False, True, False, False]
