"""DeepSpeed configuration files of other repositories: which does Hexad accept, and which the package?

    git clone https://github.com/huggingface/trl
    git clone https://github.com/deepspeedai/DeepSpeedExamples
    python benchmarks/deepspeed_configs.py trl DeepSpeedExamples --output deepspeed_configs.json

Needs the ``deepspeed`` package and ``hexad[hjson]``. A file counts as a configuration if it is YAML or JSON,
comments and trailing commas allowed, and has a batch size or ``zero_optimization`` at its top level.
``"auto"`` is replaced as transformers' Trainer does by default. The package accepts a file if its
``DeepSpeedConfig`` can be made of it, for one of the worlds of ``--worlds``; Hexad if an engine around a
small module can.
"""

import argparse
import json
import logging
import os
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import yaml
from facts import facts

from hexad.compat.deepspeed.config import read_config, read_json, with_autos_filled
from hexad.compat.deepspeed.engine import DeepSpeedEngine
from hexad.compat.facade import world
from hexad.config import HexadError

KINDS = ("json", "jsonc", "yml", "yaml")
MARKS = ("train_batch_size", "train_micro_batch_size_per_gpu", "zero_optimization")


def configurations(source: Path) -> Iterator[tuple[Path, dict[str, Any]]]:
    """The configuration files below a directory, and their keys."""
    for path in sorted(path for kind in KINDS for path in source.rglob(f"*.{kind}")):
        if path.stat().st_size > 100_000:
            continue
        if not any(f'"{mark}"' in path.read_text(encoding="utf-8", errors="replace") for mark in MARKS):
            continue
        try:
            tree = yaml.safe_load(path.read_text()) if path.suffix in (".yml", ".yaml") else read_json(path)
        except (HexadError, yaml.YAMLError):
            tree = {MARKS[0]: None}  # a template; both packages refuse it
        if isinstance(tree, dict) and any(mark in tree for mark in MARKS):
            yield path, tree


class Ranks:
    """Data ranks of a world that does not exist, for the package's configuration."""

    def __init__(self, size: int) -> None:
        self.size = size

    def get_data_parallel_world_size(self) -> int:
        """The number of data ranks."""
        return self.size


def reason_of(attempt: Callable[[int], Any], worlds: list[int]) -> str:
    """Why an attempt fails in each of the worlds, for the first of them; empty where it succeeds in one."""
    reasons = []
    for size in worlds:
        try:
            attempt(size)
        except Exception as error:
            reasons.append(f"{type(error).__name__}: {error}".splitlines()[0][:200])
        else:
            return ""
    return reasons[0]


def accepted_by_package(tree: dict[str, Any], worlds: list[int]) -> str:
    """Why the package refuses a file; empty where it accepts it."""
    from deepspeed.runtime.config import DeepSpeedConfig

    return reason_of(lambda size: DeepSpeedConfig(with_autos_filled(tree, size)[0], mpu=Ranks(size)), worlds)


def accepted_by_hexad(tree: dict[str, Any], worlds: list[int]) -> str:
    """Why Hexad refuses a file; empty where it accepts it."""

    def attempt(size: int) -> None:
        checked = read_config(with_autos_filled(tree, size)[0], size)
        DeepSpeedEngine(torch.nn.Linear(4, 4), checked, torch.device("cpu"))

    return reason_of(attempt, worlds)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("sources", type=Path, nargs="+", help="checkouts")
    parser.add_argument("--worlds", type=int, nargs="+", default=[1, 8, 2, 4, 16, 32, 64], help="data ranks")
    parser.add_argument("--output", type=Path, help="result file")
    options = parser.parse_args()
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="localhost", MASTER_PORT="29531")
    logging.disable(logging.ERROR)
    world.join()
    rows = []
    for source in options.sources:
        for path, tree in configurations(source):
            theirs, ours = (take(tree, options.worlds) for take in (accepted_by_package, accepted_by_hexad))
            rows.append({"repository": source.name, "file": str(path.relative_to(source))})
            rows[-1] |= {"the package": theirs or "accepted", "hexad": ours or "accepted"}
    for row in rows:
        if row["hexad"] != "accepted":
            also = "" if row["the package"] == "accepted" else " (the package refuses it too)"
            print(f"{row['repository']}/{row['file']}{also}: {row['hexad']}")
    verdicts = Counter((row["the package"] == "accepted", row["hexad"] == "accepted") for row in rows)
    counts = {
        "files": len(rows),
        "repositories": len({row["repository"] for row in rows}),
        "accepted by the package": verdicts[True, True] + verdicts[True, False],
        "accepted by hexad": verdicts[True, True] + verdicts[False, True],
        "accepted by the package, not by hexad": verdicts[True, False],
        "accepted by hexad, not by the package": verdicts[False, True],
    }
    print(json.dumps(counts, indent=1))
    if options.output:
        options.output.write_text(json.dumps({**facts(), **counts, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
