"""``python -m hexad.compat.megatron [--ignore FLAGS] SCRIPT [FLAGS]`` runs a script that imports megatron,
and deepspeed if it does, unchanged, in this rank: ``torchrun ... -m hexad.compat.megatron pretrain_gpt.py
FLAGS``. Flags of ``--ignore`` are separated by commas."""

import sys
from functools import partial
from pathlib import Path

from .. import deepspeed
from ..facade.installed import run_script
from . import install


def install_both(*ignore: str) -> None:
    """Install both interfaces; ``ignore``: flags to ignore."""
    install(ignore)
    deepspeed.install()


if __name__ == "__main__":
    words = sys.argv[1:]
    ignore = words[1:2] if words[:1] == ["--ignore"] else []
    words = words[2:] if ignore else words
    if not words or not Path(words[0]).is_file():
        given = words[0] if words else "no script"
        print(f"hexad: error: found {given}; expected a script and its flags", file=sys.stderr)
        sys.exit(2)
    run_script(partial(install_both, *ignore), words, "megatron")
