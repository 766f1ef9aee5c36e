"""``python -m hexad.compat.nemo [-m] SCRIPT [ARGUMENTS]`` runs a script that imports nemo, unchanged, in this
process; with ``-m`` a module by its name, as Python does: ``torchrun ... -m hexad.compat.nemo gpt_train.py
...``."""

import sys
from pathlib import Path

from ..facade.installed import run_script
from . import install

if __name__ == "__main__":
    words = sys.argv[1:]
    as_module = words[:1] == ["-m"]
    words = words[as_module:]
    if not words or not (as_module or Path(words[0]).is_file()):
        given = words[0] if words else "no script"
        print(f"hexad: error: found {given}; expected a script and its arguments", file=sys.stderr)
        sys.exit(2)
    run_script(install, words, as_module)
