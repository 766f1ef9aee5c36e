"""Selection of the trained weights, and of the linear layers with adapters: ``model.train`` and
``model.lora``, by patterns of names. No torch."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache

from hexad.config import ConfigError, did_you_mean
from hexad.config.model import ModelSettings
from hexad.parallel.tensor.linear_inventory import LoraSpec

from .experts_inventory import of_stack
from .families import Family, family


@cache
def _runs(name: str) -> tuple[str, ...]:
    """One or more consecutive parts of a dotted name: ``a.b`` -> ``a``, ``a.b``, ``b``."""
    parts = name.split(".")
    ends = range(1, len(parts) + 1)
    return tuple(".".join(parts[begin:end]) for end in ends for begin in range(end))


def selects(patterns: Iterable[str], names: Iterable[str]) -> bool:
    """Whether one of the patterns (``*``, ``?``, ``[...]``) is, for one of the names, one or more consecutive
    parts of it: ``q_proj``, ``layers.3``, ``*.bias``."""
    runs = [run for name in names for run in _runs(name)]
    return any(fnmatchcase(run, pattern) for pattern in patterns for run in runs)


@dataclass(frozen=True)
class Trained:
    """The weights and adapters that a model's settings select.

    Attributes:
        patterns: of the weights that are trained; None: all.
        targets: of the linear layers' outputs that have adapters; None: all.
        lora: the kind of adapters; None for none.
        family: whose published names patterns may use.
    """

    patterns: tuple[str, ...] | None
    targets: tuple[str, ...] | None
    lora: LoraSpec | None
    family: Family

    @classmethod
    def of(cls, model: ModelSettings) -> Trained:
        """The selection by the settings; with adapters, ``model.train: all`` trains only these."""
        settings = model.lora
        patterns = None if model.train == "all" else model.train
        if settings is None:
            return cls(patterns, None, None, family(model.family))
        kind = LoraSpec(settings.rank, settings.alpha / settings.rank, settings.dropout)
        targets = None if settings.targets == "all" else settings.targets
        return cls(patterns or (), targets, kind, family(model.family))

    @property
    def everything(self) -> bool:
        """All weights are trained, and there are no adapters."""
        return self.patterns is None and self.lora is None

    def frozen(self, name: str) -> bool:
        """Whether a weight, by its complete name, is not trained."""
        return self.patterns is not None and not selects(self.patterns, self._names(name))

    def adapted(self, module: str) -> bool:
        """Whether the output of a linear layer, by its complete module's name, has an adapter."""
        if self.lora is None:
            return False
        if self.targets is None:
            return not of_stack(module)
        return selects(self.targets, self._names(module))

    def _names(self, name: str) -> tuple[str, ...]:
        return name, *self.family.names(name)

    def in_part(self, weight: str, experts: int, patterns: Sequence[str]) -> str | None:
        """A published name of a matrix that patterns do not select, though they select others of the same
        stack of so many experts' matrices; None if they select all or none of it."""
        if not self.family.of_experts(weight) or selects(patterns, [weight, *self.family.spellings(weight)]):
            return None
        # Only such patterns distinguish experts.
        numbered = any(re.search(r"[0-9?[]", pattern) for pattern in patterns)
        names = [
            path.format(number)
            for path in self.family.expert_names(weight)
            for number in range(experts if numbered else 1)
        ]
        left = [name for name in names if not selects(patterns, [name])]
        return left[0] if 0 < len(left) < len(names) else None


def check_trained(
    model: ModelSettings,
    weights: Sequence[str],
    outputs: Sequence[Sequence[str]],
    by_rule: Sequence[str] = (),
) -> None:
    """Refuse patterns that select nothing that can be trained, or a part of what is computed in one product,
    given the names of all weights without adapters, of every linear layer's outputs, and of the weights that
    a rule of their own changes.

    Raises:
        ConfigError: naming the pattern.
    """
    trained = Trained.of(model)
    modules = list(dict.fromkeys(name for output in outputs for name in output))
    _check_experts(model, weights, trained)
    _check_used("model.train", trained.patterns or (), weights, trained)
    _check_by_rule([name for name in weights if name not in by_rule], by_rule, trained)
    _check_adapted(weights, modules, trained)
    _check_used("model.lora.targets", trained.targets or (), modules, trained)
    adapted = [name for name in modules if of_stack(name) and trained.adapted(name)]
    if trained.lora is not None and trained.lora.dropout and adapted:
        problem = f"found {trained.lora.dropout} with adapters of experts ({adapted[0]}), which have none"
        raise ConfigError("model.lora.dropout", f"{problem}; use 0, or other targets")
    if trained.patterns == () and trained.lora is None:
        raise ConfigError("model.train", "found [], which trains nothing; use all, or patterns of names")
    if trained.targets == ():
        raise ConfigError(
            "model.lora.targets", "found [], which adapts nothing; use all, or patterns of names"
        )
    known = set(weights)
    for output in outputs:
        for kind in ("weight", "bias"):
            names = [name for module in output if (name := f"{module}.{kind}") in known]
            frozen = [name for name in names if trained.frozen(name)]
            if 0 < len(frozen) < len(names):
                other = next(name for name in names if name not in frozen)
                raise ConfigError(
                    "model.train",
                    f"selects {other} but not {frozen[0]}, which are computed in one product; select all of "
                    f"{', '.join(names)}, or none",
                )


def _check_experts(model: ModelSettings, weights: Sequence[str], trained: Trained) -> None:
    """Refuse patterns that select some of the experts' matrices that are trained as one."""
    if model.moe is None:
        return
    for field, patterns in (("train", trained.patterns), ("lora.targets", trained.targets)):
        for weight in weights if patterns else ():
            if (other := trained.in_part(weight, model.moe.experts, patterns or ())) is not None:
                raise ConfigError(
                    f"model.{field}",
                    f"selects a part of {weight}, but not {other}: the matrices of all experts of a layer "
                    "are trained together; select all, or none",
                )


def _check_by_rule(weights: Sequence[str], by_rule: Sequence[str], trained: Trained) -> None:
    """Refuse patterns of only such weights as a rule of their own changes."""
    for pattern in trained.patterns or ():
        if any(selects([pattern], trained._names(weight)) for weight in weights):
            continue
        for name in by_rule:
            if selects([pattern], trained._names(name)):
                raise ConfigError(
                    "model.train",
                    f"found {pattern!r}, which matches {name}, changed by model.moe.bias_rate, not trained; "
                    "use router, or other names",
                )


def _check_adapted(weights: Sequence[str], modules: Sequence[str], trained: Trained) -> None:
    """Refuse targets of adapters that are weights which can have none."""
    for pattern in trained.targets or ():
        if any(selects([pattern], trained._names(module)) for module in modules):
            continue
        weight = next((name for name in weights if selects([pattern], trained._names(name))), None)
        if weight is not None:
            problem = f"found {pattern!r}, which matches no name of a layer that can have adapters"
            raise ConfigError(
                "model.lora.targets", f"{problem}, only {weight}; use model.train to train that"
            )


def _check_used(field: str, patterns: Sequence[str], names: Sequence[str], trained: Trained) -> None:
    for pattern in patterns:
        if not any(selects([pattern], trained._names(name)) for name in names):
            parts = dict.fromkeys(
                part
                for name in names
                for weight in trained._names(name)
                for part in weight.split(".")
                if not part.isdigit()
            )
            hint = did_you_mean(pattern, parts) or f"; known parts of names: {', '.join(parts)}"
            raise ConfigError(field, f"found {pattern!r}, which matches no name{hint}")
