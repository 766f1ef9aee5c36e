"""The published model that ``checkpoint import --model`` names. No torch."""

from __future__ import annotations

from pathlib import Path

from hexad.config import HexadError
from hexad.model.hugging_face import CONFIG_FILE


def model_directory(named: Path) -> Path:
    """The directory of a Hugging Face model that is named, or whose ``config.json`` is.

    Raises:
        HexadError: there is none.
    """
    if named.is_dir():
        return named
    if named.name == CONFIG_FILE and named.is_file():
        return named.parent
    if named.exists():
        raise HexadError(
            f"--model: found the file {named}, expected a Hugging Face model's directory or its {CONFIG_FILE}"
        )
    raise HexadError(f"--model: {named}: no such directory or file")
