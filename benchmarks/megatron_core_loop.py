"""``examples/run_simple_mcore_train_loop.py`` of a Megatron-LM checkout, unchanged, on Hexad's interfaces:
losses of two tensor ranks, as the script has them, of two pipeline ranks and of one rank.

    git clone https://github.com/NVIDIA/Megatron-LM
    python benchmarks/megatron_core_loop.py Megatron-LM --output megatron_core_loop.json

The script has no options: for other layouts ``initialize_model_parallel`` is called with other degrees than
the script's.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from facts import facts

SCRIPT = "examples/run_simple_mcore_train_loop.py"
RUNNER = """
import runpy, sys
from hexad.compat import megatron
megatron.install()
from hexad.compat.megatron import parallel_state
create, degrees = parallel_state.initialize_model_parallel, list(map(int, sys.argv[2:]))
parallel_state.initialize_model_parallel = lambda *_, **__: create(*degrees)
sys.argv = sys.argv[1:2]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
LAYOUTS = {"one rank": (1, 1), "tensor 2": (2, 1), "pipeline 2": (1, 2)}
"""Degrees of tensor and pipeline."""


def losses(script: Path, folder: Path, degrees: tuple[int, int]) -> list[float]:
    """The losses that the script prints.

    Raises:
        SystemExit: it fails.
    """
    folder.mkdir()
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    command.append(str(degrees[0] * degrees[1]))
    if degrees == (2, 1):
        command += ["-m", "hexad.compat.megatron", str(script)]
    else:
        (folder / "runner.py").write_text(RUNNER)
        command += [str(folder / "runner.py"), str(script), *map(str, degrees)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stderr[-6000:])
    if "Successfully loaded the model" not in done.stdout:
        sys.exit(f"the checkpoint was not loaded: {done.stdout[-2000:]}")
    found = [float(text) for text in re.findall(r"'lm loss': tensor\(([\d.]+)", done.stdout)]
    return found[:: len(found) // 5] if found else found  # of ranks that print the same


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--output", type=Path, help="result file")
    options = parser.parse_args()
    script = (options.checkout / SCRIPT).resolve()
    with tempfile.TemporaryDirectory() as directory:
        found = {
            name: losses(script, Path(directory) / name.replace(" ", "-"), degrees)
            for name, degrees in LAYOUTS.items()
        }
    for step, row in enumerate(zip(*found.values(), strict=True)):
        print(f"step {step}: " + ", ".join(f"{loss:.4f} ({name})" for name, loss in zip(found, row)))
    worst = max(abs(a - b) for row in zip(*found.values(), strict=True) for a in row for b in row)
    print(f"largest difference of what the script prints: {worst:.4f}")
    if options.output:
        result = {**facts(), "losses": found, "difference": worst}
        options.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
