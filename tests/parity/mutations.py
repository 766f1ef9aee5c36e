"""Ways to break parallel code, each of which the parity grid must notice."""

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

from hexad import comm
from hexad.engine.counting import Counting, Counts
from hexad.model import latent_attention, ops
from hexad.model.inventory import ModelInventory
from hexad.model.latent_attention import LatentAttention
from hexad.model.transformer import Transformer
from hexad.optim.optimizer import BucketOptimizer
from hexad.optim.schedule import LearningRates
from hexad.parallel.data import buckets, gradients, ordering
from hexad.parallel.data.buckets import StateSharding
from hexad.parallel.inventory import Parameter
from hexad.parallel.pipeline import executor
from hexad.parallel.tensor import embedding, linear, loss, regions
from hexad.topology.mesh import Mesh

from .context_mutations import CONTEXT_MUTATIONS
from .expert_mutations import EXPERT_MUTATIONS
from .harness import EVERY_ADAPTED, VARIANTS, Case, deep, fewer
from .latent_cases import LATENT_GRID
from .mutation import Mutation, Patches, same, same_async
from .state_mutations import STATE_MUTATIONS


def _drop_data_reduction(mesh: Mesh) -> Patches:
    return [mock.patch.object(gradients, "all_reduce_async", same_async)]


def _average_over_data(mesh: Mesh) -> Patches:
    def average(tensor: torch.Tensor, axis: Any) -> comm.Pending:
        result = comm.all_reduce(tensor, axis)
        result.div_(axis.size)
        return comm.Pending(result)

    return [mock.patch.object(gradients, "all_reduce_async", average)]


def _reduce_before_complete(mesh: Mesh) -> Patches:
    original = ordering.Rounds._later

    def later(self: Any, bucket: int, member: int) -> int:
        return original(self, bucket, member) + self._buckets[bucket].uses[member]

    return [mock.patch.object(ordering.Rounds, "_later", later)]


def _double_count_norm(mesh: Mesh) -> Patches:
    def norm(self: BucketOptimizer) -> torch.Tensor:
        squares = sum(torch.linalg.vector_norm(bucket.gradient).square() for bucket in self.buckets)
        return comm.all_reduce(torch.as_tensor(squares).clone(), mesh.tensor).sqrt()

    return [mock.patch.object(BucketOptimizer, "gradient_norm", norm)]


def _local_norm(mesh: Mesh) -> Patches:
    return [mock.patch("hexad.optim.optimizer.all_reduce", same)]


def _local_mean_loss(mesh: Mesh) -> Patches:
    original = Counting._result

    def counted(self: Any, counting: Any, equal: bool) -> Counts:
        counts = original(self, counting, equal)
        return counts._replace(targets=counts.targets // self.mesh.data.size + 1)

    return [mock.patch.object(Counting, "_result", counted)]


def _keep_partial_gradients(mesh: Mesh) -> Patches:
    return [mock.patch.object(gradients, "all_reduce", same)]


def _keep_own_heads_gradients(mesh: Mesh) -> Patches:
    def reduce(tensor: torch.Tensor, axis: Any) -> torch.Tensor:
        return tensor if axis.name == "kv_copies" else comm.all_reduce(tensor, axis)

    return [mock.patch.object(gradients, "all_reduce", reduce)]


def _count_copied_heads(mesh: Mesh) -> Patches:
    original = StateSharding.copies

    def copies(self: StateSharding, traits: Any) -> Any:
        return [axis for axis in original(self, traits) if axis.name not in traits.partial]

    return [mock.patch.object(StateSharding, "copies", copies)]


def _drop_column_backward(mesh: Mesh) -> Patches:
    return [mock.patch.object(linear, "all_reduce_async", same_async)]


def _drop_row_forward(mesh: Mesh) -> Patches:
    return [mock.patch.object(linear, "all_reduce", same)]


def _swap_chunks(mesh: Mesh) -> Patches:
    original = linear._summed_product

    def swapped(x: torch.Tensor, weight: torch.Tensor, shard: Any, chunks: Any) -> torch.Tensor:
        y = original(x, weight, shard, chunks)
        return torch.cat(y.split(chunks)[::-1])

    return [mock.patch.object(linear, "_summed_product", swapped)]


def _stale_gather(mesh: Mesh) -> Patches:
    def gather(tensor: torch.Tensor, axis: Any) -> comm.Pending:
        return comm.Pending(tensor.repeat(axis.size, 1))

    return [mock.patch.object(linear, "all_gather_async", gather)]


def _local_softmax(mesh: Mesh) -> Patches:
    return [mock.patch.object(loss, "all_reduce", same)]


def _count_padding(mesh: Mesh) -> Patches:
    original = loss.token_losses_

    def with_padding(logits: torch.Tensor, labels: torch.Tensor, vocab: int, axis: Any, *rest: Any) -> Any:
        return original(logits, labels, logits.shape[1] * axis.size, axis, *rest)

    return [mock.patch.object(loss, "token_losses_", with_padding)]


def _drop_embedding_reduction(mesh: Mesh) -> Patches:
    return [mock.patch.object(embedding, "all_reduce", same)]


def _overwrite_gradients(mesh: Mesh) -> Patches:
    return [mock.patch.object(ordering.Rounds, "fresh", lambda self, bucket, member: True)]


def _ignore_documents(mesh: Mesh) -> Patches:
    original = Transformer.loss_sum

    def joined(self: Transformer, tokens: Any, labels: Any, documents: Any, **rest: Any) -> torch.Tensor:
        return original(self, tokens, labels, None, **rest)

    return [mock.patch.object(Transformer, "loss_sum", joined)]


def _seed_per_rank(mesh: Mesh) -> Patches:
    original = buckets.fill_initial

    def fill_initial(values: Any, rectangle: Any, weight: Any, seed: int) -> None:
        original(values, rectangle, weight, seed + mesh.tensor.rank)

    return [mock.patch.object(buckets, "fill_initial", fill_initial)]


def _repeat_microbatch(mesh: Mesh) -> Patches:
    original = executor._Walk.__init__

    def begin(self: Any, schedule: Any, stages: Any, microbatches: Any, *rest: Any) -> None:
        original(self, schedule, stages, [microbatches[0]] * len(microbatches), *rest)

    return [mock.patch.object(executor._Walk, "__init__", begin)]


def _drop_microbatch(mesh: Mesh) -> Patches:
    original = executor._Walk._backward

    def backward(self: Any, stage: int, microbatch: int, gradient: Any, split: bool) -> Any:
        scale = self.scale
        self.scale = 0.0 if microbatch == 1 else scale
        result = original(self, stage, microbatch, gradient, split)
        self.scale = scale
        return result

    return [mock.patch.object(executor._Walk, "_backward", backward)]


def _wrong_scale(mesh: Mesh) -> Patches:
    original = executor.Executor.run

    def run(self: Any, microbatches: Any, scale: Any, record: bool = False) -> Any:
        return original(self, microbatches, scale * len(microbatches), record)

    return [mock.patch.object(executor.Executor, "run", run)]


def _stale_weights(mesh: Mesh) -> Patches:
    original = BucketOptimizer.step

    def step(self: BucketOptimizer, rates: LearningRates, *rest: Any) -> Any:
        return original(self, LearningRates(0.0, 0.0) if mesh.pipeline.rank == 1 else rates, *rest)

    return [mock.patch.object(BucketOptimizer, "step", step)]


def _drop_boundary_gradient(mesh: Mesh) -> Patches:
    original = executor._Walk._backward

    def backward(self: Any, *arguments: Any, **options: Any) -> Any:
        result = original(self, *arguments, **options)
        return None if result is None else torch.zeros_like(result)

    return [mock.patch.object(executor._Walk, "_backward", backward)]


def _drop_adapter_gradient(mesh: Mesh) -> Patches:
    return [mock.patch.object(linear.Adapters, "add_input_gradient_", lambda *_: None)]


def _forget_product(mesh: Mesh) -> Patches:
    original = gradients.Gradients.compute_deferred

    def compute_deferred(self: Any, products: Any) -> None:
        products.pop()
        original(self, products)

    return [mock.patch.object(gradients.Gradients, "compute_deferred", compute_deferred)]


def _forget_aside(mesh: Mesh) -> Patches:
    return [mock.patch.object(gradients.Gradients, "compute_aside", lambda self: self._aside.clear())]


def _stale_deferred_gather(mesh: Mesh) -> Patches:
    def gather(tensor: torch.Tensor, axis: Any) -> comm.Pending:
        return comm.Pending(tensor.repeat(axis.size, 1))

    return [mock.patch.object(gradients, "all_gather_async", gather)]


def _count_copies(mesh: Mesh) -> Patches:
    original = Parameter.traits

    def traits(self: Any, positions: Any) -> Any:
        return dataclasses.replace(original(self, positions), copy=False)

    return [mock.patch.object(Parameter, "traits", traits)]


def _stage_norm(mesh: Mesh) -> Patches:
    def reduce(tensor: torch.Tensor, axis: Any, *rest: Any) -> torch.Tensor:
        return tensor if axis.name == "pipeline" else comm.all_reduce(tensor, axis, *rest)

    return [mock.patch("hexad.optim.optimizer.all_reduce", reduce)]


def _keep_shared_key_gradient(mesh: Mesh) -> Patches:
    return [mock.patch.object(latent_attention, "copied", lambda key, axis: key)]


def _keep_gathered_key_gradient(mesh: Mesh) -> Patches:
    def gathered(key: torch.Tensor, axis: Any) -> torch.Tensor:
        return regions.mapped(key, axis, regions.gather_first, regions.slice_first)

    return [mock.patch.object(latent_attention, "gathered_first", gathered)]


def _first_head_of_shared_key(mesh: Mesh) -> Patches:
    original = ops._disassemble

    def disassemble(gradient: torch.Tensor, widths: ops.Widths) -> Any:
        kv, _ = original(gradient, widths)
        return kv, gradient[:, :1, widths.nope : widths.nope + widths.rope]

    return [mock.patch.object(ops, "_disassemble", disassemble)]


def _values_of_all_columns(mesh: Mesh) -> Patches:
    def joined(self: LatentAttention, attended: torch.Tensor) -> torch.Tensor:
        return attended[..., -self.mla.value_dim :].flatten(1)

    return [mock.patch.object(LatentAttention, "joined", joined)]


def _other_rows_dropped(mesh: Mesh) -> Patches:
    def own(self: LatentAttention, rows: Any) -> Any:
        return rows if rows is None else rows.chunk(mesh.tensor.size, dim=1)[0]

    return [mock.patch.object(LatentAttention, "_own", own)]


def _local_layer_names(mesh: Mesh) -> Patches:
    original = ModelInventory.stage

    def stage(self: Any, layers: range, *rest: Any) -> Any:
        return original(self, range(len(layers)), *rest)

    return [mock.patch.object(ModelInventory, "stage", stage)]


def _in(data: int = 1, tensor: int = 1, sequence: bool = True, variant: int = 0, **pipeline: Any) -> Case:
    chosen = VARIANTS[variant]
    return Case(deep(chosen, 3) if pipeline else chosen, data, tensor, sequence, **pipeline)


MUTATIONS = {
    "drop the data reduction": Mutation(_drop_data_reduction, _in(data=2)),
    "average over data ranks instead of summing": Mutation(_average_over_data, _in(data=2)),
    "reduce a bucket one microbatch early": Mutation(_reduce_before_complete, _in(data=2, variant=2)),
    "count replicated parameters once per tensor rank in the norm": Mutation(
        _double_count_norm, _in(tensor=2, sequence=False)
    ),
    "clip by this rank's norm": Mutation(_local_norm, _in(tensor=2, sequence=False)),
    "divide by this rank's targets": Mutation(_local_mean_loss, _in(data=2)),
    "leave norm gradients partial in sequence parallel": Mutation(_keep_partial_gradients, _in(tensor=2)),
    "leave QK-norm gradients partial": Mutation(
        _keep_partial_gradients, _in(tensor=2, sequence=False, variant=5)
    ),
    "leave gradients of copied KV heads partial": Mutation(
        _keep_own_heads_gradients, Case(fewer(VARIANTS[0], 2), tensor=4, sequence=False)
    ),
    "count copied KV heads once per rank in the norm": Mutation(
        _count_copied_heads, Case(fewer(VARIANTS[0], 2), tensor=4, sequence=False)
    ),
    "drop the column-parallel backward reduction": Mutation(
        _drop_column_backward, _in(tensor=2, sequence=False, variant=1)
    ),
    "drop the row-parallel forward reduction": Mutation(
        _drop_row_forward, _in(tensor=2, sequence=False, variant=1)
    ),
    "swap chunks of a row-parallel layer": Mutation(_swap_chunks, _in(tensor=2)),
    "use this rank's tokens only for weight gradients": Mutation(_stale_gather, _in(tensor=2)),
    "normalise the softmax over this rank's vocabulary": Mutation(
        _local_softmax, _in(tensor=2, sequence=False)
    ),
    "let padded vocabulary into the softmax": Mutation(_count_padding, _in()),
    "drop the embedding's reduction": Mutation(_drop_embedding_reduction, _in(tensor=2, sequence=False)),
    "overwrite gradients instead of accumulating": Mutation(_overwrite_gradients, _in(data=2, variant=2)),
    "ignore document boundaries": Mutation(_ignore_documents, _in(tensor=2, variant=1)),
    "initialise each tensor rank with its own seed": Mutation(_seed_per_rank, _in(tensor=2, sequence=False)),
    "let every microbatch be the first": Mutation(_repeat_microbatch, _in(pipeline=2)),
    "drop a microbatch's gradient": Mutation(_drop_microbatch, _in(pipeline=2)),
    "scale each microbatch's loss by their number": Mutation(_wrong_scale, _in(pipeline=2)),
    "leave a stage's weights stale": Mutation(_stale_weights, _in(pipeline=2)),
    "send a stage no gradient": Mutation(_drop_boundary_gradient, _in(pipeline=2)),
    "forget the last deferred weight gradient": Mutation(_forget_product, _in(pipeline=2, schedule="zb_h1")),
    "forget products that were set aside": Mutation(_forget_aside, _in(tensor=2)),
    "defer weight gradients of this rank's tokens only": Mutation(
        _stale_deferred_gather, _in(tensor=2, pipeline=2, schedule="zb_h1")
    ),
    "leave tied gradients apart": Mutation(_keep_partial_gradients, _in(pipeline=2, variant=1)),
    "count a tied weight twice in the norm": Mutation(_count_copies, _in(pipeline=2, variant=1)),
    "clip by this stage's norm": Mutation(_stage_norm, _in(pipeline=2)),
    "number layers from each stage's first": Mutation(_local_layer_names, _in(pipeline=2)),
    "keep adapters' part of the input's gradient back": Mutation(
        _drop_adapter_gradient, EVERY_ADAPTED[0], steps=2
    ),
    "leave the gradient of the keys' shared part with each tensor rank": Mutation(
        _keep_shared_key_gradient, dataclasses.replace(LATENT_GRID[0], sequence=False)
    ),
    "slice that gradient instead of summing it": Mutation(_keep_gathered_key_gradient, LATENT_GRID[0]),
    "take that gradient of one head": Mutation(_first_head_of_shared_key, LATENT_GRID[0]),
    "leave gradients of latent norms and down projections partial": Mutation(
        _keep_partial_gradients, LATENT_GRID[0]
    ),
    "take values from what fills up heads": Mutation(_values_of_all_columns, LATENT_GRID[0]),
    "drop inputs of adapters of other tokens": Mutation(_other_rows_dropped, LATENT_GRID[4], steps=2),
    **STATE_MUTATIONS,
    **CONTEXT_MUTATIONS,
    **EXPERT_MUTATIONS,
}


@contextmanager
def applied(name: str, mesh: Mesh) -> Iterator[None]:
    """Run with the code broken."""
    patches = MUTATIONS[name].patches(mesh)
    for patch in patches:
        patch.start()
    try:
        yield
    finally:
        for patch in patches:
            patch.stop()
