"""The learning-rate schedule of a launch line. No torch."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from hexad.config import ConfigError

_KINDS = {
    "constant": "constant",
    "linear": "linear",
    "cosine": "cosine",
    "inverse-square-root": "inverse_sqrt",
    "WSD": "wsd",
}
"""``--lr-decay-style`` -> ``lr_schedule.kind``."""
SHIFT = "learning rate: that of step n is Megatron-LM's of iteration n + 1, whose first update has the rate 0"


def schedule_settings(arguments: Namespace) -> tuple[dict[str, Any], list[str]]:
    """The group ``lr_schedule``, in iterations, and notes for the user.

    Raises:
        ConfigError: a shape that Hexad does not have.
    """
    steps, notes = arguments.train_iters, []

    def iterations(name: str) -> float | None:
        """``lr_..._iters``, or ``lr_..._samples`` of one batch size."""
        if arguments.train_samples is None:
            found = getattr(arguments, f"{name}_iters")
            return None if found is None else float(found)
        found = getattr(arguments, f"{name}_samples")
        return None if found is None else float(found / arguments.global_batch_size)

    def rounded(flag: str, number: float) -> int:
        if number != round(number):
            notes.append(f"{flag}: {number:,.2f} iterations, rounded to {round(number):,}")
        return round(number)

    unit = "iters" if arguments.train_samples is None else "samples"
    given = iterations("lr_decay")
    decay = float(steps) if given is None else given
    if arguments.lr_warmup_fraction is not None:
        if not 0 <= arguments.lr_warmup_fraction <= 1:
            raise ConfigError(
                "--lr-warmup-fraction", f"found {arguments.lr_warmup_fraction}, expected a number from 0 to 1"
            )
        flag, length = "--lr-warmup-fraction", arguments.lr_warmup_fraction * decay
    else:
        flag, length = f"--lr-warmup-{unit}", iterations("lr_warmup") or 0.0
    _check_warmup(flag, length, decay, f"--train-{unit}" if given is None else f"--lr-decay-{unit}")
    warmup = rounded(flag, length)
    end = rounded(f"--lr-decay-{unit}", decay)
    kind = _KINDS[arguments.lr_decay_style]
    found: dict[str, Any] = {"kind": kind, "warmup": warmup}
    if warmup:
        notes.append(SHIFT)
    if kind == "constant":
        return found, notes
    if kind in ("wsd", "inverse_sqrt") and end != steps:
        raise ConfigError(
            f"--lr-decay-{unit}",
            f"found {end} of {steps} iterations with {arguments.lr_decay_style}, which Hexad ends with the "
            "run; leave it out",
        )
    if kind == "wsd":
        length = iterations("lr_wsd_decay")
        if length is None:
            raise ConfigError(f"--lr-wsd-decay-{unit}", "is missing with WSD; give it")
        if arguments.lr_wsd_decay_style != "linear":
            raise ConfigError(
                "--lr-wsd-decay-style",
                f"found {arguments.lr_wsd_decay_style}; Hexad's wsd decays linearly: use linear",
            )
        found["decay_steps"] = rounded(f"--lr-wsd-decay-{unit}", length)
    elif kind != "inverse_sqrt":
        found["decay_steps"] = end
    return {**found, "min_lr": arguments.min_lr}, notes


def _check_warmup(flag: str, length: float, decay: float, whole: str) -> None:
    """Refuse warm-up that does not end before the schedule of ``decay`` iterations, those of ``whole``."""
    if length and length >= decay:
        raise ConfigError(
            flag,
            f"found {length:g} iterations of warm-up, expected less than the {decay:g} of {whole}; lower it",
        )
