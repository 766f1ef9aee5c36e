"""Properties of training systems, what they fuse, overlap and leave exposed: few constants beside those of
the hardware. No torch."""

from functools import cache
from importlib import resources
from typing import Annotated, Literal

import yaml
from pydantic import Field

from hexad.config import HexadError, did_you_mean
from hexad.config.model import Number, PositiveFloat, SettingsGroup
from hexad.topology.hardware import Hardware

Hidden = Literal["overlapped", "exposed"]
"""Whether computation goes on beside it."""
UnitInterval = Annotated[Number, Field(ge=0, le=1, allow_inf_nan=False)]


class Implementation(SettingsGroup):
    """A training system. The defaults are what specifications declare, which is what Hexad does."""

    name: str
    """Name of the system."""
    products: PositiveFloat = 1.0
    """Times as long as the kernels that were measured alone take matrix products in a step."""
    attention: PositiveFloat = 1.0
    """Times as long as kernels that were measured alone takes fused attention in a step."""
    flash: Literal["newest", "second"] = "newest"
    """Fused attention: kernels made for the GPU, or FlashAttention 2, which is older than Hopper GPUs."""
    passes: PositiveFloat = 1.0
    """Times as many bytes as compiled functions have its norms, activations and sums."""
    kernels: PositiveFloat = 1.0
    """Times as many kernels."""
    calls: PositiveFloat = 4.0
    """Operator calls of the host for each kernel."""
    graphs: bool = False
    """Kernels are started by CUDA graphs: the host does not slow a step down."""
    quantise: Annotated[Number, Field(ge=0, allow_inf_nan=False)] = 1.0
    """Part of the time that separate kernels take to convert operands to 8 bits: others convert what they
    compute at once."""
    eight_experts: bool = False
    """Grouped products of experts are also computed in 8 bits."""
    collectives: PositiveFloat = 1.0
    """Times as long as alone collectives take in a step."""
    collective_calls: PositiveFloat = 1.0
    """Times as much of the host's time as Hexad takes for a collective."""
    message_us: Annotated[Number, Field(ge=0, allow_inf_nan=False)] = 0.0
    """Microseconds at sender and receiver of a message of the pipeline, besides its transfer: the host waits
    for the device before it goes on."""
    scattered: bool = False
    """If tensor ranks hold the same activations, each sends a part of a pipeline's message to the next stage,
    where the parts are gathered (Megatron-LM's scatter-gather)."""
    unfused: bool = False
    """Attention scores are in memory, of all pairs; a row's note may say otherwise."""
    scores: PositiveFloat = 11.0
    """Bytes moved in the forward pass, besides by products, for each attention score of unfused attention;
    twice as many in the backward pass."""
    aside: bool = True
    """Weight gradients are set aside, to be computed beside a later collective."""
    tensor: Hidden = "overlapped"
    """Collectives of tensor parallelism in the backward pass, as far as they have products beside them."""
    chunks: Annotated[int, Field(ge=1)] = 1
    """Chunks of published runs' tensor-parallel forward passes, of which one is sent beside another's
    product; of Hexad's runs ``parallel.tensor_chunks`` says it."""
    reduced: Literal[2, 4] = 4
    """Bytes of an element of gradients when they are reduced, in published runs."""
    bucket_mb: PositiveFloat = 160.0
    """MiB of gradients that are reduced together, in published runs."""
    uncompiled: PositiveFloat = 1.0
    """Times as many bytes as ``passes`` says, where pointwise functions are not compiled."""
    gradients: Hidden = "overlapped"
    """Reductions of gradients."""
    weights: Hidden = "overlapped"
    """Gathers of weights: after the update (ZeRO 1 and 2), or ahead of each layer (ZeRO 3)."""
    messages: Hidden = "overlapped"
    """Messages of the pipeline; exposed ones take time at sender and receiver."""
    update: PositiveFloat = 28.0
    """Bytes moved for each parameter that a rank updates."""
    parameter: Literal[2, 4] = 2
    """Bytes of a parameter that a rank holds."""
    gradient: Literal[2, 4] = 4
    """Bytes of an element of the gradient buffers."""
    state: PositiveFloat = 12.0
    """Bytes of a parameter's optimizer state: master value, two moments, what the update needs besides."""
    logits: PositiveFloat = 6.0
    """Bytes of an element of the logits while the loss is computed, in all formats and copies."""
    fused_logits: PositiveFloat = 4.0
    """Bytes of an element of the logits where cross entropy is fused."""
    reports: Literal["allocated", "reserved", "device"] = "allocated"
    """The meaning of its published memory: the allocator's peak of tensors, or of blocks, or what the
    device's tools show."""
    dropout: bool = False
    """Models without gated layers are trained with dropout, of the stream and of scores."""
    transformer_engine: bool = False
    """Layers are those of Transformer Engine, with a workspace of its own."""
    step_us: Annotated[Number, Field(ge=0, allow_inf_nan=False)] = 0.0
    """Microseconds of every step besides."""


@cache
def implementation(name: str) -> Implementation:
    """The constants of a training system.

    Raises:
        HexadError: an unknown name.
    """
    directory = resources.files("hexad.planning") / "implementations"
    names = sorted(
        path.name.removesuffix(".yaml") for path in directory.iterdir() if path.name.endswith(".yaml")
    )
    if name not in names:
        raise HexadError(
            f"implementation: found '{name}'{did_you_mean(name, names)}; known: {', '.join(names)}"
        )
    text = (directory / f"{name}.yaml").read_text(encoding="utf-8")
    return Implementation.model_validate({"name": name, **(yaml.safe_load(text) or {})})


def own_implementation(hardware: Hardware) -> Implementation:
    """Hexad's own constants on a kind of hardware."""
    return implementation("hexad-cpu" if hardware.vendor == "cpu" else "hexad")
