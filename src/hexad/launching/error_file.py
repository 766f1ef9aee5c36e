"""The file through which a rank's last message reaches its launcher. No torch."""

from __future__ import annotations

import json
import os
import time
from contextlib import suppress

_VARIABLE = "TORCHELASTIC_ERROR_FILE"


def write_error(message: str) -> None:
    """Leave a message for torchrun's agent, or Hexad's own; without one, nothing."""
    path = os.environ.get(_VARIABLE)
    if not path:
        return
    # By one rename: the agent may end this rank at any moment, and cannot read half a file.
    with open(f"{path}.partial", "w", encoding="utf-8") as file:
        json.dump({"message": {"message": message, "extraInfo": {"timestamp": int(time.time())}}}, file)
    os.replace(f"{path}.partial", path)


def withdraw_error() -> None:
    """Remove the message again."""
    with suppress(OSError):
        os.unlink(os.environ.get(_VARIABLE, ""))
