"""``python -m hexad.compat.megatron [--ignore FLAGS] SCRIPT [FLAGS]`` runs a script that imports megatron,
and deepspeed if it does, unchanged, in this rank: ``torchrun ... -m hexad.compat.megatron pretrain_gpt.py
FLAGS``. Flags of ``--ignore`` are separated by commas."""

import sys
from functools import partial
from pathlib import Path

from ..facade.extensions import extension
from ..facade.installed import run_script

if __name__ == "__main__":
    words = sys.argv[1:]
    ignore = words[1:2] if words[:1] == ["--ignore"] else []
    words = words[2:] if ignore else words
    if not words or not Path(words[0]).is_file():
        script = words[0] if words else "no script"
        print(f"hexad: error: found {script}; expected a script and its flags", file=sys.stderr)
        sys.exit(2)
    run_script(partial(extension("megatron, with deepspeed"), *ignore), words, "megatron")
