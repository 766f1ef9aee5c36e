"""``optimizer.params`` and ``scheduler.params`` of which a ``run.yaml`` has the counterpart. No torch."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from .keys import Section

Finite = Annotated[float, Field(allow_inf_nan=False)]
Rate = Annotated[Finite, Field(ge=0)]
Beta = Annotated[Finite, Field(ge=0, lt=1)]
Steps = Annotated[int, Field(ge=1)]


def _required(wanted: Any, why: str) -> BeforeValidator:
    """Refuses every value but one."""

    def check(value: Any) -> Any:
        if value != wanted:
            raise ValueError(f"{wanted!r}".lower() + f": {why}")
        return value

    return BeforeValidator(check)


BeginsAnew = Annotated[int, _required(-1, "a run.yaml begins with the first step; remove it")]


class AdamParams(Section):
    """Of Adam and AdamW, from DeepSpeed or torch."""

    lr: Rate = 1e-3
    betas: tuple[Beta, Beta] = (0.9, 0.999)
    eps: Rate = 1e-8
    weight_decay: Rate = 0.0
    adam_w_mode: bool = True
    bias_correction: Annotated[bool, _required(True, "AdamW always corrects")] = True
    amsgrad: Annotated[bool, _required(False, "a run.yaml has AdamW without it")] = False
    maximize: Annotated[bool, _required(False, "a run.yaml minimizes the loss")] = False
    max_grad_norm: Rate | None = None
    torch_adam: bool = False
    fused: bool | None = None
    foreach: bool | None = None
    capturable: bool = False
    differentiable: bool = False
    set_grad_none: bool = True
    fp32_optimizer_states: bool = True


SAME_RESULT = (
    "torch_adam",
    "fused",
    "foreach",
    "capturable",
    "differentiable",
    "set_grad_none",
    "fp32_optimizer_states",
)
"""Parameters of Adam that do not change what it computes here."""


class WarmupParams(Section):
    """Of ``WarmupLR``."""

    warmup_min_lr: Rate = 0.0
    warmup_max_lr: Rate | None = None
    warmup_num_steps: Steps = 1000
    warmup_type: Literal["log", "linear"] = "log"
    last_batch_iteration: BeginsAnew = -1


class WarmupDecayParams(WarmupParams):
    """Of ``WarmupDecayLR``."""

    total_num_steps: Steps
    warmup_max_lr: Rate | None = 1e-3


class WarmupCosineParams(Section):
    """Of ``WarmupCosineLR``."""

    total_num_steps: Steps
    warmup_min_ratio: Rate = 0.0
    warmup_num_steps: Steps = 1000
    cos_min_ratio: Rate = 0.0001
    warmup_type: Literal["log", "linear"] = "log"
    last_batch_iteration: BeginsAnew = -1
