"""What a layer and the output head cost on a GPU at best: operators, bytes, launches, a bound on MFU.

    python benchmarks/roofline.py [--models llama3.2-1b llama3-8b] [--tensor 1 4 8] [--gpu h100] [--operators]
                                  [--json FILE]

The model's own code runs forward and backward on ``meta`` tensors, in bf16, through the branch that a GPU
takes. Every operator counts its matrix FLOPs and the bytes of its inputs and outputs; a function that is
compiled (``run.compile: pointwise``) counts its inputs and outputs once, those with sums over tokens twice;
so do PyTorch's fused norms, and attention counts as FlashAttention does. An operator takes the longest of
FLOPs and bytes at the rates that were measured on the GPU (:class:`hexad.topology.devices.Attainable`: an
H100's 798 TFLOP/s in matrix products, 519 in attention, 3.0 TB/s), and 4 us per launch. ``before`` is the
same without compiled functions, with weight gradients through a 16-bit temporary and 1,024 rows per slice of
the loss, with row-parallel layers' weight gradients computed at once instead of beside a collective, and
with messages and products in one chunk.
Collectives, at 450 GB/s and 15 us for each, are on a stream of their own: listed are the bounds with the
waiting of this timeline, and with all of them exposed. Products of chunks count at the full rate.
``planned`` is what :mod:`hexad.planning` predicts for the layer, from what its specification declares and
kernels that were fitted by shape, waiting included; its launches are those declared.

MFU counts the model's FLOPs as :func:`hexad.planning.costs.flops_per_token` and refers to the published peak
(989 TFLOP/s). The embedding is left out, as is what smaller products do less well. The optimizer's update of
all of a rank's parameters, clipped (:func:`hexad.optim.schedule.update_bytes`), is listed apart: ZeRO and the
number of microbatches decide what part of a step it is.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from facts import facts
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hexad import Layout, load_config
from hexad.comm import collectives
from hexad.config.model import ModelSettings
from hexad.model import attention_kernels, ops, residual
from hexad.model.recompute_inventory import NOTHING, Recompute
from hexad.model.transformer import Transformer, build_stages
from hexad.optim.schedule import update_bytes
from hexad.parallel import contributions, pointwise
from hexad.parallel.expert import grouped
from hexad.parallel.inventory import Pass, Product
from hexad.parallel.sharding import Shard, declared_parameters
from hexad.parallel.tensor import loss
from hexad.parallel.tensor.linear_inventory import forward_chunks
from hexad.planning import resolve
from hexad.planning.costs import flops_per_token, parameter_count
from hexad.planning.job import Job
from hexad.planning.links import Cluster
from hexad.planning.step_time import Predictor
from hexad.topology.devices import Attainable, named_gpus
from hexad.topology.hardware import load_hardware
from hexad.topology.mesh import Axis

LINK, LAUNCH, START = 450e9, 4e-6, 15e-6
"""Assumed: bytes per second of collectives, seconds per kernel and, besides the bytes, per collective."""
_TWICE = {ops.rms_backward, residual._add_norm_backward, loss._statistics}
"""Compiled functions that read their inputs in two kernels: sums over tokens or columns beside others."""
PRODUCTS = {"mm", "addmm", "bmm", "baddbmm", "grouped", "grouped_weights"}
ATTENTION = {"attention forward", "attention backward"}
_FREE = {"empty", "empty_like", "new_empty", "detach"}


@dataclass
class Cost:
    """Of a run, by operator.

    Attributes:
        rates: of the GPU.
        seconds, flops, nbytes, launches: by operator.
        sent: seconds of collectives, at the link's rate.
        exposed: seconds of them for which the computing stream waits: the timeline of two streams, on which
            operators and collectives follow each other as the code starts them.
        now, link: the times that the computing stream and the communicator's have reached.
    """

    rates: Attainable
    seconds: Counter[str] = field(default_factory=Counter)
    flops: Counter[str] = field(default_factory=Counter)
    nbytes: Counter[str] = field(default_factory=Counter)
    launches: Counter[str] = field(default_factory=Counter)
    sent: float = 0.0
    exposed: float = 0.0
    now: float = 0.0
    link: float = 0.0

    def add(self, name: str, flops: float, nbytes: float, launches: int = 1) -> None:
        """An operator."""
        rate = self.rates.attention if name in ATTENTION else self.rates.products
        seconds = max(flops / rate, nbytes / self.rates.copies, launches * LAUNCH)
        self.now += seconds
        self.seconds[name] += seconds
        self.flops[name] += flops
        self.nbytes[name] += nbytes
        self.launches[name] += launches

    def send(self, seconds: float) -> float:
        """A collective that takes so long; returns when it is over."""
        self.sent += seconds
        self.link = max(self.link, self.now) + seconds
        return self.link

    def wait(self, end: float) -> None:
        """The computing stream waits for what is over at ``end``."""
        self.exposed += max(0.0, end - self.now)
        self.now = max(self.now, end)

    def minus(self, other: Cost) -> Cost:
        """What this run did more."""
        difference = Cost(self.rates, *map(Counter, self._counts))
        difference.sent, difference.exposed = self.sent - other.sent, self.exposed - other.exposed
        for mine, theirs in zip(difference._counts, other._counts):
            mine.subtract(theirs)
        return difference

    @property
    def _counts(self) -> tuple[Counter[str], ...]:
        return self.seconds, self.flops, self.nbytes, self.launches

    @property
    def total(self) -> float:
        """Seconds, collectives left out."""
        return sum(self.seconds.values())

    def by_kind(self) -> dict[str, float]:
        """Seconds of matrix products, of attention, and of the rest."""
        kinds = {"products": PRODUCTS, "attention": ATTENTION}
        known = {kind: sum(self.seconds[name] for name in names) for kind, names in kinds.items()}
        return known | {"others": self.total - sum(known.values())}


def _size(*values: Any) -> int:
    # An expanded tensor has fewer elements in memory than in its shape.
    tensors = (leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor))
    return sum(min(tensor.nbytes, tensor.untyped_storage().nbytes()) for tensor in tensors)


class Counting(TorchDispatchMode):
    """Counts every operator that is not inside a group; a group counts as one."""

    def __init__(self, rates: Attainable) -> None:
        super().__init__()
        self.cost = Cost(rates)
        self._inside = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        name = function.overloadpacket.__name__
        if (
            not self._inside
            and not function.is_view
            and not name.startswith(("empty", "detach", "new_empty"))
        ):
            flops = 0.0
            if name in PRODUCTS:
                left, right = [arg for arg in args if isinstance(arg, torch.Tensor)][-2:]
                flops = 2.0 * left.numel() * right.shape[-1]
            self.cost.add(name, flops, _size(args, kwargs, result) - _out(kwargs))
        return result

    def group(self, name: str, function: Callable[..., Any], passes: int = 1) -> Callable[..., Any]:
        """The function, counted as that many kernels that each read its inputs."""

        def call(*args: Any, **kwargs: Any) -> Any:
            self._inside += 1
            try:
                result = function(*args, **kwargs)
            finally:
                self._inside -= 1
            if not self._inside:
                nbytes = passes * _size(args, kwargs) + _size(args[0] if result is None else result)
                self.cost.add(name, 0.0, nbytes, passes)
            return result

        return call


def _out(kwargs: dict[str, Any] | None) -> int:
    """Bytes of what is written to, which is counted as the result."""
    return _size((kwargs or {}).get("out"))


def _attention(counting: Counting) -> type[torch.autograd.Function]:
    """FlashAttention-2's cost: two products of half the scores forward, five backward."""

    class Attention(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spans: Any) -> torch.Tensor:
            ctx.save_for_backward(q, k, v)
            ctx.flops = 2.0 * q.numel() * spans.longest  # two products, each over half of the pairs
            counting.cost.add("attention forward", ctx.flops, _size(q, k, v, q))
            return q.new_empty(q.shape).flatten(1)

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
            q, k, v = ctx.saved_tensors
            nbytes = _size(q, k, v, q, gradient) + _size(q, k, v)
            counting.cost.add("attention backward", ctx.flops * 2.5, nbytes, 3)
            return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), None

    return Attention


def _grouped(counting: Counting) -> Callable[..., torch.Tensor]:
    """Products of runs of rows with the matrices of a stack, in one kernel."""

    def product(x: torch.Tensor, weight: torch.Tensor, *_: Any) -> torch.Tensor:
        y = x.new_empty((len(x), weight.shape[1]))
        counting.cost.add("grouped", 2.0 * x.numel() * weight.shape[1], _size(x, weight, y))
        return y

    return product


def _grouped_weights(counting: Counting) -> Callable[..., None]:
    """Their weights' gradients, added to float32 totals in one kernel."""

    def add(total: torch.Tensor, gradient: torch.Tensor, inputs: torch.Tensor, *_: Any, **__: Any) -> None:
        nbytes = 2 * _size(total) + _size(gradient, inputs)
        counting.cost.add("grouped_weights", 2.0 * gradient.numel() * inputs.shape[1], nbytes)

    return add


class _Arriving(collectives.Pending):
    """A collective on the timeline."""

    def __init__(self, result: torch.Tensor, cost: Cost, seconds: float) -> None:
        super().__init__(result)
        self._cost, self._end = cost, cost.send(seconds)

    def wait(self) -> torch.Tensor:
        self._cost.wait(self._end)
        return super().wait()


class _Accumulator:
    """Float32 gradients that have been contributed to before; ``waits``: products are not set aside."""

    deferring = False

    def __init__(self, waits: bool) -> None:
        self._waits = waits
        self._aside: list[tuple[torch.Tensor, Any]] = []

    def contribute(self, parameter: torch.Tensor, contribution: Any, last: bool = True) -> None:
        contribution.add_to(torch.empty(parameter.shape, dtype=torch.float32, device="meta"), False)

    def set_aside(self, parameter: torch.Tensor, product: Any) -> None:
        self._aside.append((parameter, product))
        if self._waits:
            self.compute_aside()

    def compute_aside(self) -> None:
        while self._aside:
            self.contribute(*self._aside.pop(0))


@contextmanager
def counted(after: bool, rates: Attainable) -> Iterator[Counting]:
    """Everything inside is counted, as it is now or as it was before."""
    contributions.widening_products(torch.device("meta"))  # which is tried once
    counting = Counting(rates)
    attention = _attention(counting)

    def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
        return counting.group(function.__name__.strip("_"), function, 2 if function in _TWICE else 1)

    def start(operation: str, axis: Axis, nbytes: int, result: torch.Tensor, *_: Any, **__: Any) -> Any:
        ways = 2 if operation == "all_reduce" else 1
        seconds = START + ways * nbytes * (axis.size - 1) / axis.size / LINK
        return _Arriving(result, counting.cost, seconds if axis.size > 1 else 0.0)

    with ExitStack() as stack:
        for target, name, value in (
            (pointwise, "_compiled", compiled),
            (collectives, "_start", start),
            (
                attention_kernels.AttentionKernel,
                "attend",
                lambda _, method, *arguments: attention.apply(*arguments),
            ),
            (grouped, "product", _grouped(counting)),
            (grouped, "add_gradients", _grouped_weights(counting)),
            (F, "rms_norm", lambda x, _, weight, eps: ops._RmsNorm.apply(x, weight, eps, True)),
        ):
            stack.enter_context(mock.patch.object(target, name, value))
        if not after:
            stack.enter_context(mock.patch.object(contributions, "widening_products", lambda device: False))
            stack.enter_context(mock.patch.object(loss, "loss_rows", lambda tokens, *_: min(tokens, 1024)))
        with counting:
            yield counting


def run(
    model: ModelSettings,
    tokens: int,
    tensor: int,
    after: bool,
    rates: Attainable,
    sequences: int = 1,
    recompute: Recompute = Recompute(),  # noqa: B008 (frozen)
) -> Cost:
    """Forward and backward of a model, of so many sequences of ``tokens``."""
    axis = Axis("tensor", tuple(range(tensor)), 0)
    meta = torch.device("meta")
    chunks = forward_chunks(sequences * tokens * model.hidden * 2) if after else 1
    shard = Shard({"tensor": axis}, tensor > 1, torch.bfloat16, meta, compiled=after, chunks=chunks)
    (stage,) = build_stages(model, shard, [range(model.layers)], [0], 0, recompute).values()
    accumulator: Any = _Accumulator(waits=not after)
    for declared in declared_parameters(stage):
        contributions.attach(declared.parameter, accumulator, direct=True)
    ids = torch.empty((sequences, tokens), dtype=torch.int64, device=meta)
    with counted(after, rates) as counting:
        _forward_and_backward(stage, ids)
        accumulator.compute_aside()
    return counting.cost


def _forward_and_backward(stage: Transformer, ids: torch.Tensor) -> None:
    stage.loss_sum(ids, ids, scale=1e-5).backward()


def planned(preset: str, tokens: int, tensor: int, gpu: str) -> dict[str, float]:
    """What the planner predicts for a layer, forward and backward."""
    config = load_config(
        {
            "run": {"device": "cuda"},
            "model": {"preset": preset},
            "data": {"sequence": tokens},
            "batch": {"micro": 1, "global": 1},
            "precision": {"dtype": "bf16"},
            "parallel": {"tensor": tensor},
        }
    )
    job = Job.of(resolve(config, Layout.from_settings(config.parallel, tensor)))
    predictor, block = Predictor(job, Cluster(load_hardware(gpu), tensor)), job.stages[0].blocks[0]
    times = [predictor.layer(block, NOTHING, kind, False) for kind in ("F", "BW")]
    operations = block.operations(job.run)
    launches = sum(
        operation.kernels if isinstance(operation, Pass) else 1
        for operation in (*operations.forward, *operations.backward)
        if isinstance(operation, Pass | Product)
    )
    return {"planned_ms": sum(time.seconds for time in times) * 1e3, "planned_launches": launches}


def bound(preset: str, tokens: int, tensor: int, after: bool, gpu: str = "h100") -> dict[str, Any]:
    """The bound of the whole model, from a layer and from what is left of a model of one layer."""
    device = named_gpus()[gpu][0]
    rates = device.attainable
    assert rates is not None, f"{gpu}: nobody has measured what it reaches"

    def model_of(**size: int) -> ModelSettings:
        return load_config({"model": {"preset": preset, **size}, "data": {"sequence": tokens}}).model

    one, two = (run(model_of(layers=layers), tokens, tensor, after, rates) for layers in (1, 2))
    block = two.minus(one)
    head = one.minus(block)
    model = model_of()
    seconds = model.layers * block.total + head.total
    sent, exposed = (
        model.layers * getattr(block, name) + getattr(head, name) for name in ("sent", "exposed")
    )
    flops = flops_per_token(model, tokens) * tokens / tensor
    updated = parameter_count(model) / tensor
    return {
        "model": preset,
        "tensor": tensor,
        "which": "after" if after else "before",
        "block_launches": sum(block.launches.values()),
        "block_ms": block.total * 1e3,
        "head_ms": head.total * 1e3,
        "mfu_bound": flops / seconds / device.half,
        "mfu_bound_timeline": flops / (seconds + exposed) / device.half,
        "mfu_bound_collectives_exposed": flops / (seconds + sent) / device.half,
        "update_ms": updated * update_bytes(2, 4, 4, True, after, scaled=True) / rates.copies * 1e3,
        **(planned(preset, tokens, tensor, gpu) if after else {}),
        "block_sent_ms": block.sent * 1e3,
        "block_exposed_ms": block.exposed * 1e3,
        "block_operators": {
            name: {
                "launches": block.launches[name],
                "gflop": block.flops[name] / 1e9,
                "mb": block.nbytes[name] / 1e6,
                "us": block.seconds[name] * 1e6,
            }
            for name, count in sorted(block.launches.items(), key=lambda item: -block.seconds[item[0]])
            if count
        },
    }


def _machine(gpu: str) -> str:
    """What the figures are for."""
    device = named_gpus()[gpu][0]
    rates = device.attainable
    assert rates is not None
    figures = f"products {rates.products / 1e12:.0f}, attention {rates.attention / 1e12:.0f} TFLOP/s"
    return (
        f"Counted on meta tensors for an {gpu.upper()}; {rates.source}: {figures}, copies "
        f"{rates.copies / 1e12:.1f} TB/s; assumed: {LINK / 1e9:.0f} GB/s and {START * 1e6:.0f} us a "
        f"collective, {LAUNCH * 1e6:.0f} us a launch; MFU of {device.half / 1e12:.0f} TFLOP/s"
    )


def main() -> None:
    """Print a table, or JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", nargs="+", default=["llama3.2-1b", "llama3-8b"], help="presets")
    parser.add_argument(
        "--tensor", nargs="+", type=int, default=[1, 4, 8], help="degrees; with sequence above 1"
    )
    parser.add_argument("--tokens", type=int, default=8192, help="of one sequence")
    gpus = sorted(name for name, (gpu, _) in named_gpus().items() if gpu.attainable)
    parser.add_argument("--gpu", choices=gpus, default="h100")
    parser.add_argument("--operators", action="store_true", help="list the operators of a layer")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    options = parser.parse_args()
    costs = []
    print(f"{'model':14s}{'tensor':>7s}{'':>8s}{'launches':>10s}{'layer ms':>10s}{'head ms':>9s}", end="")
    print(
        f"{'MFU at most':>13s}{'with waiting':>14s}{'all exposed':>13s}{'sent, exposed':>18s}{'update':>11s}"
        f"{'planned':>9s}"
    )
    for preset in options.models:
        for tensor in options.tensor:
            for after in (False, True):
                least = bound(preset, options.tokens, tensor, after, options.gpu)
                costs.append(least)
                print(
                    f"{preset:14s}{tensor:7d}{least['which']:>8s}{least['block_launches']:10d}"
                    f"{least['block_ms']:10.3f}{least['head_ms']:9.3f}{least['mfu_bound']:13.3f}"
                    f"{least['mfu_bound_timeline']:14.3f}{least['mfu_bound_collectives_exposed']:13.3f}"
                    f"{least['block_sent_ms']:9.3f}{least['block_exposed_ms']:9.3f}{least['update_ms']:11.2f}"
                    f"{least.get('planned_ms', 0.0):9.3f}"
                )
                for name, row in least["block_operators"].items() if options.operators else ():
                    print(
                        f"    {name:28s}{row['launches']:4d} launches{row['gflop']:10.1f} GFLOP"
                        f"{row['mb']:9.1f} MB{row['us']:9.1f} us"
                    )
    if options.json:
        document = {"command": facts()["command"], "machine": _machine(options.gpu), "dtype": "bf16"}
        document |= {"tokens": options.tokens, "torch": torch.__version__, "bounds": costs}
        options.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
