"""Reading files that ``torch.save`` wrote without running code that they name.

A pickle names functions and classes, and calls them. torch's weights-only reader knows tensors and Python's
own containers. A few classes that DeepSpeed and its users save beside them are read as :class:`Inert`; a file
that names any other is refused.
"""

from __future__ import annotations

import re
import warnings
import zipfile
from pathlib import Path
from typing import Any

import torch

from hexad.config import HexadError


class Inert:
    """Stands for an object of another class: what the file holds of it, and no behaviour.

    Attributes:
        given: the arguments it was to be made with.
        held: its attributes, where the file has them by name.
    """

    def __new__(cls, *given: Any) -> Inert:
        """Keep the arguments of a class, or of a function, that is not called."""
        made = super().__new__(cls)
        made.given, made.held = given, {}
        return made

    given: tuple[Any, ...]
    held: dict[str, Any]

    def __setstate__(self, state: Any) -> None:
        self.held = state if isinstance(state, dict) else {}


_CLASSES = (
    "deepspeed.checkpoint.universal_checkpoint.SubparamShape",
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
    "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.runtime.zero.config.ZeroStageEnum",
    "deepspeed.utils.tensor_fragment.fragment_address",
    # What scripts add to a checkpoint: their options and the states of NumPy's random numbers.
    "argparse.Namespace",
    "numpy._core.multiarray._reconstruct",
    "numpy._core.multiarray.scalar",
    "numpy.core.multiarray._reconstruct",
    "numpy.core.multiarray.scalar",
    "numpy.dtype",
    "numpy.ndarray",
)
"""Names that are read as :class:`Inert`: the file's class or function is neither imported nor called."""


def load_inert(path: Path) -> Any:
    """The content of a file of ``torch.save``: tensors on the CPU, mapped to the file and read when they are
    used, in Python's containers.

    Raises:
        HexadError: it is missing, damaged, or names a class or function that is not known to be harmless.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
        if damaged is not None:
            raise HexadError(f"{path}: damaged: the checksum of {damaged} does not match its content")
        with (
            warnings.catch_warnings(),
            torch.serialization.safe_globals([(Inert, name) for name in _CLASSES]),
        ):
            warnings.simplefilter("ignore")  # of deprecated storage classes
            return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except HexadError:
        raise
    except FileNotFoundError:
        raise HexadError(f"{path}: missing") from None
    except zipfile.BadZipFile:
        raise HexadError(f"{path}: truncated, or not written by torch.save of torch 1.6 or later") from None
    except Exception as error:  # of whatever kind a damaged pickle leads to
        raise HexadError(f"{path}: {_reason(error)}") from None


def _reason(error: Exception) -> str:
    """Why a file is refused, in one line."""
    text = " ".join(str(error).split())
    named = re.search(
        r"(?:Unsupported global: GLOBAL|unsupported GLOBAL|Can only [a-z ]+ but got) (\S+)", text
    )
    if named:
        return (
            f"found {named[1]} in its pickle, which is not loaded, as it could run code; save the checkpoint "
            "without that object (client_state)"
        )
    return f"cannot be read: {text.split('. ')[0] or type(error).__name__}"
