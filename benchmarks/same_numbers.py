"""Whether two versions of Hexad compute the same bits: losses, norms, generated tokens, scores.

    python benchmarks/same_numbers.py CHECKOUT [CHECKOUT] [--only PATTERN] [--output FILE.json]

For changes that must not change a number. Every case below is trained for a few steps by ``hexad train`` with
the source of each checkout (by default the second one is this), one thread per rank; ``metrics.jsonl`` has
all digits of losses and norms. Some cases also generate and score with the checkpoint. Values must be equal.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from facts import facts

ROOT = Path(__file__).resolve().parents[1]
HEXAD = Path(sys.executable).with_name("hexad")

_TEXT = """
run: {dir: DIR, seed: 1234, steps: 4, device: cpu, compile: none}
model: {family: llama, layers: 4, hidden: 48, heads: 4, kv_heads: 2, ffn_hidden: 88}
data: {train: PREFIX, tokenizer: byte, sequence: 60}
batch: {micro: 2, global: 8}
precision: {dtype: fp64}
lr_schedule: {kind: cosine, warmup: 2, min_lr: 1.0e-5}
checkpoint: {every: 4}
"""

_EXPERTS = ["model.moe={experts: 4, top_k: 2, ffn_hidden: 24, aux_loss: 0.01, z_loss: 0.001}"]
_ISOLATED = "data.documents=isolate"
_LATENT = [
    "model.family=deepseek_v3",
    "model.kv_heads=4",
    "model.mla={q_rank: 16, kv_rank: 12, nope_dim: 8, rope_dim: 4, value_dim: 8}",
    "model.moe={experts: 4, top_k: 2, ffn_hidden: 24, first_dense: 1, score: sigmoid, bias_rate: 0.001}",
]


@dataclass(frozen=True)
class Case:
    """A layout, with settings.

    Attributes:
        name: what is special about it.
        ranks: to start.
        settings: beside those of all cases.
        texts: generate with the checkpoint, and score what was generated.
    """

    name: str
    ranks: int
    settings: tuple[str, ...] = ()
    texts: bool = False


def _case(name: str, ranks: int, *settings: str, texts: bool = False) -> Case:
    dotted = (
        f"parallel.{setting}" if "." not in setting.partition("=")[0] else setting for setting in settings
    )
    return Case(name, ranks, tuple(dotted), texts)


CASES = (
    _case("one rank", 1, texts=True),
    _case("tensor, sequence", 2, "tensor=2", texts=True),
    _case("tensor 4, not sequence, shared KV heads", 4, "tensor=4", "sequence=false"),
    _case("context, ring", 2, "context=2"),
    _case("context, ulysses, windows", 2, "context=2", "context_method=ulysses", "model.sliding_window=20"),
    _case("context, all_gather, documents", 2, "context=2", "context_method=all_gather", _ISOLATED),
    _case("documents", 1, _ISOLATED),
    _case("pipeline, 1f1b", 2, "pipeline=2", texts=True),
    _case("pipeline, interleaved", 2, "pipeline=2", "virtual_stages=2", "schedule=interleaved"),
    _case("pipeline, zb_h1", 2, "pipeline=2", "schedule=zb_h1"),
    _case("pipeline, zb_v", 2, "pipeline=2", "virtual_stages=2", "schedule=zb_v"),
    _case("pipeline, dualpipe_v", 2, "pipeline=2", "virtual_stages=2", "schedule=dualpipe_v"),
    _case("data, zero 0", 2),
    _case("data, zero 1", 2, "zero=1"),
    _case("data, zero 2", 2, "zero=2"),
    _case("data, zero 3", 2, "zero=3"),
    _case("data 4, zero 3, replicas", 4, "zero=3", "replicas=2"),
    _case("tensor x pipeline x data, zero 2", 8, "tensor=2", "pipeline=2", "zero=2"),
    _case("tensor x context x pipeline, zero 3", 8, "tensor=2", "context=2", "pipeline=2", "zero=3"),
    _case("recompute selective", 2, "tensor=2", "memory.recompute=selective"),
    _case("recompute full", 2, "pipeline=2", "memory.recompute=full"),
    _case("LoRA", 2, "tensor=2", "model.lora={rank: 4, alpha: 8, targets: [q, v, down]}", texts=True),
    _case("exact", 2, "tensor=2", "precision.exact=true", "precision.dtype=fp32", texts=True),
    _case("GPT-2, dropout", 2, "tensor=2", "model.family=gpt2", "model.kv_heads=4", "model.dropout=0.1"),
    _case("experts", 2, "expert=2", *_EXPERTS, texts=True),
    _case("experts, tensor x pipeline", 4, "tensor=2", "expert=2", "pipeline=2", *_EXPERTS),
    _case("latent attention", 2, "tensor=2", *_LATENT, texts=True),
    _case("fp32", 2, "precision.dtype=fp32"),
    _case("bf16, pointwise", 2, "tensor=2", "precision.dtype=bf16", "run.compile=pointwise"),
    _case("bf16, full", 1, "precision.dtype=bf16",
          "run.compile=full"),
    _case("fp16, offload", 2, "zero=1", "precision.dtype=fp16", "memory.offload=optimizer"),
)  # fmt: skip


def run(checkout: Path, folder: Path, *arguments: str) -> None:
    """Run a command of a checkout's source."""
    environment = os.environ | {"PYTHONPATH": str(checkout / "src"), "OMP_NUM_THREADS": "1"}
    command = [str(HEXAD), *arguments]
    for _ in range(3):  # another process may take the port of a rendezvous
        result = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, check=False
        )
        if "EADDRINUSE" not in result.stderr:
            break
    if result.returncode:
        raise SystemExit(f"{checkout}: {' '.join(arguments)}\n{result.stdout[-2000:]}{result.stderr[-4000:]}")


def numbers(case: Case, checkout: Path, folder: Path) -> dict[str, Any]:
    """What a version computes of a case."""
    folder.mkdir(parents=True)
    prefix = folder.parents[1] / "text"
    (folder / "run.yaml").write_text(_TEXT.replace("DIR", str(folder / "run")).replace("PREFIX", str(prefix)))
    run(checkout, folder, "train", "run.yaml", "--nproc", str(case.ranks), *case.settings)
    lines = [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()]
    values: dict[str, Any] = {
        name: [line[name] for line in lines] for name in ("loss", "grad_norm", "comm_bytes")
    }
    if case.texts:
        common = ["--prompt", "import ", "--prompt", "The quick", "--tokens", "12", "--logprobs"]
        run(checkout, folder, "generate", "run", *common, "--output", "texts.jsonl")
        sampled = ["--temperature", "0.9", "--top-p", "0.8", "--top-k", "40", "--nproc", str(case.ranks)]
        run(checkout, folder, "generate", "run", *common, *sampled, "--output", "sampled.jsonl")
        scored = ["--input", "sampled.jsonl", "--output", "scores.jsonl", "--nproc", str(case.ranks)]
        run(checkout, folder, "score", "run", *scored, *case.settings)
        for name in ("texts", "sampled", "scores"):
            lines = [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]
            values[name] = [
                {key: line[key] for key in line if key != "request"} for line in lines
            ]  # has paths
    return values


def main() -> None:
    """Compare two checkouts in every case."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkouts", nargs="+", type=Path, metavar="CHECKOUT")
    parser.add_argument("--only", default="", help="names of cases to run, a regular expression")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    one, two = [path.resolve() for path in (*options.checkouts, ROOT)[:2]]
    results, differing = {}, 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        source = Path(json.__file__).parent.glob("*.py")
        (folder / "text.txt").write_text("\n".join(path.read_text() for path in sorted(source)))
        run(two, folder, "data", "build", "--input", "text.txt", "--output", "text", "--tokenizer", "byte")
        for number, case in enumerate(CASES):
            if not re.search(options.only, case.name):
                continue
            before, after = (
                numbers(case, path, folder / side / str(number)) for side, path in (("1", one), ("2", two))
            )
            different = [key for key in before if before[key] != after[key]]
            differing += bool(different)
            results[case.name] = {
                "ranks": case.ranks,
                "settings": case.settings,
                "same": not different,
                **after,
            }
            print(
                f"{case.name:45} {'same bits' if not different else 'DIFFER: ' + ', '.join(different)}",
                flush=True,
            )
            for key in different[:1]:
                print(f"    {key}: {before[key]}\n    {' ' * len(key)}  {after[key]}")
    print(f"{len(results) - differing} of {len(results)} cases have the same bits")
    if options.output:
        options.output.write_text(json.dumps({**facts(), "cases": results}, indent=1) + "\n")
    sys.exit(bool(differing))


if __name__ == "__main__":
    main()
