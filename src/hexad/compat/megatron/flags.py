"""Every flag of Megatron-LM that ``hexad megatron`` knows: the source of the parser, of the translation's
refusals and of the table in ``docs/megatron.md``. No torch."""

from __future__ import annotations

from .flag import Flag
from .flags_model import EXPERTS, MODEL, PARALLEL, RECOMPUTE
from .flags_run import CHECKPOINT, DATA, LOGGING, PRECISION, TRAINING

GROUPS: dict[str, tuple[Flag, ...]] = {
    "Model": MODEL,
    "Experts": EXPERTS,
    "Layout": PARALLEL,
    "Recomputation": RECOMPUTE,
    "Batches and training": TRAINING,
    "Precision": PRECISION,
    "Data": DATA,
    "Checkpoints": CHECKPOINT,
    "Evaluation and logs": LOGGING,
}
"""By title."""

FLAGS: dict[str, Flag] = {
    name: flag for group in GROUPS.values() for flag in group for name in (flag.name, *flag.aliases)
}
"""By name, aliases included."""
