"""The race detector on small programs, right and wrong, of one rank in a dry run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from hexad import comm
from hexad.comm import streams
from hexad.topology.mesh import Axis

from .races import Races, simulated
from .recorder import Call, Recording, Waited

SIZE = 1000


@pytest.fixture
def watched() -> Iterator[tuple[Recording, Races]]:
    with simulated(0, 2, None) as both:
        yield both
    dist.destroy_process_group()


def _axis() -> Axis:
    return Axis("data", (0, 1), 0, dist.group.WORLD)


def _gpu() -> streams.Streams:
    return streams.of(torch.device("cuda", 0))


def used(wrong: bool) -> None:
    """A result is used before, or after, it was waited for."""
    pending = comm.all_reduce_async(torch.ones(SIZE), _axis())
    if wrong:
        pending._result.sum()
    pending.wait().sum()


def overwritten(wrong: bool) -> None:
    given = torch.ones(2 * SIZE)
    pending = comm.reduce_scatter_async(given, _axis())
    if wrong:
        given.zero_()
    pending.wait()
    given.zero_()


def read_in_place(wrong: bool) -> None:
    """A rank's own part may be read while all parts are gathered, the others not; and see :func:`own`."""
    whole = torch.ones(2 * SIZE)
    pending = comm.all_gather_async(whole[:SIZE], _axis(), whole)
    whole[SIZE - 1 :][: 2 if wrong else 1].sum()
    pending.wait()


def own(wrong: bool) -> None:
    whole = torch.ones(2 * SIZE)
    pending = comm.all_gather_async(whole[:SIZE], _axis(), whole)
    (whole if wrong else torch.ones(SIZE))[:1].zero_()
    pending.wait()


def waited_beside(wrong: bool) -> None:
    """A wait on another stream orders that one."""
    pending = comm.all_reduce_async(torch.ones(SIZE), _axis())
    with _gpu().beside("other"):
        total = pending.wait()
        total.mul_(2)
    if not wrong:
        _gpu().join("other")
    total.sum()


def freed_after_a_wait_beside(wrong: bool) -> None:
    """The wait gives up what the work has held."""
    given = torch.ones(2 * SIZE)
    pending = comm.reduce_scatter_async(given, _axis())
    if wrong:
        del given
    with _gpu().beside("other"):
        pending.wait()
    _gpu().join("other")


def freed(wrong: bool) -> None:
    given, kept = torch.ones(SIZE), torch.zeros(SIZE)
    with _gpu().beside("other"):
        kept.copy_(given)
    if not wrong:
        _gpu().join("other")
    del given
    _gpu().join("other")


def allocated_beside(wrong: bool) -> None:
    """What the other stream had in this memory before may be under way."""
    with _gpu().beside("other"):
        given = torch.empty(SIZE)
    if not wrong:
        _gpu().join("other")
    given.zero_()
    with _gpu().beside("other"):
        del given


def freed_while_used_here(wrong: bool) -> None:
    """The other stream's next allocation may have this memory."""
    with _gpu().beside("other"):
        given = torch.empty(SIZE)
    _gpu().join("other")
    given.zero_()
    if not wrong:
        with _gpu().beside("other"):
            pass
    del given


def message_written(wrong: bool) -> None:
    """A message's memory may be freed, but not written."""
    message = torch.ones(SIZE)
    pending = comm.send_async(message, _axis(), 1)
    if wrong:
        message.zero_()
    pending._result = torch.empty(0)
    del message
    pending.wait()


def read_by_the_host(wrong: bool) -> None:
    copy = _gpu().pinned(torch.empty(SIZE))
    copy.copy_(torch.ones(SIZE))
    wait = _gpu().mark()
    if not wrong:
        wait()
    copy.numpy()


def written_by_the_host(wrong: bool) -> None:
    """While it is copied to the device."""
    copy, values = _gpu().pinned(torch.ones(SIZE)), torch.empty(SIZE)
    values.copy_(copy)
    wait = _gpu().mark()
    if not wrong:
        wait()
    copy.zero_()


def unlocked(wrong: bool) -> None:
    """Memory of the host is given up while it is copied."""
    copy, values = _gpu().pinned(torch.ones(SIZE)), torch.empty(SIZE)
    values.copy_(copy)
    if not wrong:
        _gpu().mark()()
    del copy


def read_by_a_thread(wrong: bool) -> None:
    """A copy is overwritten by the next one while a thread writes it to disk."""
    copy, values = _gpu().pinned(torch.empty(SIZE)), torch.ones(SIZE)
    copy.copy_(values)
    arrived = _gpu().mark()

    def write() -> None:
        arrived()
        copy.numpy()

    with ThreadPoolExecutor(1) as pool:
        written = pool.submit(write)
        if not wrong:
            written.result()
        copy.copy_(values)
    _gpu().mark()()


PROGRAMS: list[Callable[[bool], None]] = [
    used,
    overwritten,
    read_in_place,
    own,
    waited_beside,
    freed_after_a_wait_beside,
    freed,
    allocated_beside,
    freed_while_used_here,
    message_written,
    read_by_the_host,
    written_by_the_host,
    unlocked,
    read_by_a_thread,
]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_wrong_programs_are_noticed_and_right_ones_are_not(
    program: Callable[[bool], None], watched: tuple[Recording, Races]
) -> None:
    _, races = watched
    program(False)
    assert races.found == []
    program(True)
    assert races.found


def test_memory_that_is_used_again_has_no_history(watched: tuple[Recording, Races]) -> None:
    """A storage at the address of one that is gone."""
    _, races = watched

    def made() -> Tensor:
        return torch.ones(SIZE)

    kept = []
    for _ in range(100):  # the allocator may have given the place to something else
        with _gpu().beside("other"):
            address = made().untyped_storage()._cdata
        kept.append(made())
        if kept[-1].untyped_storage()._cdata == address:
            break
    assert kept[-1].untyped_storage()._cdata == address  # else this shows nothing
    assert races.found == []


def test_events_name_their_streams(watched: tuple[Recording, Races]) -> None:
    recording, _ = watched
    with _gpu().beside("other"):
        comm.all_reduce(torch.ones(SIZE), _axis())
    comm.all_reduce(torch.ones(SIZE), _axis())
    queued = [event for event in recording.events if isinstance(event, Call | Waited)]
    assert [event.stream for event in queued] == ["other", "other", "compute", "compute"]
