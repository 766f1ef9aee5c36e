"""The memory that generation needs on a rank, before anything is started: weights, a step's values, and how
many tokens of key/value cache fit beside them; and what tokens cost. No torch.

Weights are counted in the number format of ``precision.dtype``. A step has ``inference.batch_tokens``
tokens, of which context ranks compute a part each; ``inference.sequences`` of them have logits.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from hexad.config import Config
from hexad.model.inventory import StageSpec
from hexad.parallel.inventory import AxisPositions, Execution, Position, Product, tensor_positions

from . import Resolved
from .layouts import check_replica, check_stages
from .memory import rank_stages

_LOGITS = 4 + 4
"""Bytes of a logit beside its own format: in float32, and as probabilities."""


@dataclass(frozen=True)
class ServingPlan:
    """Generation on one rank of a pipeline coordinate.

    Attributes:
        pipeline: the coordinate.
        parameters: bytes of weights.
        step: bytes of a step's values.
        logits: bytes of the logits of a step.
        token_bytes: of one token in the cache.
        tokens: of the cache that fit; None without a device.
        prefill_flops: for a token of a prompt of ``length`` tokens, on average.
        decode_flops: for the token after such a prompt.
        read_bytes: for a step with one token after each of ``inference.sequences`` such prompts: weights and
            cache.
        length: ``data.sequence``.
    """

    pipeline: int
    parameters: int
    step: int
    logits: int
    token_bytes: int
    tokens: int | None
    prefill_flops: float
    decode_flops: float
    read_bytes: int
    length: int

    def as_tree(self) -> dict[str, Any]:
        """The plan as JSON values."""
        return asdict(self)


def serving_plans(resolved: Resolved, capacity: int | None) -> list[ServingPlan]:
    """A plan for each pipeline coordinate; ``capacity``: bytes of a device.

    The cache of a replica has as many tokens as the coordinate with the fewest.

    Raises:
        ConfigError: a schedule, or stages, that generation does not have.
    """
    check_stages(resolved.config.parallel)
    check_replica(resolved.layout)
    plans = []
    for pipeline in range(resolved.layout.pipeline):
        (stage,) = rank_stages(resolved, pipeline).values()
        plans.append(_plan(resolved.config, stage, pipeline, capacity))
    return plans


def cache_tokens(plans: Sequence[ServingPlan]) -> int | None:
    """Tokens of a replica's cache."""
    fitting = [plan.tokens for plan in plans if plan.tokens is not None]
    return min(fitting) if fitting else None


def _plan(config: Config, stage: StageSpec, pipeline: int, capacity: int | None) -> ServingPlan:
    inference, tensor, byte = config.inference, config.parallel.tensor, config.precision.width
    length, context = config.data.sequence, config.parallel.context
    copies = stage.model.kv_copies
    parallel = config.parallel
    positions = {
        **tensor_positions(Position(0, tensor), copies),
        "expert": Position(0, parallel.expert),
        "expert_tensor": Position(0, parallel.expert_tensor),
    }
    exact = config.precision.exact
    parameters = sum(parameter.elements(positions) for parameter in stage.parameters) * byte
    if exact:
        parameters += _in_float64(stage, positions, byte)
    cpu = config.run.device == "cpu"
    rows = -(-inference.batch_tokens // context)
    run = Execution(
        1, rows, tensor, byte=byte, cpu=cpu, expert=parallel.expert, expert_tensor=parallel.expert_tensor
    )
    step = max((block.forward_alone(run) for block in stage.blocks), default=0)
    logits = 0
    if stage.head is not None:
        drawn = min(inference.sequences, inference.batch_tokens)
        logits = drawn * int(config.model.vocab) * (byte + _LOGITS)
    token_bytes = stage.cached_bytes(tensor, byte, exact)
    tokens = None
    if capacity is not None and token_bytes:
        room = (capacity - parameters - step - logits) * inference.memory_part
        tokens = max(0, int(room) // token_bytes)
    decode_run, prompt = replace(run, length=1), replace(run, length=length)
    branches = [branch for block in stage.blocks for branch in block.parts]
    decode = [product for branch in branches for product in branch.weight_products(decode_run)]
    decode += (
        [] if stage.head is None else [stage.head.logits(decode_run)]
    )  # of the last token of a prompt only
    prefill = [product for block in stage.blocks for product in block.products(prompt)]
    return ServingPlan(
        pipeline,
        parameters,
        step,
        logits,
        token_bytes,
        tokens,
        _forward(prefill) / length,
        _forward(decode) + stage.cached_flops(length, tensor),
        parameters + inference.sequences * length * token_bytes,
        length,
    )


def _in_float64(stage: StageSpec, positions: AxisPositions, byte: int) -> int:
    """Bytes that the weights of products take besides, in ``precision.exact``."""
    linears = (linear for block in stage.blocks for branch in block.parts for linear in branch.linears)
    matrices = [parameter for linear in linears for parameter in linear.layers if parameter.matrix]
    more = (8 - byte) * sum(parameter.elements(positions) for parameter in matrices)
    if stage.head is None:
        return more
    if stage.head.tied == "here":  # which the embedding keeps
        assert stage.embedding is not None
        return more + 8 * sum(parameter.elements(positions) for parameter in stage.embedding.parameters)
    return more + (8 - byte) * sum(parameter.elements(positions) for parameter in stage.head.parameters)


def _forward(products: Sequence[Product]) -> float:
    """FLOPs of the forward pass."""
    return sum(product.flops for product in products if product.action == "F")
