"""Plans of tensor parallelism: what each module or parameter of a user's model becomes, by name. No torch.

A plan maps patterns of names to styles, those of ``transformers`` (``base_model_tp_plan``) and shorter ones.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from hexad.config import HexadError, did_you_mean

STYLES = {
    "colwise": "a linear layer; its outputs are divided, its input is whole",
    "colwise_gather_output": "the same; its outputs are gathered",
    "packed_colwise": "a linear layer whose outputs are two halves, of which each is divided",
    "rowwise": "a linear layer; its inputs are divided, and its outputs are summed",
    "rowwise_split_input": "the same, of an input that is whole",
    "packed_rowwise": "a linear layer whose inputs are two halves, of which each is divided",
    "embedding_rowwise": "a table of embeddings, divided by rows; its outputs are summed",
    "embedding_colwise": "a table of embeddings, divided by columns; its outputs are gathered",
    "replicated_with_grad_allreduce": "whole on every rank, which uses it for its share of heads or features",
    "sequence_parallel": "whole on every rank, which uses it for its share of the tokens",
    "all_reduce": "a module whose outputs are parts of a sum",
    "replicate": "left as it is",
    "local_params": "left as it is: its parameters are divided by entries of their own",
}
"""Styles, with what they are for; see :func:`hexad.conversion.parallelize.parallelize`."""

ALIASES = {
    "column": "colwise",
    "column_gather": "colwise_gather_output",
    "colwise_rep": "colwise_gather_output",
    "row": "rowwise",
    "row_split": "rowwise_split_input",
    "rowwise_rep": "rowwise_split_input",
    "vocab": "embedding_rowwise",
    "partial": "replicated_with_grad_allreduce",
    "sequence": "sequence_parallel",
}
"""Other names of styles."""

EXPERTS = frozenset(
    "grouped_gemm ep_dispatch_experts moe_tp_experts moe_identity_expert mla_kv_a_proj megablocks".split()
)
"""Styles of ``transformers`` for experts and latent attention."""


@dataclass(frozen=True)
class Entry:
    """The style that a plan gives to one module or parameter.

    Attributes:
        name: its path in the model.
        style: of :data:`STYLES`.
    """

    name: str
    style: str


def entries(plan: Mapping[str, str], names: Iterable[str], strict: bool) -> list[Entry]:
    """The entries of a plan, one for every module and parameter that it names.

    Args:
        plan: pattern -> style. In a pattern ``*`` stands for one part of a name between dots, ``**`` for any
            number of them. Of patterns that match one name the last one counts.
        names: of the model's modules and parameters.
        strict: refuse patterns that match nothing.

    Raises:
        HexadError: a style that is not known or not supported, or a pattern that matches nothing.
    """
    known = list(names)
    chosen: dict[str, Entry] = {}
    for pattern, value in plan.items():
        style = _style(pattern, value)
        matches = list(filter(_regex(pattern).fullmatch, known))
        if strict and not matches:
            raise HexadError(
                f"plan: found {pattern!r}, which matches no module or parameter"
                f"{did_you_mean(pattern, known)}; * stands for one part of a name, ** for several"
            )
        chosen |= {name: Entry(name, style) for name in matches}
    return [chosen[name] for name in known if name in chosen]


def _style(pattern: str, value: object) -> str:
    style = ALIASES.get(str(value), str(value))
    if style in EXPERTS:
        raise HexadError(
            f"plan[{pattern!r}]: found {value}, a style of experts or latent attention, which is "
            "not supported yet; leave these modules whole, or use data parallel ranks"
        )
    if style not in STYLES:
        choices = sorted({*STYLES, *ALIASES})
        raise HexadError(
            f"plan[{pattern!r}]: found {value!r}{did_you_mean(str(value), choices)}; expected one of "
            f"{', '.join(choices)}"
        )
    return style


def _regex(pattern: str) -> re.Pattern[str]:
    parts = {"**": r".+", "*": r"[^.]+"}
    return re.compile("".join(parts.get(part, re.escape(part)) for part in re.split(r"(\*\*|\*)", pattern)))
