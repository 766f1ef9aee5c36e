"""What differs between families beyond the switches of :class:`ModelSettings`: published tensor names."""

from __future__ import annotations

import re

from hexad.config.schema import ModelSettings

from . import gpt2, llama
from .mapping import HuggingFaceTensor

__all__ = ["HuggingFaceTensor", "base_prefix", "hugging_face_tensors", "is_buffer"]


def hugging_face_tensors(model: ModelSettings) -> dict[str, HuggingFaceTensor]:
    """Our global tensor name -> where it stands in the family's Hugging Face state dict.

    ``model`` is resolved: its sizes are numbers.
    """
    return (gpt2 if model.family == "gpt2" else llama).tensors(model)


def base_prefix(model: ModelSettings) -> str:
    """What all names but the head's begin with in Hugging Face files, unless they were saved without head."""
    return (gpt2 if model.family == "gpt2" else llama).BASE


def is_buffer(model: ModelSettings, name: str) -> bool:
    """Whether a tensor of a Hugging Face file holds no weights: what follows from the settings."""
    family = gpt2 if model.family == "gpt2" else llama
    return re.fullmatch(family.BUFFERS, name.removeprefix(family.BASE)) is not None
