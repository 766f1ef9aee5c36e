"""``python -m hexad.compat.megatron SCRIPT [FLAGS]`` runs a script that imports megatron, and deepspeed if it
does, unchanged, in this rank: ``torchrun ... -m hexad.compat.megatron pretrain_gpt.py FLAGS``."""

import sys
from pathlib import Path

from .. import deepspeed
from ..facade.installed import run_script
from . import install


def install_both() -> None:
    """Install both interfaces."""
    install()
    deepspeed.install()


if __name__ == "__main__":
    if not sys.argv[1:] or not Path(sys.argv[1]).is_file():
        given = sys.argv[1] if sys.argv[1:] else "no script"
        print(f"hexad: error: found {given}; expected a script and its flags", file=sys.stderr)
        sys.exit(2)
    run_script(install_both, sys.argv[1:])
