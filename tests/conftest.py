"""Fixtures shared by all tests, and slices of them."""

import gc
import json
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from . import forks
from .pool import Pool, uncollected

# In this process and all that tests start, before any imports torch: cores are for tests and ranks, and
# numbers that must agree to the last bit are summed alike.
os.environ["OMP_NUM_THREADS"] = "1"
# Where a test has more threads, those that wait take no time from others.
os.environ["OMP_WAIT_POLICY"] = "passive"
# Those processes compile Hexad's source once, not each time.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# Inductor's cache does not know for which vector units its code is: kernels generated for one width and
# compiled for another compute wrong numbers in silence. Another capability gets another cache.
_CAPABILITY = os.environ.get("ATEN_CPU_CAPABILITY", "default")
os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(
    Path(tempfile.gettempdir(), f"hexad-inductor-{os.getuid()}-{_CAPABILITY}")
)

if find_spec("hypothesis") is not None:  # machines that run tests/gpu only may lack it
    from hypothesis import settings

    settings.register_profile("any machine", deadline=None)  # no test depends on seconds
    settings.load_profile("any machine")


DURATIONS = Path(__file__).parent / "durations.json"
"""Seconds that the default tests of each file take, without those below one; ``make durations`` writes it."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slice", metavar="K/N", help="run every N-th of the selected tests, from number K on")
    parser.addoption(
        "--record-durations", action="store_true", help=f"write {DURATIONS.name} (make durations)"
    )


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput"):
        return
    if config.getoption("--record-durations"):
        config.pluginmanager.register(_Durations())
    if config.getoption("numprocesses", None):
        config.stash[_SERVER] = forks.share()


_SERVER = pytest.StashKey[forks.Server]()


class _Durations:
    """Adds up what the tests of each file take, wherever they run."""

    def __init__(self) -> None:
        self._seconds: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds[report.location[0]] += report.duration

    def pytest_sessionfinish(self) -> None:
        recorded = {name: round(seconds, 1) for name, seconds in self._seconds.most_common() if seconds >= 1}
        DURATIONS.write_text(json.dumps(recorded, indent=0) + "\n")


@pytest.hookimpl(trylast=True)  # after those that the markers leave out
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    # Files that take longest first: a worker that began one at the end would be left alone with it.
    seconds = json.loads(DURATIONS.read_text())
    items.sort(key=lambda item: -seconds.get(item.location[0], 0))
    given = config.getoption("--slice")
    if given is None:
        return
    number, count = map(int, given.split("/"))
    if not 0 <= number < count:
        raise pytest.UsageError(f"--slice: found {given}, expected K/N with K from 0 to N - 1")
    config.hook.pytest_deselected(items=[item for place, item in enumerate(items) if place % count != number])
    items[:] = items[number::count]


def pytest_collection_finish() -> None:
    """Half a million objects stay until the session's end: automatic collections need not visit them."""
    if "torch" in sys.modules:  # some tests need none
        from hexad.training import loop

        loop.collected_by_step = uncollected  # type: ignore[assignment]
    gc.freeze()


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Worker processes for multi-rank tests."""
    pool = Pool()
    yield pool
    pool.close()


@pytest.fixture(scope="module", autouse=True)
def _no_process_group_is_left() -> Iterator[None]:
    """A rank of a process group ends its process when a run fails, which here would be that of the tests."""
    yield
    if "torch.distributed" in sys.modules:
        import torch.distributed as dist

        if dist.is_initialized():
            dist.destroy_process_group()
