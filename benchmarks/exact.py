"""What exact arithmetic costs, and whether it keeps its promise at a real model's size.

    python benchmarks/exact.py [--model smollm2-135m] [--dtypes fp32 bf16] [--requests 32] [--repeats 3]
        [--output FILE.json]

Costs: tokens per second of generation (prompts of 16 to 512 random ids, answers of 16 to 256), of scoring
what was generated, and of training steps of 1,024 tokens; exact and usual arithmetic take turns in one
process with two threads, medians count. Bits: the requests are generated in some layouts and scored in
others, each by ``hexad`` with one thread per rank, and all files are compared.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
HEXAD = Path(sys.executable).with_name("hexad")
sys.path.insert(0, str(ROOT / "src"))

from facts import facts  # noqa: E402
from generation import SHAPES, prepare  # noqa: E402

GENERATION = ((1, ()), (3, ("parallel.tensor=3",)), (2, ("parallel.pipeline=2",)), (2, ("parallel.data=2",)))
SCORING = (
    (1, ()),
    (3, ("parallel.tensor=3",)),
    (2, ("parallel.context=2",)),
    (2, ("parallel.pipeline=2",)),
    (2, ("parallel.zero=3",)),
)
"""Ranks, and settings."""


def timed(action: Callable[[], int]) -> float:
    """Tokens per second."""
    begin = time.perf_counter()
    tokens = action()
    return tokens / (time.perf_counter() - begin)


def generation(model: str, requests: list[dict[str, Any]], settings: list[str]) -> Callable[[], int]:
    """Generates all requests."""
    from hexad import Generator
    from hexad.generation.requests import Request
    from hexad.generation.sampling import Sampling

    generator = Generator(f"hf:{model}", settings)
    entries = [
        (number, entry, Request(tuple(entry["prompt"]), Sampling(tokens=entry["tokens"])))
        for number, entry in enumerate(requests)
    ]

    def turn() -> int:
        generator.scheduler.pool.forget()
        return sum(generator.shared(lambda: [len(text.tokens) for _, text in generator.written(entries)]))

    return turn


def engines(model: str, settings: list[str]) -> dict[str, Callable[[], int]]:
    """Scores sequences, and trains."""
    import torch

    from hexad import Engine, Microbatch
    from hexad.engine.scoring import Scorer
    from hexad.planning.layouts import planned_layout
    from hexad.planning.resolve import resolve
    from hexad.planning.saved_model import scored_model
    from hexad.topology.mesh import Mesh

    saved = scored_model(f"hf:{model}", [*settings, "data.sequence=1024"], 1)
    resolved = resolve(saved.config, planned_layout(saved.config, 1))
    mesh = Mesh.create(resolved.layout, torch.device("cpu"))
    scorer, engine = Scorer(resolved, mesh, saved.weights), Engine(resolved, mesh)
    chance = torch.Generator().manual_seed(0)
    tokens = torch.randint(1, 257, (1, 1025), generator=chance)
    batch = Microbatch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
    sequences = [tokens[0, : 64 * n].tolist() for n in range(1, 8)]

    def scoring() -> int:
        return sum(map(len, scorer.scores(sequences)))

    def training() -> int:
        engine.train_step([batch])
        return 1024

    return {"scoring": scoring, "training": training}


def costs(work: Path, dtype: str, repeats: int) -> list[dict[str, Any]]:
    """Rows of figures."""
    requests = json.loads((work / "requests.json").read_text())
    model, rates = str(work / "model"), dict[tuple[str, bool], list[float]]()
    for exact in (False, True):
        settings = [f"precision.dtype={dtype}", f"precision.exact={str(exact).lower()}"]
        actions = {"generation": generation(model, requests, settings), **engines(model, settings)}
        for what, action in actions.items():
            action()
            rates[what, exact] = [timed(action) for _ in range(repeats)]
    rows = []
    for what in ("generation", "scoring", "training"):
        usual, exact_rate = (median(rates[what, exact]) for exact in (False, True))
        row = {"dtype": dtype, "what": what, "usual": round(usual, 1), "exact": round(exact_rate, 1)}
        rows.append({**row, "times_slower": round(usual / exact_rate, 2)})
    return rows


def bits(work: Path, dtype: str) -> dict[str, Any]:
    """How many log-probabilities differ between files of all layouts."""
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src")}
    common = [f"precision.dtype={dtype}", "--exact", "data.sequence=1536"]
    prompts = work / "prompts.jsonl"
    requests = json.loads((work / "requests.json").read_text())
    prompts.write_text("".join(json.dumps({"prompt": entry["prompt"]}) + "\n" for entry in requests))

    def run(command: str, *options: str, ranks: int) -> None:
        arguments = [command, f"hf:{work / 'model'}", *options, *common, "--nproc", str(ranks)]
        subprocess.run([str(HEXAD), *arguments], check=True, env=variables)

    files = []
    for number, (ranks, settings) in enumerate(GENERATION):
        files.append(work / f"generated-{dtype}-{number}.jsonl")
        options = ["--prompts", str(prompts), "--output", str(files[-1]), "--tokens", "32", "--logprobs"]
        run("generate", *options, "--prompt-logprobs", "--temperature", "1", *settings, ranks=ranks)
    for number, (ranks, settings) in enumerate(SCORING):
        scored = work / f"scored-{dtype}-{number}.jsonl"
        run("score", "--input", str(files[0]), "--output", str(scored), *settings, ranks=ranks)
        files.append(scored)
    contents = [sorted(map(json.loads, file.read_text().splitlines()), key=_request) for file in files]
    values = [
        [value for row in rows for value in (*row["prompt_logprobs"], *row["logprobs"])] for rows in contents
    ]
    different = sum(one != other for numbers in values for one, other in zip(numbers, values[0], strict=True))
    pairs = len(GENERATION) * len(SCORING)
    return {"dtype": dtype, "pairs": pairs, "log_probabilities": len(values[0]), "different": different}


def _request(row: dict[str, Any]) -> str:
    return str(row["request"])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=SHAPES, default="smollm2-135m")
    parser.add_argument("--dtypes", nargs="+", default=["fp32", "bf16"])
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    document: dict[str, Any] = {
        "facts": facts("transformers"),
        "model": arguments.model,
        "costs": [],
        "bits": [],
    }
    with tempfile.TemporaryDirectory() as directory:
        work = Path(directory)
        prepare(work, arguments.model, arguments.requests)
        for dtype in arguments.dtypes:
            for row in costs(work, dtype, arguments.repeats):
                document["costs"].append(row)
                print(json.dumps(row), flush=True)
        for dtype in arguments.dtypes:
            document["bits"].append(bits(work, dtype))
            print(json.dumps(document["bits"][-1]), flush=True)
    if arguments.output:
        arguments.output.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
