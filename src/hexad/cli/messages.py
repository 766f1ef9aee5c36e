"""Messages on stderr."""

from __future__ import annotations

import os
import sys
import traceback


def speaks() -> bool:
    """Whether this process prints an error that all ranks have: only the first one does."""
    return os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")) == "0"


def fail(message: str, debug: bool = False, status: int = 2) -> int:
    """Print ``hexad: error: ...`` and return the exit status."""
    if debug:
        traceback.print_exc()
    print(f"hexad: error: {' '.join(message.split())}", file=sys.stderr, flush=True)
    return status
