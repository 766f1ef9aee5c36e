"""What a training system fuses, overlaps and leaves exposed: few constants beside those of the hardware. No
torch."""

from functools import cache
from importlib import resources
from typing import Annotated, Literal

import yaml
from pydantic import Field

from hexad.config import HexadError, did_you_mean
from hexad.config.model import Number, PositiveFloat, Settings

Hidden = Literal["overlapped", "exposed"]
"""Whether computation goes on beside it."""
Part = Annotated[Number, Field(ge=0, le=1, allow_inf_nan=False)]


class Implementation(Settings):
    """A training system. The defaults are what specifications declare, which is what Hexad does."""

    name: str
    """Of the system."""
    products: PositiveFloat = 1.0
    """Times as long as the kernels that were measured alone take matrix products in a step."""
    attention: PositiveFloat = 1.0
    """The same of fused attention."""
    passes: PositiveFloat = 1.0
    """Times as many bytes as compiled functions have its norms, activations and sums."""
    kernels: PositiveFloat = 1.0
    """Times as many kernels."""
    calls: PositiveFloat = 4.0
    """Operator calls of the host for each kernel."""
    scores: Annotated[Number, Field(ge=0, allow_inf_nan=False)] = 0.0
    """Bytes moved in the forward pass, besides by products, for each attention score, of all pairs; twice as
    many in the backward pass. 0 where attention is fused: scores are never in memory."""
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
    logits: Literal["sliced", "whole"] = "sliced"
    """The head's logits exist in slices, or all at once, then also in float32."""
    update: PositiveFloat = 28.0
    """Bytes moved for each parameter that a rank updates."""
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
