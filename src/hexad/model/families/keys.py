"""Reading a Hugging Face ``config.json``: values, what their absence means, and errors that name them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hexad.config import HexadError


class Keys:
    """A ``config.json`` with the defaults of its family.

    Args:
        raw: its content.
        path: of the file, for messages.
        absent: what missing keys mean.
    """

    def __init__(self, raw: Mapping[str, Any], path: Path, absent: Mapping[str, Any]) -> None:
        self.path = path
        self.raw = {**absent, **raw}

    def problem(self, key: str, expected: str, found: Any = ...) -> HexadError:
        """An error that names the file, the key and the value found."""
        value = self.raw.get(key) if found is ... else found
        return HexadError(f"{self.path}: {key}: found {json.dumps(value)}, {expected}")

    def count(self, key: str, absent: int | None = None) -> int:
        """A whole number from 1; ``absent`` is what null means, if it means anything."""
        found = self.raw.get(key)
        if found is None and absent is not None:
            return absent
        if isinstance(found, bool) or not isinstance(found, int) or found < 1:
            raise self.problem(key, "expected a whole number from 1")
        return found

    def number(self, key: str) -> float:
        """Any number from 0; null is 0."""
        found = self.raw.get(key)
        if isinstance(found, bool) or not isinstance(found, (int, float, type(None))) or (found or 0) < 0:
            raise self.problem(key, "expected a number from 0")
        return float(found or 0)

    def switch(self, key: str) -> bool:
        """True or false."""
        found = self.raw.get(key)
        if not isinstance(found, bool):
            raise self.problem(key, "expected true or false")
        return found


def without_window(keys: Keys) -> dict[str, Any]:
    """Refuse a sliding window."""
    if keys.raw.get("sliding_window") is not None:
        raise keys.problem(
            "sliding_window",
            "which is not supported; where no sequence is longer than the window, set it to null there",
        )
    return {}


def one_dropout(keys: Keys) -> dict[str, Any]:
    """Refuse a ``config.json`` that drops embeddings and branches with different probabilities."""
    dropout = keys.number("resid_pdrop")
    if keys.number("embd_pdrop") != dropout:
        raise keys.problem(
            "embd_pdrop", f"expected that of resid_pdrop, {dropout}: model.dropout is for both"
        )
    return {}
