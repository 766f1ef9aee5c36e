"""``python -m hexad.compat.nemo [-m] SCRIPT [ARGUMENTS]`` runs a script that imports nemo, unchanged, in this
process; with ``-m`` a module by its name, as Python does: ``torchrun ... -m hexad.compat.nemo gpt_train.py
...``. Ranks that Lightning's trainer starts run it likewise."""

import sys
from collections.abc import Sequence
from pathlib import Path

from ..facade.installed import run_script
from . import install


def _start_ranks_with(command: Sequence[str]) -> None:
    """Make a command that of the ranks that Lightning's trainer starts: its own is the script without us."""
    from lightning.pytorch.strategies.launchers import subprocess_script

    vars(subprocess_script)["_basic_subprocess_cmd"] = lambda: list(command)


if __name__ == "__main__":
    words = sys.argv[1:]
    as_module = words[:1] == ["-m"]
    words = words[as_module:]
    if not words or not (as_module or Path(words[0]).is_file()):
        script_name = words[0] if words else "no script"
        print(f"hexad: error: found {script_name}; expected a script and its arguments", file=sys.stderr)
        sys.exit(2)
    script = ["-m", words[0]] if as_module else [str(Path(words[0]).resolve())]
    _start_ranks_with([sys.executable, "-m", "hexad.compat.nemo", *script, *words[1:]])
    run_script(install, words, "nemo", as_module)
