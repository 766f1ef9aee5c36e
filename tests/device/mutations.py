"""Ways to break the order of streams, each of which the race detector must notice."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

from hexad.checkpoint.checkpointer import Checkpointer
from hexad.parallel.context import attention
from hexad.parallel.data import buckets, gatherer, gradients
from hexad.parallel.pipeline import executor

from . import recorder
from .races import Races, SimulatedStreams, places

Patch = Any


@dataclass(frozen=True)
class Mutation:
    """A scenario's name, and how its code is broken."""

    scenario: str
    patches: Callable[[Races], list[Patch]]


NO_WAIT = "no wait in "


def without_waits(at: str) -> Callable[[Races], list[Patch]]:
    """The computing stream does not wait for what is waited for at a place."""

    def patches(races: Races) -> list[Patch]:
        original = recorder.Work.wait

        def wait(self: recorder.Work, timeout: Any = None) -> bool:
            if at not in places()[:1]:
                return original(self, timeout)
            observers, self._recording.observers = self._recording.observers, []
            try:
                return original(self, timeout)  # values arrive
            finally:
                self._recording.observers = observers

        return [mock.patch.object(recorder.Work, "wait", wait)]

    return patches


def _elsewhere(target: Any, name: str) -> Callable[[Races], list[Patch]]:
    """A function's operators run on another stream, which nothing orders."""

    def patches(races: Races) -> list[Patch]:
        original = getattr(target, name)

        def moved(*args: Any, **kwargs: Any) -> Any:
            with races.stream("elsewhere"):
                return original(*args, **kwargs)

        return [mock.patch.object(target, name, moved)]

    return patches


def _given_back_at_start(races: Races) -> list[Patch]:
    """Gradients that are being reduced are free for the next bucket."""
    start, give = gradients.Gradients.start, buckets.BufferPool.give

    def started(self: Any, number: int, *rest: Any) -> None:
        bucket, buffer = self._buckets[number], self._whole(number)
        start(self, number, *rest)
        if not bucket.plan.keeps_gradients:
            give(self._pool, bucket, buffer)

    return [
        mock.patch.object(gradients.Gradients, "start", started),
        mock.patch.object(buckets.BufferPool, "give", lambda *_: None),
    ]


def _given_back_while_gathered(races: Races) -> list[Patch]:
    """Weights that are being gathered are free for the next bucket."""
    fetch, give = gatherer.ParameterGatherer.fetch, buckets.BufferPool.give

    def fetched(self: Any, number: int) -> None:
        gathering = number in self._gathering
        fetch(self, number)
        if number in self._gathering and not gathering:
            give(self._pool, self._buckets[number], self._gathering[number]._result)

    return [
        mock.patch.object(gatherer.ParameterGatherer, "fetch", fetched),
        mock.patch.object(buckets.BufferPool, "give", lambda *_: None),
    ]


def _not_held(races: Races) -> list[Patch]:
    """Work does not hold its tensors until it has been waited for."""
    original = recorder.Recorded.forward

    def forward(self: Any, kind: str, *args: Any, **kwargs: Any) -> recorder.Work:
        work = original(self, kind, *args, **kwargs)
        if kind not in ("send", "receive"):
            work._inner.wait()  # gloo's holds them, too
            work._inner, work._held = None, ()
        return work

    return [mock.patch.object(recorder.Recorded, "forward", forward)]


def _written_after(target: Any, name: str, argument: int) -> Callable[[Races], list[Patch]]:
    """A tensor that a function has started to send is written at once."""

    def patches(races: Races) -> list[Patch]:
        original = getattr(target, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            args[argument].detach().mul_(1)
            return result

        return [mock.patch.object(target, name, call)]

    return patches


def _host_does_not_wait(races: Races) -> list[Patch]:
    return [mock.patch.object(SimulatedStreams, "mark", lambda self: lambda: None)]


def _no_join(races: Races) -> list[Patch]:
    return [mock.patch.object(SimulatedStreams, "join", lambda self, name: None)]


def _beside_without_order(races: Races) -> list[Patch]:
    return [mock.patch.object(SimulatedStreams, "beside", lambda self, name: races.stream(name))]


def _uploaded_elsewhere(races: Races) -> list[Patch]:
    original = SimulatedStreams.moved

    def moved(self: Any, tensor: Any, device: Any) -> Any:
        with races.stream("uploads"):
            return original(self, tensor, device)

    return [mock.patch.object(SimulatedStreams, "moved", moved)]


def _marked_elsewhere(races: Races) -> list[Patch]:
    """The host waits for another stream than that of the copies."""
    original = SimulatedStreams.mark

    def mark(self: Any) -> Callable[[], None]:
        with races.stream("elsewhere"):
            return original(self)

    return [mock.patch.object(SimulatedStreams, "mark", mark)]


def _all_steady(races: Races) -> list[Patch]:
    """Weights that modules compute with are saved beside the next step."""
    return [mock.patch.object(buckets.Bucket, "in_use", False)]


def _not_joined(races: Races) -> list[Patch]:
    """A save begins before the one before has been written, as far as the detector knows."""
    original = Checkpointer.wait

    def wait(self: Any) -> None:
        if self._saving is not None:
            self._saving.ended = lambda: None
        original(self)

    return [mock.patch.object(Checkpointer, "wait", wait)]


WAITS = {
    "compat/deepspeed/pipe_engine.py:_mean": "deepspeed, pipeline, zero 3",
    "compat/deepspeed/pipe_engine.py:signatures": "deepspeed, pipeline, zero 3",
    "compat/deepspeed/zero.py:_adopt": "changed after saves, zero 1",
    "compat/megatron/parallel_state.py:_same_number_of_groups": "megatron, layers in an engine",
    "engine/engine.py:on_all_stages": "deepspeed, pipeline, zero 3",
    "engine/engine.py:evaluate": "saved and resumed, zero 1",
    "engine/engine.py:_finish_step": "zb_v, data 2, zero 2",
    "engine/forms.py:_pass_on": "deepspeed, pipeline, zero 3",
    "engine/forms.py:_probe": "deepspeed, pipeline, zero 3",
    "engine/language.py:start_summing": "experts, data 2, tensor 2, zero 3",
    "engine/modules.py:broadcast": "deepspeed, zero 1, as scripts read",
    "generation/cache.py:attend": "generation, context 2",
    "generation/cache.py:attend_latent": "generation, latent attention, context 2",
    "generation/worker.py:_logits": "generation, pipeline 2, tensor 2",
    "generation/worker.py:_received": "generation, pipeline 2, tensor 2",
    "model/router.py:_balance": "experts, data 2, tensor 2, zero 3",
    "model/router.py:_within_capacity": "experts, capacity, all_gather",
    "optim/optimizer.py:gradient_norm": "tensor 2",
    "parallel/context/attention.py:_arrivals": "context ring",
    "parallel/context/attention.py:_receive": "context ring",
    "parallel/context/attention.py:complete": "context all_gather",
    "parallel/context/exchange.py:backward": "context ulysses_ring",
    "parallel/context/exchange.py:forward": "context ulysses_ring",
    "parallel/context/exchange.py:selected_rows": "generation, context 2",
    "parallel/data/gatherer.py:_arrive": "data 2, zero 1",
    "parallel/data/gradients.py:_wait": "data 4, zero 1, 2 replicas",
    "parallel/data/gradients.py:compute_deferred": "zb_h1, tensor 2 + sequence",
    "parallel/data/gradients.py:finish": "tensor 2",
    "parallel/data/gradients.py:retire": "zb_v, data 2, zero 2",
    "parallel/data/gradients.py:start": "data 4, zero 1, 2 replicas",
    "parallel/data/replicas.py:check": "saved and resumed, zero 1",
    "parallel/expert/dispatch.py:_back": "experts, data 2, tensor 2, zero 3",
    "parallel/expert/dispatch.py:exchanged": "experts, data 2, tensor 2, zero 3",
    "parallel/expert/dispatch.py:gathered": "experts, capacity, all_gather",
    "parallel/expert/dispatch.py:_out": "experts, data 2, tensor 2, zero 3",
    "parallel/expert/dispatch.py:_whole": "experts, capacity, all_gather",
    "parallel/expert/dispatch.py:collect": "experts, capacity, all_gather",
    "parallel/expert/dispatch.py:collect_pairs": "experts, capacity, all_gather",
    "parallel/pipeline/transfers.py:_release": "zb_v, data 2, zero 2",
    "parallel/pipeline/transfers.py:finish": "gpipe of 4, frozen stages",
    "parallel/pipeline/transfers.py:receive": "1f1b, tied, data 2, zero 1",
    "parallel/tensor/embedding.py:backward": "megatron, layers in an engine",
    "parallel/tensor/embedding.py:forward": "megatron, layers in an engine",
    "parallel/tensor/linear.py:backward": "tensor 2",
    "parallel/tensor/linear.py:forward": "LoRA, zb_h1, tensor 2, zero 2",
    "parallel/tensor/linear.py:_gathered_products": "zb_h1, tensor 2 + sequence",
    "parallel/tensor/linear.py:_over_ranks": "LoRA, zb_h1, tensor 2, zero 2",
    "parallel/tensor/linear.py:_summed_product": "tensor 2",
    "parallel/tensor/loss.py:_slices": "tensor 2",
    "parallel/tensor/loss.py:token_losses_": "tensor 2",
    "parallel/tensor/regions.py:gather_first": "latent attention, tensor 2 + sequence",
    "parallel/tensor/regions.py:scatter_sum_first": "latent attention, tensor 2 + sequence",
    "parallel/tensor/regions.py:total": "latent attention, LoRA, tensor 2",
}
"""Every place where the package waits for a collective, with a scenario in which a missing wait is noticed.
In others a later wait for the same communicator may take its place."""

MUTATIONS: dict[str, Mutation] = {
    **{f"{NO_WAIT}{at}": Mutation(name, without_waits(at)) for at, name in WAITS.items()},
    "gradients given back when their reduction starts": Mutation(
        "data 2, zero 2, selective", _given_back_at_start
    ),
    "weights given back when their gathering starts": Mutation(
        "data 4, zero 3, 2 replicas, full", _given_back_while_gathered
    ),
    "operands freed before they are reduced": Mutation("zb_h1, tensor 2 + sequence", _not_held),
    "activations written while they are sent": Mutation(
        "1f1b, tied, data 2, zero 1", _written_after(executor._PointToPoint, "send", 1)
    ),
    "keys written while they are sent": Mutation("context ring", _written_after(attention, "_start", 0)),
    "masters updated before the gradients have arrived": Mutation(
        "saved and resumed, offload, zero 2", _host_does_not_wait
    ),
    "a step's numbers read before they have arrived": Mutation("tensor 2", _host_does_not_wait),
    "values updated while they are saved": Mutation("saved and resumed, zero 1", _no_join),
    "values written to disk before they have arrived": Mutation(
        "saved and resumed, zero 1", _host_does_not_wait
    ),
    "gradients marked as arrived on another stream": Mutation(
        "saved and resumed, offload, zero 2", _marked_elsewhere
    ),
    "weights saved that a script may change": Mutation("changed after saves, zero 1", _all_steady),
    "a copy overwritten while a thread writes it": Mutation("changed after saves, zero 1", _not_joined),
    "masters copied to the device on another stream": Mutation(
        "saved and resumed, offload, zero 2", _elsewhere(buckets.Bucket, "publish")
    ),
    "values saved on a stream that does not wait": Mutation(
        "saved and resumed, zero 1", _beside_without_order
    ),
    "replicas summed on a stream that does not wait": Mutation(
        "data 4, zero 1, 2 replicas", _elsewhere(gradients, "all_reduce_async")
    ),
    "shards added on another stream": Mutation("zb_v, data 2, zero 2", _elsewhere(gradients.Dense, "add_to")),
    "gradients narrowed on another stream": Mutation(
        "bf16, zero 2, 2 replicas", _elsewhere(gradients.Gradients, "_narrowed")
    ),
    "tokens uploaded on another stream": Mutation("data 2, zero 1", _uploaded_elsewhere),
    "blocks of keys cut on another stream": Mutation("context ring", _elsewhere(attention, "_cut")),
}


@contextmanager
def applied(name: str | None, races: Races) -> Iterator[None]:
    """Run with the code broken; None leaves it as it is."""
    with ExitStack() as stack:
        if name is not None:
            for patch in MUTATIONS[name].patches(races):
                stack.enter_context(patch)
        yield
