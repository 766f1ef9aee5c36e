"""Published model shapes, by name."""

from __future__ import annotations

from typing import Any

PRESETS: dict[str, dict[str, Any]] = {}
