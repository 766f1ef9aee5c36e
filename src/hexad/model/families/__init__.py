"""What differs between families beyond the switches of :class:`ModelSettings`: published tensor names."""

from __future__ import annotations

from hexad.config.schema import ModelSettings

from . import gpt2, llama
from .mapping import HuggingFaceTensor

__all__ = ["HuggingFaceTensor", "hugging_face_tensors"]


def hugging_face_tensors(model: ModelSettings) -> dict[str, HuggingFaceTensor]:
    """Our global tensor name -> where it stands in the family's Hugging Face state dict."""
    return (gpt2 if model.family == "gpt2" else llama).tensors(model)
