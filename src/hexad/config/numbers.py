"""Numbers that are not finite, in messages and in JSON, which does not have them."""

import json
from math import isfinite
from typing import Any

NOT_FINITE = (
    "the model's logits are not finite (NaN or infinite); check its weights, and precision.dtype: in fp16 "
    "values beyond 65,504 are infinite"
)
"""The problem in messages about a model whose outputs cannot be used."""


def json_text(document: Any, **options: Any) -> str:
    """A document as JSON, with null for numbers that are not finite; ``options``: of :func:`json.dumps`."""
    return json.dumps(_finite(document), allow_nan=False, **options)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not isfinite(value) else value
