"""Kinds of values that settings have, with their bounds, and groups of settings. A validator's
docstring is its text in the documentation."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field


def _not_a_switch(value: Any) -> Any:
    """Refuse ``true`` for 1, which Python accepts: it hides a mistyped line."""
    if isinstance(value, bool):
        raise ValueError("a number, not true or false")
    return value


Integer = Annotated[int, BeforeValidator(_not_a_switch)]
Number = Annotated[float, BeforeValidator(_not_a_switch)]
# Upper bounds exclude values that are mistakes: what is computed before a run grows with layers and degrees,
# and samples are counted in 64 bits.
Positive = Annotated[Integer, Field(ge=1, le=10**9)]
Count = Annotated[Integer, Field(ge=0, le=10**9)]
Seed = Annotated[Integer, Field(ge=0, lt=2**63)]
Layers = Annotated[Integer, Field(ge=1, le=1024)]
Width = Annotated[Integer, Field(ge=1, le=2**24)]
Degree = Annotated[Integer, Field(ge=1, le=2**16)]
PositiveFloat = Annotated[Number, Field(gt=0, allow_inf_nan=False)]
NonNegativeFloat = Annotated[Number, Field(ge=0, allow_inf_nan=False)]
Fraction = Annotated[Number, Field(ge=0, lt=1, allow_inf_nan=False)]


def _not_empty(name: str) -> str:
    """text"""
    if not name.strip():
        raise ValueError("a name, not an empty text")
    return name


Name = Annotated[str, AfterValidator(_not_empty)]


def _schedule_file(path: str) -> str:
    """a `.json` file"""
    if not path.endswith(".json"):
        raise ValueError("a file ending in .json")
    return path


ScheduleFile = Annotated[str, AfterValidator(_schedule_file)]


class Settings(BaseModel):
    """A strict, immutable group of settings: unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)
