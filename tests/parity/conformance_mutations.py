"""Ways to break mixtures of experts that checks of conformance must notice: some of the parity grid, and what
the float64 numbers of a step do not show."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, NamedTuple
from unittest import mock

import torch

from hexad.checkpoint import checkpointer
from hexad.checkpoint.checkpointer import Checkpointer
from hexad.dataset.load.microbatch import Microbatch
from hexad.model.auxiliary import _Attach
from hexad.optim.optimizer import AdamW, BucketOptimizer
from hexad.parallel.context.spans import Spans
from hexad.parallel.data.gradients import Gradients
from hexad.parallel.expert import dispatch, grouped
from hexad.parallel.inventory import Parameter, Traits
from hexad.topology.mesh import Mesh

from .mutation import Patches
from .mutations import MUTATIONS


def _doubled_gradients(mesh: Mesh) -> Patches:
    original = grouped.add_gradients

    def add(total: Any, gradient: torch.Tensor, *rest: Any, **options: Any) -> None:
        original(total, 2 * gradient, *rest, **options)

    return [mock.patch.object(grouped, "add_gradients", add)]


def _unreduced_gradients(mesh: Mesh) -> Patches:
    def axes_of(self: Any, bucket: Any) -> Any:
        sharding = self._sharding[bucket.traits.grid]
        return sharding.shards, sharding.shards if bucket.traits.grid == "expert" else sharding.replicas

    return [mock.patch.object(Gradients, "_axes_of", axes_of)]


def _norm_without_experts(mesh: Mesh) -> Patches:
    original = BucketOptimizer._squares

    def squares(self: Any, grid: Any) -> Any:
        return {} if grid == "expert" else original(self, grid)

    return [mock.patch.object(BucketOptimizer, "_squares", squares)]


def _norm_of_an_expert_rank(mesh: Mesh) -> Patches:
    original = BucketOptimizer._squares

    def squares(self: Any, grid: Any) -> Any:
        found = original(self, grid)
        return {n: part / (2 if grid == "expert" else 1) for n, part in found.items()}

    return [mock.patch.object(BucketOptimizer, "_squares", squares)]


def _no_decay_without_tokens(mesh: Mesh) -> Patches:
    original = AdamW.update

    def update(self: Any, gradients: Iterator[torch.Tensor], rates: Any, factor: Any, publish: Any) -> None:
        given = list(gradients)
        idle = [gradient == 0 for gradient in given]
        before = [bucket.master.clone() for bucket in self.buckets]
        original(self, iter(given), rates, factor, lambda bucket: None)
        for bucket, places, values in zip(self.buckets, idle, before, strict=True):
            if bucket.traits.grid == "expert":
                bucket.master[places] = values[places]
            publish(bucket)

    return [mock.patch.object(AdamW, "update", update)]


def _sixteen_bit_bias(mesh: Mesh) -> Patches:
    original = Parameter.traits

    def traits(self: Parameter, positions: Any) -> Traits:
        return replace(original(self, positions), wide=False)

    return [mock.patch.object(Parameter, "traits", traits)]


def _counted_in_each_forward_pass(mesh: Mesh) -> Patches:
    forward = _Attach.forward

    def count(
        ctx: Any, x: torch.Tensor, auxiliary: Any, places: Any, layer: int, counts: Any, *rest: Any
    ) -> Any:
        if counts is not None:
            auxiliary.counts[layer] += counts
        return forward(ctx, x, auxiliary, places, layer, None, *rest)

    return [mock.patch.object(_Attach, "forward", staticmethod(count))]


def _transposed_experts(mesh: Mesh) -> Patches:
    original = checkpointer.to_write

    def written(chunks: Any) -> Any:
        for chunk in original(chunks):
            square = chunk.name.endswith("experts.down") and chunk.name.startswith("model.")
            yield replace(chunk, tensor=chunk.tensor.transpose(1, 2).contiguous()) if square else chunk

    return [mock.patch.object(checkpointer, "to_write", written)]


def _first_experts_loaded(mesh: Mesh) -> Patches:
    original = Checkpointer.load

    def load(self: Any, path: Any, chunks: Any, *rest: Any) -> Any:
        first = [c for c in chunks if "experts." not in c.name or c.rectangle.offset[0] == 0]
        return original(self, path, first, *rest)

    return [mock.patch.object(Checkpointer, "load", load)]


def _documents_of_the_first_stage(mesh: Mesh) -> Patches:
    def spans(self: Microbatch) -> Spans:
        known = self.documents if mesh.pipeline.rank == 0 else None
        return Spans(self.tokens.numel(), self.sequences, known, self.slice, self.numbers, self.most)

    return [mock.patch.object(Microbatch, "spans", property(spans))]


def _outputs_kept(mesh: Mesh) -> Patches:
    forward = dispatch._Combine.forward

    def keep(ctx: Any, rows: torch.Tensor, *rest: Any) -> Any:
        ctx.rows = rows
        return forward(ctx, rows, *rest)

    return [mock.patch.object(dispatch._Combine, "forward", staticmethod(keep))]


def _sent_rows_kept(mesh: Mesh) -> Patches:
    original = dispatch.Exchanged._out

    def out(self: Any, rows: torch.Tensor) -> torch.Tensor:
        object.__setattr__(self, "rows", [*getattr(self, "rows", ()), rows])
        return original(self, rows)

    return [mock.patch.object(dispatch.Exchanged, "_out", out)]


class Broken(NamedTuple):
    """A way to break the code, and what must notice it.

    Attributes:
        patches: given a mesh.
        check: its number.
        scenario: the place of one in the check's list.
    """

    patches: Callable[[Mesh], Patches]
    check: int
    scenario: int = 0


def _of_the_grid(name: str, check: int, scenario: int = 0) -> Broken:
    return Broken(MUTATIONS[name].patches, check, scenario)


CONFORMANCE_MUTATIONS = {
    "double the gradients of experts": Broken(_doubled_gradients, 1),
    "leave expert gradients of expert-data ranks apart": Broken(_unreduced_gradients, 1),
    "leave experts out of the gradient norm": Broken(_norm_without_experts, 1),
    "leave the router's gradients of tensor ranks apart": _of_the_grid(
        "leave the router's gradients of tensor ranks apart", 2
    ),
    "detach the router": _of_the_grid("detach the router", 2),
    "skip weight decay without tokens": Broken(_no_decay_without_tokens, 3),
    "never begin the backward pass of a loss of experts": _of_the_grid(
        "never begin the backward pass of a loss of experts", 4
    ),
    "average auxiliary losses over this rank's microbatches": _of_the_grid(
        "average auxiliary losses over this rank's microbatches", 4
    ),
    "ignore that losses of experts are means over microbatches": _of_the_grid(
        "ignore that losses of experts are means over microbatches", 4
    ),
    "balance by the loads of this rank": _of_the_grid("balance by the loads of this rank", 4, 1),
    "count loads in each forward pass": Broken(_counted_in_each_forward_pass, 5),
    "change the bias twice in a step": _of_the_grid("change the bias twice in a step", 5),
    "keep biases in 16 bits": Broken(_sixteen_bit_bias, 5, 2),
    "add rows that nothing has written": _of_the_grid("add rows that nothing has written", 6),
    "transpose square experts in a checkpoint": Broken(_transposed_experts, 7),
    "load the first experts only": Broken(_first_experts_loaded, 7),
    "pass documents to the first stage only": Broken(_documents_of_the_first_stage, 8),
    "clip by a norm without experts": Broken(_norm_without_experts, 9),
    "clip by half the squares of experts": Broken(_norm_of_an_expert_rank, 9),
    "keep the outputs of experts": Broken(_outputs_kept, 10),
    "keep rows as they were sent": Broken(_sent_rows_kept, 10, 1),
}


@contextmanager
def broken(name: str, mesh: Mesh) -> Iterator[None]:
    """Run with the code broken."""
    with ExitStack() as stack:
        for patch in CONFORMANCE_MUTATIONS[name].patches(mesh):
            stack.enter_context(patch)
        yield
