"""Any configuration on N gloo ranks against one process in float64: loss, gradients and weights."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import combinations, cycle, product
from typing import Any

import numpy as np
import torch

from hexad.config import Config
from hexad.parallel import pointwise
from hexad.topology.layout import Layout

from .. import pool as worker_pool
from ..small import Tree, config_of
from ..traffic import step_as_planned
from .batches import microbatches

STEPS = 2
"""The second is the first that computes with updated weights."""
TOLERANCE = 1e-9

Tensors = dict[str, np.ndarray]


@dataclass(frozen=True)
class Variant:
    """A model and its data, with whatever makes parity hard.

    Attributes:
        name: for tables.
        model: ``model`` settings.
        documents: ``join`` or ``isolate``.
        masked: share of targets that are ignored, unevenly over the samples.
        micro: sequences per microbatch.
        equal_scores: routers begin with zeros: ties, all tokens to the first experts.
        imposed: ``experts`` or ``weights``: random ones are imposed on most tokens.
    """

    name: str
    model: Mapping[str, Any]
    documents: str = "join"
    masked: float = 0.0
    micro: int = 1
    equal_scores: bool = False
    imposed: str = ""
    overrides: Tree = field(default_factory=dict)


# Sizes are odd on purpose: heads wider than hidden / heads, a vocabulary that leaves ranks with padding only.
SMALL = {"layers": 2, "hidden": 20, "heads": 8, "kv_heads": 4, "head_dim": 6, "ffn_hidden": 28}
VARIANTS = (
    Variant("llama, GQA, masks", {**SMALL, "vocab": 101}, masked=0.4, micro=2),
    Variant(
        "llama, tied, isolate", {**SMALL, "kv_heads": 8, "vocab": 193, "tied_embeddings": True}, "isolate"
    ),
    Variant("gpt2, tied, masks", {**SMALL, "family": "gpt2", "kv_heads": 8, "vocab": 67}, masked=0.3),
    Variant(
        "gpt2, untied, isolate",
        {**SMALL, "family": "gpt2", "kv_heads": 8, "vocab": 131, "tied_embeddings": False},
        "isolate",
        micro=2,
    ),
    Variant("qwen2, QKV bias, tied", {**SMALL, "family": "qwen2", "vocab": 97, "tied_embeddings": True}),
    Variant("qwen3, QK norm, masks", {**SMALL, "family": "qwen3", "vocab": 64}, masked=0.2, micro=2),
    Variant(
        "phi3, partial rotary, window, isolate",
        {**SMALL, "family": "phi3", "vocab": 89, "rotary_fraction": 0.67, "sliding_window": 3},
        "isolate",
    ),
    Variant(
        "granite, multipliers, tied, masks",
        {
            **SMALL,
            "family": "granite",
            "vocab": 113,
            "tied_embeddings": True,
            "embedding_multiplier": 12.0,
            "attention_multiplier": 0.3,
            "residual_multiplier": 0.22,
            "logits_scaling": 8.0,
        },
        masked=0.3,
        micro=2,
    ),
)


@dataclass(frozen=True)
class Case:
    """A variant in a layout."""

    variant: Variant
    data: int = 1
    tensor: int = 1
    sequence: bool = True
    pipeline: int = 1
    schedule: str = "1f1b"
    virtual: int = 1
    split: str | tuple[int, ...] = "cost"
    group: int | str = "auto"
    samples: int = 8
    zero: int = 0
    replicas: int = 1
    recompute: str = "none"
    parts: tuple[str, ...] = ()
    compile: str = "none"
    steps: int = STEPS
    context: int = 1
    method: str = "ring"
    group_size: int | str = "auto"
    balance: str = "auto"
    expert: int = 1
    expert_tensor: int = 1
    dispatcher: str = "auto"

    @property
    def world(self) -> int:
        return self.data * self.tensor * self.context * self.pipeline

    @property
    def tensor_axis(self) -> str:
        return f"tensor {self.tensor}{' + sequence' if self.sequence and self.tensor > 1 else ''}"

    @property
    def layout(self) -> str:
        around = f"data {self.data} x {self.tensor_axis}"
        around += f" x expert {self.expert}" if self.expert > 1 else ""
        around += f" x expert_tensor {self.expert_tensor}" if self.expert_tensor > 1 else ""
        around += f" {self.dispatcher}" if self.expert * self.expert_tensor > 1 else ""
        return around if self.context == 1 else f"{around} x {self.context_axis}"

    @property
    def context_axis(self) -> str:
        """The context ranks, and how they work together."""
        groups = f" of {self.group_size}" if self.method == "ulysses_ring" else ""
        balance = f", {self.balance}" if self.balance != "auto" else ""
        return f"context {self.context} {self.method}{groups}{balance}"

    @property
    def mixture(self) -> str:
        """Which mixture of experts the model has."""
        return self.variant.name

    @property
    def plan(self) -> tuple[str, int]:
        """The schedule, and stages per rank."""
        return self.schedule, self.virtual

    @property
    def stages(self) -> str:
        virtual = f" x {self.virtual} stages" if self.virtual > 1 else ""
        return f"pipeline {self.pipeline}{virtual}, {self.schedule}"

    @property
    def state(self) -> str:
        """How the state is divided, and what is recomputed."""
        replicas = f", {self.replicas} replicas" if self.replicas > 1 else ""
        compiled = f", compile {self.compile}" if self.compile != "none" else ""
        recompute = " + ".join((self.recompute, *self.parts))
        return f"zero {self.zero}{replicas}, recompute {recompute}{compiled}"

    @property
    def microbatches(self) -> int:
        """Of a step, on each data rank."""
        return self.samples // (self.variant.micro * self.data)

    @property
    def chunks(self) -> int:
        """Of products in row-parallel layers: five of 24, 12 or 6 rows, of unequal sizes, but fewer messages
        of eight ranks."""
        if self.variant.micro == 1:
            return 1
        return 5 if self.world <= 4 else 2

    @property
    def documents(self) -> str:
        """Whether they are joined or isolated."""
        return self.variant.documents

    @property
    def work(self) -> str:
        """What else the case does, beside its layout and its stages."""
        split = self.split if isinstance(self.split, str) else "/".join(map(str, self.split))
        return f"{self.variant.name}; {self.microbatches} microbatches, split {split}"

    def _model(self) -> dict[str, Any]:
        model = dict(self.variant.model)
        if "moe" in model:
            model["moe"] = {**model["moe"], "dispatcher": self.dispatcher}
        return model

    def config(self) -> Config:
        tree: dict[str, Any] = {
            "run": {"steps": 10, "compile": self.compile},
            "model": self._model(),
            "data": {"sequence": 12, "documents": self.variant.documents},
            "batch": {"micro": self.variant.micro, "global": self.samples},
            "parallel": {
                "tensor": self.tensor,
                "sequence": self.sequence,
                "tensor_chunks": self.chunks,
                "data": self.data,
                "expert": self.expert,
                "expert_tensor": self.expert_tensor,
                "context": self.context,
                "context_method": self.method,
                "context_ulysses": self.group_size,
                "context_balance": self.balance,
                "zero": self.zero,
                "replicas": self.replicas,
                "pipeline": self.pipeline,
                "schedule": self.schedule,
                "virtual_stages": self.virtual,
                "schedule_group": self.group,
                "split": self.split if isinstance(self.split, str) else list(self.split),
                "bucket_mb": 0.004,  # several buckets even in a tiny model
            },
            "precision": {"dtype": "fp64"},
            "memory": {"recompute": self.recompute, "recompute_parts": list(self.parts)},
            "optimizer": {"lr": 0.02, "clip": 0.5},
            "lr_schedule": {"warmup": 2},
        }
        return config_of(tree, **self.variant.overrides)


def name_of(case: Case) -> str:
    """For lists of cases."""
    around = f"{case.variant.name} / {case.layout} / {case.state}"
    return f"{around} / {case.stages} / {case.work}" if case.pipeline > 1 else around


# Dropout makes a difference between layouts easy to see: a mask that moved changes everything.
DROPOUT = {"dropout": 0.1, "attention_dropout": 0.1, "layers": 5}
DROPPED = tuple(
    replace(
        VARIANTS[index], name=f"{VARIANTS[index].name}, dropout", model={**VARIANTS[index].model, **DROPOUT}
    )
    for index in (2, 1, 0, 3)
)


def up_to_three_microbatches(cases: Iterable[Case]) -> tuple[Case, ...]:
    """The cases with a first, a middle and a last microbatch on each data rank, or as many as eight samples
    make."""
    return tuple(replace(case, samples=min(8, 3 * case.variant.micro * case.data)) for case in cases)


def state_cases() -> tuple[Case, ...]:
    """Every stage of ZeRO with replicas, recompute and the pipeline's schedules in every layout around it."""
    stages = ((1, "1f1b", 1), (2, "1f1b", 1), (2, "interleaved", 2), (2, "zb_v", 2))
    states = [(zero, replicas) for zero in range(4) for replicas in (1, 2) if zero or replicas == 1]
    cases: list[Case] = []
    for (data, tensor), (pipeline, schedule, virtual), (zero, replicas), recompute in product(
        product((2, 4), (1, 2)), stages, states, ("none", "selective", "full")
    ):
        case = Case(DROPPED[0], data, tensor, True, pipeline, schedule, virtual)
        if case.world <= worker_pool.MAX_RANKS:
            cases.append(replace(case, zero=zero, replicas=replicas, recompute=recompute))
    return variants_in_turn(cases)


def variants_in_turn(cases: Iterable[Case]) -> tuple[Case, ...]:
    """The cases with models that take turns, and three microbatches on each data rank."""
    turns = zip(cases, cycle(DROPPED))
    return tuple(
        replace(case, variant=variant, samples=3 * variant.micro * case.data) for case, variant in turns
    )


def values_in(case: Case, settings: Sequence[str], strength: int) -> set[tuple[tuple[str, Any], ...]]:
    """The values that any ``strength`` of the settings have in the case."""
    return set(combinations([(name, getattr(case, name)) for name in settings], strength))


def covering(cases: Sequence[Case], settings: Sequence[str], strength: int) -> tuple[Case, ...]:
    """Few of the cases, in which every combination of values of any ``strength`` settings still occurs."""

    covered = [values_in(case, settings, strength) for case in cases]
    missing = set().union(*covered)
    chosen: list[Case] = []
    while missing:
        best = max(range(len(cases)), key=lambda index: len(covered[index] & missing))
        chosen.append(cases[best])
        missing -= covered[best]
    return tuple(chosen)


# Every schedule, with stages per rank.
SCHEDULES = (
    *(("gpipe", virtual) for virtual in (1, 2, 4)),
    ("1f1b", 1),
    *(("interleaved", virtual) for virtual in (1, 2, 4)),
    ("zb_h1", 1),
    ("zb_h2", 1),
    ("zb_v", 2),
    ("dualpipe_v", 2),
    ("auto", 1),
    ("auto", 2),
)
MICROBATCHES = (1, 2, 3, 5, 7, 8)


def deep(variant: Variant, layers: int) -> Variant:
    """The variant with more layers, for more stages."""
    return replace(
        variant, name=f"{variant.name}, {layers} layers", model={**variant.model, "layers": layers}
    )


def uneven(layers: int, stages: int) -> tuple[int, ...]:
    """Layers per stage, one more on each of the first ones, none on the last where that can be."""
    inner = stages - 1
    return (*(layers // inner + (stage < layers % inner) for stage in range(inner)), 0)


def pipeline_cases() -> tuple[Case, ...]:
    """Every schedule on 2 and 4 ranks in all the layouts around it.

    Variants, microbatch counts and splits take turns.
    """
    cases: list[Case] = []
    for pipeline, (schedule, virtual) in product((2, 4), SCHEDULES):
        around = [layout for layout in ((1, 1, True), *LAYOUTS) if layout[0] * layout[1] <= 8 // pipeline]
        around = [layout for layout in around if max(layout[:2]) <= 2]
        cases += [Case(VARIANTS[0], *layout, pipeline, schedule, virtual) for layout in around]
    return all_taking_turns(cases)


def pipeline_grid() -> tuple[Case, ...]:
    """Of every schedule three cases or four, in which each pair of settings occurs; few have 8 ranks.

    Those on 4 pipeline ranks without tensor parallelism have the most microbatches.
    """
    around = (  # pipeline, data, tensor, sequence
        ((4, 1, 1, True), (2, 1, 2, True), (2, 2, 2, False)),
        ((4, 2, 1, True), (2, 1, 2, True), (2, 1, 2, False)),
        ((4, 1, 1, True), (2, 2, 2, True), (2, 1, 2, False)),
    )
    chosen = [(plan, around[turn % 3][column]) for column in range(3) for turn, plan in enumerate(SCHEDULES)]
    chosen += [(plan, (4, 1, 2, turn % 2 == 0)) for turn, plan in enumerate(SCHEDULES[3::3])]
    chosen += [(plan, (2, 2, 1, True)) for plan in SCHEDULES[1::4]]
    return all_taking_turns(
        Case(VARIANTS[0], data, tensor, sequence, pipeline, schedule, virtual)
        for (schedule, virtual), (pipeline, data, tensor, sequence) in chosen
    )


def all_taking_turns(cases: Iterable[Case]) -> tuple[Case, ...]:
    """The cases with variants, splits and numbers of microbatches that take turns."""
    return tuple(_taking_turns(case, turn) for turn, case in enumerate(cases))


def _taking_turns(case: Case, turn: int) -> Case:
    """The case with a variant, a split and a number of microbatches that depend on its place in the grid."""
    stages = case.pipeline * case.virtual
    layers = 5 if stages <= 4 else 7 if stages <= 8 else 15
    variant = deep(VARIANTS[turn % 4], layers)
    splits: list[str | tuple[int, ...]] = ["cost", uneven(layers, stages)]
    if stages <= layers:
        splits.append("even")
    # Many collectives of many ranks on few cores take long.
    counts = MICROBATCHES if case.tensor == 1 else MICROBATCHES[:3]
    return replace(
        case,
        variant=variant,
        split=splits[turn % len(splits)],
        group=3 if case.schedule == "interleaved" and turn % 2 else "auto",
        samples=counts[turn // 2 % len(counts)] * variant.micro * case.data,
    )


def _in_grid(case: Case) -> bool:
    """Each variant with data 2, tensor 2 with and without sequence, and tensor 4 one way; other layouts three
    times each, with variants in turn."""
    variant, layout = VARIANTS.index(case.variant), LAYOUTS.index((case.data, case.tensor, case.sequence))
    if case.world == 2:
        return True
    if (case.data, case.tensor) == (1, 4):
        return case.sequence == (variant % 2 == 0)
    return (variant - layout) % len(VARIANTS) in (0, 3, 6)


LAYOUTS = tuple(
    (data, tensor, sequence)
    for data in (1, 2, 4)
    for tensor in (1, 2, 4)
    for sequence in ((True, False) if tensor > 1 else (True,))
    if 1 < data * tensor <= worker_pool.MAX_RANKS
)
EVERY_LAYOUT = tuple(Case(variant, *layout) for variant in VARIANTS for layout in LAYOUTS)
GRID = up_to_three_microbatches(case for case in EVERY_LAYOUT if _in_grid(case))
EVERY_PIPELINE = pipeline_cases()
PIPELINE_SETTINGS = ("plan", "pipeline", "data", "tensor_axis")
PIPELINE_GRID = pipeline_grid()
EVERY_STATE = state_cases()
STATE_SETTINGS = ("data", "tensor", "schedule", "pipeline", "zero", "replicas", "recompute")
STATE_GRID = variants_in_turn(covering(EVERY_STATE, STATE_SETTINGS, 2))


# Pointwise functions compiled, in layouts that need the autograd functions around them.
_DROPPED_GPT2, _DROPPED_LLAMA = DROPPED[0], DROPPED[2]
_COMPILED = tuple(
    replace(case, compile="pointwise", samples=3 * case.variant.micro * case.data)
    for case in (
        Case(VARIANTS[2], 1, 2, True, zero=0),  # a compiler takes long for dropout
        Case(_DROPPED_GPT2, 1, 2, True, zero=0),
        Case(_DROPPED_GPT2, 1, 2, True, zero=0, recompute="full"),
        Case(_DROPPED_LLAMA, 2, 1, True, 2, "zb_v", 2, zero=3, recompute="selective"),
        Case(VARIANTS[7], 2, 2, False, zero=2),
    )
)
COMPILED_GRID = _COMPILED[:1]
EVERY_COMPILED = _COMPILED[1:] + tuple(
    replace(case, compile="pointwise") for case in (*GRID[::5], *PIPELINE_GRID[::5], *STATE_GRID[::3])
)


def fewer(variant: Variant, kv_heads: int) -> Variant:
    """The variant with this many KV heads."""
    model = {**variant.model, "kv_heads": kv_heads}
    return replace(variant, name=f"{variant.name}, kv_heads {kv_heads}", model=model)


# Tensor degrees above the number of KV heads, which several ranks then hold.
_LLAMA, _QWEN2, _QWEN3 = VARIANTS[0], VARIANTS[4], VARIANTS[5]
_COPIED = (
    Case(fewer(_LLAMA, 2), tensor=4),
    Case(fewer(_QWEN3, 1), tensor=4, sequence=False, recompute="selective"),
    Case(deep(fewer(_QWEN2, 1), 3), data=2, tensor=2, pipeline=2, schedule="zb_h1", zero=2),
    Case(fewer(_DROPPED_LLAMA, 2), data=2, tensor=4, zero=3, recompute="full"),
)
COPIED_GRID = up_to_three_microbatches(_COPIED)


def adapted(variant: Variant, what: str, train: Sequence[str] | str = "all", **lora: Any) -> Variant:
    """The variant with adapters, or with frozen weights only."""
    model = {**variant.model, "train": train, **({"lora": lora} if lora else {})}
    return replace(variant, name=f"{variant.name}, {what}", model=model)


ALL = {"rank": 3, "alpha": 5.0}
_SOME = {**ALL, "targets": ["q", "v", "ffn.down"]}
DROP = {**ALL, "dropout": 0.2}
_TAIL = ("layers.1", "*norm*", "*.bias")  # nothing of the first stage's layers but vectors
_LAST = ("layers.3", "layers.4", "norm")  # nothing of the first two stages of four
_ADAPTED = (
    Case(adapted(_QWEN2, "LoRA with dropout", **DROP), 2, 2, True, 2, "zb_h1", zero=2),
    Case(adapted(fewer(_DROPPED_LLAMA, 2), "LoRA", **DROP), 2, 4, zero=3, recompute="full"),
    Case(adapted(VARIANTS[2], "last layer and vectors trained", _TAIL), 2, 2, pipeline=2, zero=1),
    Case(adapted(deep(_LLAMA, 5), "last layers trained", _LAST), 1, 2, True, 2, "zb_v", virtual=2, zero=1),
    Case(adapted(_LLAMA, "LoRA", **ALL), tensor=2),
    Case(adapted(_LLAMA, "LoRA", **ALL), tensor=2, data=2, sequence=False, zero=1),
    Case(
        adapted(VARIANTS[3], "LoRA of q, v, down; head", ["head"], **_SOME),
        2,
        2,
        zero=3,
        recompute="selective",
    ),
    Case(adapted(VARIANTS[1], "last layer trained", ["layers.1"]), data=2, pipeline=2, zero=3),
)
ADAPTED_GRID, EVERY_ADAPTED = up_to_three_microbatches(_ADAPTED[:4]), _ADAPTED[4:]
EVERY_COPIED = (
    *(
        Case(fewer(variant, kv_heads), 1, tensor, sequence)
        for variant in (_LLAMA, _QWEN2, _QWEN3)
        for kv_heads, tensor in ((1, 2), (1, 4), (2, 4))
        for sequence in (True, False)
    ),
    *(
        Case(fewer(variant, 2), 2, 4, True, zero=zero, recompute=recompute)
        for variant, zero, recompute in zip(VARIANTS[5:], (1, 2, 3), ("selective", "none", "full"))
    ),
    Case(deep(fewer(_LLAMA, 2), 5), 1, 4, True, 2, "zb_v", 2, compile="pointwise"),
    Case(deep(fewer(_QWEN3, 1), 5), 1, 4, False, 2, "zb_h1", zero=0, recompute="selective"),
    Case(deep(fewer(_QWEN2, 1), 5), 2, 2, True, 2, "dualpipe_v", 2, zero=3),
)


@dataclass(frozen=True)
class Trace:
    """What a run of a few steps did, as global tensors.

    Attributes:
        losses, norms: per step.
        gradients: after clipping, of the last step.
        weights: after the last step.
    """

    losses: list[float]
    norms: list[float]
    gradients: Tensors
    weights: Tensors


def run_rank(case: Case, mutation: str | None = None, device: str = "cpu") -> tuple[Any, ...]:
    """Train a few steps on this rank; returns losses, norms, and this rank's pieces."""
    from hexad.engine.engine import Engine

    from . import mutations

    config = case.config()
    if config.run.compile != "none":
        # Ranks of one run compile alike; those of a pool have seen different cases. One with code for any
        # size adds in another order than one with code for this size: losses differ in the last bit.
        torch.compiler.reset()
        pointwise._compiled.cache_clear()
    mesh = _mesh(layout_of(case), torch.device(device))
    with mutations.applied(mutation, mesh) if mutation else nullcontext():
        engine = Engine(config, mesh)
        if case.variant.equal_scores:
            _zero_routers(engine)
        batches = (microbatches(case, step, mesh.data.rank) for step in range(case.steps))
        step = engine.train_step if mutation else partial(step_as_planned, engine)
        results = [step(batch) for batch in batches]
        # A compiled update leaves gradients as they are before clipping.
        norm, clip = results[-1].grad_norm, engine.optimizer.clip
        factor = min(1.0, clip / norm) if clip and engine.optimizer.rule.widens else 1.0
        gradients = [
            piece for bucket in engine.trained for piece in _pieces(bucket, bucket.gradient * factor)
        ]
        weights = [piece for bucket in engine.buckets for piece in _pieces(bucket, bucket.master)]
    losses = [loss for result in results for loss in (result.loss, *result.auxiliary.values())]
    return losses, [result.grad_norm for result in results], gradients, weights


def _zero_routers(engine: Any) -> None:
    for chunk in engine.weights():
        if chunk.name.endswith("router.weight"):
            chunk.tensor.zero_()
    engine.publish()


def layout_of(case: Case) -> Layout:
    """The places of the case's ranks."""
    return Layout.from_settings(case.config().parallel, case.world)


def _mesh(layout: Layout, device: torch.device) -> Any:
    """A mesh; in a world that is kept for a layout that of the case before."""
    from hexad.topology.mesh import Mesh

    world, kept = torch.distributed.group.WORLD, worker_pool.in_world
    if world is None or kept.get("world") is not world:
        kept.update(world=world, mesh=Mesh.create(layout, device))
    return kept["mesh"]


def _pieces(
    bucket: Any, share: torch.Tensor
) -> Iterator[tuple[str, tuple[int, ...], tuple[int, ...], np.ndarray]]:
    for rectangle, values in bucket.pieces(share):
        yield rectangle.name, rectangle.shape, rectangle.offset, values.detach().cpu().numpy().copy()


def assemble(per_rank: list[list[tuple[str, tuple[int, ...], tuple[int, ...], np.ndarray]]]) -> Tensors:
    """Global tensors from all ranks' pieces; every element must be covered, and copies must agree."""
    whole: Tensors = {}
    for pieces in per_rank:
        for name, shape, offset, values in pieces:
            target = whole.setdefault(name, np.full(shape, np.nan))
            part = target[tuple(slice(o, o + n) for o, n in zip(offset, values.shape))]
            known = ~np.isnan(part)
            np.testing.assert_allclose(part[known], values[known], rtol=1e-12, atol=1e-15, err_msg=name)
            part[...] = values
    for name, values in whole.items():
        assert not np.isnan(values).any(), f"{name}: not covered by any rank"
    return whole


def run(pool: worker_pool.Pool, case: Case, mutation: str | None = None, device: str = "cpu") -> Trace:
    """The case on its ranks, which compute on ``device``."""
    kept = None if mutation else (layout_of(case), device)
    results = pool.run(case.world, run_rank, case, mutation, device, keep=kept)
    for losses, norms, _, _ in results:
        assert losses == results[0][0], "ranks report different losses"
        np.testing.assert_allclose(norms, results[0][1], rtol=1e-12)
    return Trace(
        results[0][0],
        results[0][1],
        assemble([result[2] for result in results]),
        assemble([result[3] for result in results]),
    )


def alone(case: Case) -> Case:
    """The case's model and samples on one process."""
    return Case(case.variant, samples=case.samples, steps=case.steps)


class References:
    """One process's traces, computed once per model and batch."""

    def __init__(self, pool: worker_pool.Pool, device: str = "cpu") -> None:
        self._pool, self._device = pool, device
        self._traces: dict[tuple[str, int, int], Trace] = {}
        self._errors: dict[str, float] = {}

    def of(self, case: Case) -> Trace:
        """The trace of the case's model and samples on one process."""
        key = (case.variant.name, case.samples, case.steps)
        if key not in self._traces:
            self._traces[key] = run(self._pool, alone(case), device=self._device)
        return self._traces[key]

    def error_of_whole(self, case: Case) -> float:
        """The largest error of the case as it is, computed once."""
        key = str(case)
        if key not in self._errors:
            self._errors[key] = max(
                errors(run(self._pool, case, device=self._device), self.of(case)).values()
            )
        return self._errors[key]


def errors(trace: Trace, reference: Trace) -> dict[str, float]:
    """Largest relative error of losses, norms, gradients and weights.

    A tensor's error is relative to its largest element. A gradient that is zero in exact arithmetic (a key
    bias) is measured against a millionth of the gradient norm, and a weight that stays zero against 1e-3.
    """
    assert trace.gradients.keys() == reference.gradients.keys()
    return {
        "loss": _relative(np.array(trace.losses), np.array(reference.losses), 0.0),
        "norm": _relative(np.array(trace.norms), np.array(reference.norms), 0.0),
        "gradient": max(
            _relative(trace.gradients[name], values, 1e-6 * reference.norms[-1])
            for name, values in reference.gradients.items()
        ),
        "weight": max(
            _relative(trace.weights[name], values, 1e-3) for name, values in reference.weights.items()
        ),
    }


def _relative(values: np.ndarray, wanted: np.ndarray, floor: float) -> float:
    return float(np.abs(values - wanted).max() / max(np.abs(wanted).max(), floor))
