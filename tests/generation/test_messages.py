"""Messages of generation: they are pickled between ranks, and every one has its receiver."""

import pickle
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import Pipe

from hexad.generation.batch import TokenBatch, TokenSpan
from hexad.generation.blocks import SlotRun
from hexad.generation.front import Link, serve_link
from hexad.generation.messages import Add, Cancel, RequestUpdates, Stop, Stopped
from hexad.generation.requests import Logprob, Request, RequestUpdate
from hexad.generation.sampling import Sampling
from hexad.generation.sequence import Sequence
from hexad.planning.layouts import planned_layout
from hexad.topology.mesh import Mesh

from .replicas import CPU, Degrees, Room, replica_of, settings, stage_of


def test_a_sequence_begins_without_state_on_another_rank() -> None:
    request = Request((3, 4, 5), Sampling(tokens=4, min_tokens=2), key=7)
    sequence = Sequence(2, request)
    sequence.ids.append(9)
    sequence.computed, sequence.chosen = 3, 1
    batch = TokenBatch(
        (TokenSpan(2, (9,), 3, 4, (SlotRun(0, 4),), last=True),), begun=(sequence,), ended=(1,)
    )
    received = pickle.loads(pickle.dumps(batch))
    assert (received.spans, received.lane, received.ended) == (batch.spans, 0, (1,))
    (other,) = received.begun
    assert (other.number, other.request) == (2, request)
    assert (other.ids, other.computed, other.chosen, other.early) == ([3, 4, 5], 0, 0, True)


def test_a_prompt_that_is_only_scored_lacks_its_last_id() -> None:
    """Nothing follows it."""
    sequence = Sequence(1, Request((3, 4, 5), Sampling(tokens=0, prompt_logprobs=0)))
    assert sequence.ids == [3, 4] and sequence.scoring and sequence.complete_prompt_logprobs() is None
    sequence.scored, sequence.prompt_logprobs = 2, {0: Logprob(4, -1.0), 1: Logprob(5, -2.0)}
    assert sequence.complete_prompt_logprobs() == (Logprob(4, -1.0), Logprob(5, -2.0))
    assert sequence.complete_prompt_logprobs() is None


def test_the_leader_of_another_replica_acts_on_every_message() -> None:
    config = settings("llama", Degrees(), Room())
    mesh = Mesh.create(planned_layout(config, 1), CPU)
    replica = replica_of(stage_of(config, mesh), config, mesh, Room())
    first, leader = map(Link, Pipe())
    with ThreadPoolExecutor(1) as threads:
        serving = threads.submit(serve_link, replica, leader)
        first.put(Add(1, Request((1, 2), Sampling(tokens=120))))
        first.put(Add(2, Request((1, 2, 3), Sampling(tokens=3, logprobs=0))))
        first.put(Cancel(1))
        first.put(Add(3, Request((4,), Sampling(tokens=0, prompt_logprobs=0))))
        updates: list[RequestUpdate] = []
        while {2, 3} - {update.number for update in updates if update.ended}:
            first.wait()
            for message in first.received():
                assert isinstance(message, RequestUpdates)
                updates += message.updates
        first.put(Stop())
        serving.result()
    first.wait()
    assert [*first.received()] == [Stopped()]
    assert sum(len(update.tokens) for update in updates if update.number == 2) == 3
    assert not any(update.ended for update in updates if update.number == 1)
    assert replica.idle and replica.scheduler.pool.available == replica.scheduler.pool.blocks
    for link in (first, leader):
        link.close()
