"""DeepSpeed's ZeRO stages 1 to 3 on CPUs, for ``sharded.py``. Needs ``deepspeed``, which Hexad does not.

Traps: it clips gradients to 1.0 by default, and writes its log to standard output.
"""

import logging
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn


def settings(stage: int, dtype: str, micro: int, accumulation: int) -> dict[str, Any]:
    """DeepSpeed's configuration."""
    common: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": 0.0,
        # Fewer CPU seconds than the default in stages 1 and 2, more in stage 3.
        "zero_optimization": {"stage": stage, "contiguous_gradients": stage == 3},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
    }
    if dtype == "bf16":
        # bf16 parameters, fp32 master weights, accumulation and reduction, as Hexad's bf16.
        common["bf16"] = {"enabled": True}
        common["data_types"] = {"grad_accum_dtype": "fp32"}
        common["communication_data_type"] = "fp32"
    return common


def make_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, batch: tuple[Tensor, ...], stage: int, dtype: str
) -> Callable[[], float]:
    """A step over this rank's microbatches; it returns the mean loss of all ranks before the update."""
    os.environ.setdefault("LOCAL_RANK", os.environ["RANK"])
    import deepspeed
    from deepspeed.utils import logger

    logger.setLevel(logging.ERROR)
    if dtype == "bf16":  # DeepSpeed casts parameters only; rotary tables in fp32 would lift queries to fp32
        for buffer in model.buffers():
            buffer.data = buffer.data.bfloat16()
    config = settings(stage, dtype, batch[0].shape[0], len(batch))
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)

    def step() -> float:
        losses = []
        for sample in batch:
            logits = engine(sample[:, :-1]).flatten(0, 1)
            loss = F.cross_entropy(logits.float(), sample[:, 1:].flatten())
            engine.backward(loss)
            engine.step()  # updates after the last microbatch
            losses.append(loss.detach())
        total = torch.stack(losses).mean()
        dist.all_reduce(total, dist.ReduceOp.AVG)
        return float(total)

    return step
