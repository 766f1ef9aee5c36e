"""Context parallel: the time of a step of long sequences, and what of its messages a slow link exposes.

    python benchmarks/context.py [--tokens 16384 32768] [--rounds 3] [--json FILE]
    sudo python benchmarks/context.py --megabits 1000 [--tokens 16384] [--rounds 3] [--json FILE]

Without a link: one process, and two ranks by each method, take turns with a step of the same sequence; and
PyTorch's own context parallel, compared with one process. With one: two ranks in two network namespaces, of
which a round has these steps:

- free: what attention sends is left out (the results are wrong), which gives the seconds of computation;
- full: the link without its limit;
- overlapped: the limited link, Hexad as it is;
- waiting: the limited link, every message waited for where it is sent;

and the bytes of isolated short documents by the ring, beside those of an all-gather.
"""

import argparse
import json
import signal
import sys
from pathlib import Path
from statistics import median
from typing import Any

from facts import facts
from link import Link, exposed, why_not
from turns import Program, Step, serve, wall

METHODS = ("one", "ring", "ulysses", "all_gather")
SHORT = 200
"""Tokens of a short document."""


def settings(method: str, tokens: int, documents: str) -> dict[str, Any]:
    """A layer whose attention is most of the work."""
    model = {"layers": 1, "hidden": 128, "heads": 2, "kv_heads": 2, "ffn_hidden": 256, "vocab": 512}
    parallel = {} if method == "one" else {"context": 2, "context_method": method}
    return {
        "run": {"device": "cpu", "compile": "none", "steps": 100},
        "model": model,
        "data": {"sequence": tokens, "documents": documents},
        "batch": {"micro": 1, "global": 1},
        "parallel": parallel,
        "precision": {"dtype": "fp32"},
        "lr_schedule": {"kind": "constant", "warmup": 0},
    }


def hexad(method: str, tokens: int) -> Step:
    """A step of Hexad; ``short`` is one of isolated documents."""
    import torch

    from hexad import Engine, Layout, Mesh, Microbatch, load_config

    sys.path.insert(0, str(Path(__file__).parent))
    from traffic import Traffic

    traffic = Traffic()
    engines = {}
    for documents in ("join", "isolate"):
        config = load_config(settings(method, tokens, documents))
        layout = Layout.from_settings(config.parallel, 1 if method == "one" else 2)
        engines[documents] = Engine(config, Mesh.create(layout, torch.device("cpu")))
    ids = torch.randint(0, 512, (1, tokens + 1), generator=torch.Generator().manual_seed(1))
    whole = Microbatch(ids[:, :-1].contiguous(), ids[:, 1:].contiguous())
    short = Microbatch(whole.tokens, whole.labels, (*range(0, tokens, SHORT), tokens))

    def step(command: str) -> dict[str, Any]:
        mode = command if command in Traffic.MODES else "overlapped"
        traffic.be(mode)
        engine = engines["isolate" if command == "short" else "join"]
        before = engine.mesh.sent_bytes()["context"]
        result = engine.train_step([short if command == "short" else whole])
        sent = engine.mesh.sent_bytes()["context"] - before
        return {"loss": result.loss, "sent": sent, "skipped": result.skipped}

    return step


def torch_attention(tokens: int) -> Step:
    """The same attention by PyTorch's context parallel, compared with one process."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel
    from torch.distributed.tensor.experimental._attention import context_parallel_unshard
    from torch.nn import functional as F

    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("context",))
    generator = torch.Generator().manual_seed(1)
    whole = [torch.randn(1, 2, tokens, 64, generator=generator) for _ in range(3)]

    def step(_: str) -> dict[str, Any]:
        parts = [tensor.clone() for tensor in whole]
        try:
            with context_parallel(mesh, buffers=parts, buffer_seq_dims=[2, 2, 2]):
                # By the module's name: the context replaces the module's function.
                out = F.scaled_dot_product_attention(*parts, is_causal=True)
                (gathered,) = context_parallel_unshard(mesh, [out], [2])
        except Exception as error:
            lines = str(error).strip().splitlines() or [""]
            return {"loss": None, "verdict": f"{type(error).__name__}: {lines[0]}"}
        error = float((gathered - F.scaled_dot_product_attention(*whole, is_causal=True)).abs().max())
        return {"loss": None, "verdict": f"largest error of the output {error:.1e}"}

    return step


def worker(method: str, tokens: int) -> None:
    """One rank."""
    world = 1 if method == "one" else 2
    serve(lambda: torch_attention(tokens) if method == "torch" else hexad(method, tokens), world)


def command(method: str, tokens: int) -> list[str]:
    """Of one rank."""
    return [sys.executable, __file__, "--worker", method, str(tokens)]


def step_times(tokens: int, rounds: int) -> dict[str, Any]:
    """Medians of all methods, in seconds, and ratios to one process in the same round."""
    programs = {name: Program([command(name, tokens)] * (1 if name == "one" else 2)) for name in METHODS}
    try:
        for program in programs.values():
            program.wait()
        seconds: dict[str, list[float]] = {name: [] for name in METHODS}
        losses = {}
        for turn in range(rounds + 1):
            for name, program in programs.items():
                step = program.step()
                losses.setdefault(name, next(rank["loss"] for rank in step if rank["loss"] is not None))
                if turn:  # the first is slower
                    seconds[name].append(wall(step))
        for program in programs.values():
            program.close()
    finally:
        for program in programs.values():
            program.kill()
    paired = {
        name: median(mine / one for mine, one in zip(seconds[name], seconds["one"])) for name in METHODS
    }
    return {
        name: {"seconds": median(seconds[name]), "ratio": paired[name], "loss": losses[name]}
        for name in METHODS
    }


def torch_verdict(tokens: int) -> str:
    """What becomes of PyTorch's own here."""
    program = Program([command("torch", tokens)] * 2)
    try:
        program.wait()
        verdict = str(program.step()[0]["verdict"])
        program.close()
    except RuntimeError:
        verdict = "a rank died"
    finally:
        program.kill()
    return verdict


def over_link(link: Link, method: str, tokens: int, rounds: int, megabits: float) -> dict[str, Any]:
    """Medians over the rounds, in seconds; bytes that a rank sends over the context axis."""
    program = link.program(command(method, tokens))
    try:
        program.wait()
        sent = [rank["sent"] for rank in program.step("overlapped")]
        short = [rank["sent"] for rank in program.step("short")]
        seconds = link.in_turns(program, ("full", "overlapped", "waiting", "free"), rounds, megabits)
        program.close()
    finally:
        program.kill()
    figures: dict[str, Any] = {name: median(times) for name, times in seconds.items()}
    figures |= {f"exposed_{name}": exposed(seconds, name) for name in ("overlapped", "waiting")}
    ideal = max(sent) * 8 / (megabits * 1e6)
    return figures | {"sent_bytes": max(sent), "short_bytes": max(short), "ideal": ideal}


def main() -> None:
    """Measure; a table and JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokens", nargs="+", type=int, default=[16384, 32768])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--megabits", type=float, help="over a link with this bandwidth each way, Mbit/s")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        worker(options.worker[0], int(options.worker[1]))
        return
    if options.megabits and (problem := why_not()):
        sys.exit(f"context.py: {problem}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that namespaces are removed
    results = facts() | ({"megabits": options.megabits} if options.megabits else {})
    results["context"] = linked(options) if options.megabits else alone(options)
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


def alone(options: argparse.Namespace) -> dict[str, Any]:
    """Step times of all methods."""
    figures: dict[str, Any] = {}
    for tokens in options.tokens:
        figures[str(tokens)] = step_times(tokens, options.rounds)
        for name, row in figures[str(tokens)].items():
            print(
                f"{tokens:6d} {name:10s} {row['seconds']:8.2f} s  {row['ratio']:.3f}  {row['loss']:.6f}",
                flush=True,
            )
    figures["torch"] = torch_verdict(1024)
    print(f"PyTorch's context parallel: {figures['torch']}")
    return figures


def linked(options: argparse.Namespace) -> dict[str, Any]:
    """Every method but one process over the link."""
    measured: dict[str, Any] = {}
    with Link() as link:
        for tokens in options.tokens:
            for method in METHODS[1:]:
                row = over_link(link, method, tokens, options.rounds, options.megabits)
                measured.setdefault(str(tokens), {})[method] = row
                names = (
                    "free",
                    "full",
                    "waiting",
                    "overlapped",
                    "exposed_waiting",
                    "exposed_overlapped",
                    "ideal",
                )
                figures = "  ".join(f"{name} {row[name]:.3f}" for name in names)
                sent = f"{row['sent_bytes'] / 1e6:.1f} MB, short documents {row['short_bytes'] / 1e6:.2f} MB"
                print(f"{tokens:6d} {method:10s} {figures}  {sent}", flush=True)
    return measured


if __name__ == "__main__":
    main()
