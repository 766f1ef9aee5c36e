"""Write the tables of pages in ``docs`` from ``benchmarks/results/*.json``.

    python benchmarks/report.py [--check]

A table stands between ``<!-- results: NAME -->`` and ``<!-- end -->``; NAME is a result file's. What is not
measured yet says so. With ``--check`` nothing is written, and a page that is out of date is an error.
"""

import argparse
import json
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

HERE = Path(__file__).parent
RESULTS = HERE / "results"
GPU = RESULTS / "gpu"
PAGE = HERE.parent / "docs" / "benchmarks.md"
PAGES = tuple(
    PAGE.parent / f"{name}.md" for name in ("benchmarks", "context", "any-model", "lightning", "nemo")
)
PICTURE = PAGE.parent / "images" / "overlap.svg"
_SPACE = re.compile(r"(<!-- results: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
RATIOS = ("step_seconds", "paired", "cpu_seconds", "peak_rss_mb")


def page(text: str) -> str:
    """The page with all its tables renewed."""
    return _SPACE.sub(lambda match: f"{match[1]}{section(match[2])}{match[3]}", text)


def section(name: str) -> str:
    """One result file as a table and a line on how it was made."""
    if name == "gpu":
        return "\n" + "\n".join(gpu({path.stem: _read(path) for path in sorted(GPU.glob("*.json"))})) + "\n\n"
    path = RESULTS / f"{name}.json"
    if not path.exists():
        return "\nNot measured yet.\n\n"
    results = _read(path)
    kinds = {
        "stages": overlap,
        "layouts": overlap_tensor,
        "bandwidth_over_raw": checkpoint_io,
        "bounds": roofline,
        "first_rank": cost_of_start,
        "sets": context_balance,
        "rows": deepspeed_interface,
        "fits": lightning_interface,
        "plans": transformers_plans,
        "recipes": nemo_recipes,
        "frameworks": moe_conformance,
        "source": lightning_tests,
        "predictions": cpu_layouts,
    }
    lines = next((lines for key, lines in kinds.items() if key in results), step_time)(results)
    return "\n" + "\n".join([*lines, "", *origin(results)]) + "\n\n"


def _read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def _table(columns: str, rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """Columns are separated by ``|``."""
    yield f"| {columns} |"
    yield "|---" * (columns.count("|") + 1) + "|"
    yield from (f"| {' | '.join(row)} |" for row in rows)
    yield ""


def gpu(steps: dict[str, Any]) -> Iterator[str]:
    """What the steps of ``gpu_report.py`` have measured, by name."""
    figures = {name: step["figures"] for name, step in steps.items() if "figures" in step and "facts" in step}
    parts = {
        "models": gpu_models,
        "ceilings": gpu_ceilings,
        "layouts": gpu_layouts,
        "nccl": gpu_nccl,
        "one_rank": gpu_one_rank,
        "commands": gpu_commands,
        "bits": gpu_bits,
        "inference": gpu_inference,
        "rates": gpu_rates,
        "memory": gpu_memory,
    }
    for name, part in parts.items():
        if name in figures:
            yield from part(figures[name])
    made: dict[str, list[str]] = {}
    for name in parts:
        if name in figures:
            facts = steps[name]["facts"]
            device = next(value for key, value in facts.items() if key.startswith("name,")).split(", ")
            software = f"torch {facts['torch']}, NCCL {facts['nccl']}, Hexad at {facts.get('commit', '?')}"
            line = f"{device[0]}, driver {device[2]}, {facts['machine']}; {software}: `{facts['command']}`"
            made.setdefault(line, []).append(name)
    yield from (f"- {', '.join(names)}: {line}" for line, names in made.items())


def gpu_models(figures: dict[str, Any]) -> Iterator[str]:
    """A row per model and program."""
    rows = []
    for row in figures["steps"]:
        cells = [row["model"], row["program"], str(row["micro"])]
        if "step_ms" in row:
            cells += [f"{row['step_ms']:.0f}", f"{row['tokens_per_second']:,.0f}", f"{row['mfu']:.3f}"]
            cells += [
                f"{row[name]:.1f}" if name in row else "" for name in ("predicted_gib", "allocated_gib")
            ]
            rows.append([*cells, f"{row['launches']:.0f}"])
    columns = "model | program | sequences | ms | tokens/s | MFU | GiB predicted | GiB | launches"
    yield from _table(columns, rows)
    rows = [
        [row["model"], row["kind"], f"{row['predicted_ms']:.0f}", f"{row['measured_ms']:.0f}"]
        for row in figures.get("roofline", [])
        if "predicted_ms" in row
    ]
    yield from _table("of Hexad's steps | kernels | ms by the roofline | ms measured", rows)


def gpu_ceilings(figures: dict[str, Any]) -> Iterator[str]:
    """Products, from the slowest to the fastest weight of a model and tensor degree; attention; copies."""
    rows = []
    kinds = ("forward", "input_gradient", "weight_gradient")
    products = figures.get("matrix_products", [])
    for key in dict.fromkeys((row["model"], row["tensor"]) for row in products):
        shapes = [row for row in products if (row["model"], row["tensor"]) == key]
        rates = [[row[f"{kind}_tflops"] for row in shapes] for kind in kinds]
        rows.append([key[0], str(key[1]), *(f"{min(rate):.0f} to {max(rate):.0f}" for rate in rates)])
    yield from _table("products of | tensor | forward, TFLOP/s | input gradient | weight gradient", rows)
    columns = "attention of | tokens | kernel | forward, TFLOP/s | backward | ms"
    yield from _table(
        columns,
        (
            [
                *(row["model"], f"{row['tokens']:,}", row["kernel"], f"{row['forward_tflops']:.0f}"),
                *(f"{row['backward_tflops']:.0f}", f"{row['both_ms']:.2f}"),
            ]
            for row in figures.get("attention", [])
            if "both_ms" in row
        ),
    )
    copies = (f"{row['copy']} {row['tb_per_second']:.3g} TB/s" for row in figures.get("copies", []))
    yield f"Copies: {', '.join(copies)}."
    yield ""
    forms = figures.get("weight_gradient_forms", [])
    if forms:
        names = [name for name in forms[0] if name.endswith("tflops")]
        titles = " | ".join(name.removesuffix(", tflops") for name in names)
        rows = [[f"{row['out']} x {row['in']}", *(f"{row[name]:.0f}" for name in names)] for row in forms]
        yield from _table(f"weight gradient, TFLOP/s | {titles}", rows)


def gpu_layouts(figures: dict[str, Any]) -> Iterator[str]:
    """How many cases agree, and how well."""
    passed, worst = figures["cases_passed"], max(row["error"] for row in figures["cases"] if "error" in row)
    yield (
        f"Ranks that share the GPU: {passed['passed']} of {passed['run']} cases of the parity grid agree "
        f"with one rank in float64, to {worst:.1e} at worst."
    )
    yield ""


def gpu_nccl(figures: dict[str, Any]) -> Iterator[str]:
    """Microseconds that the host needs to start a call."""
    calls: dict[str, list[float]] = {}
    for row in figures["calls"]:
        calls.setdefault(row["call"], []).append(row["host_us"])
    medians = (f"{call} {median(times):.0f}" for call, times in calls.items())
    yield f"Microseconds of the host to start a call of NCCL (medians): {', '.join(medians)}."
    yield ""


def gpu_one_rank(figures: dict[str, Any]) -> Iterator[str]:
    """A row per ZeRO level."""
    rows = []
    for row in (row for row in figures["ranks"] if "step_ms" in row):
        cells = [str(row["zero"]), row["layout"], str(row["layers"]), f"{row['step_ms']:.0f}"]
        cells += [f"{row['busy_ms']:.0f}" if "busy_ms" in row else "", f"{row['mfu_of_its_layers']:.3f}"]
        cells += [f"{row[name]:.2f}" for name in ("predicted_gib", "allocated_gib")]
        rows.append([*cells, f"{row['launches']:,.0f}" if "launches" in row else ""])
    columns = "ZeRO | one rank of 70B | layers | ms | GPU busy, ms | MFU | GiB predicted | GiB | launches"
    yield from _table(columns, rows)


def gpu_commands(figures: dict[str, Any]) -> Iterator[str]:
    """Outcomes of the tests and of commands."""
    outcomes = ", ".join(f"{count} {outcome}" for outcome, count in figures["tests"].items())
    yield f"Tests marked `gpu`: {outcomes}."
    yield ""
    killed = figures.get("kill_and_resume")
    if killed:
        yield (
            f"A run killed after step {killed['killed_after_step']} resumes from its checkpoint of step "
            f"{killed['newest_checkpoint']}; {killed['losses_bit_equal_to_an_uninterrupted_runs']} losses "
            "are those of a run without a kill, bit for bit."
        )
        yield ""


def gpu_bits(figures: dict[str, Any]) -> Iterator[str]:
    """Whether repeats agree."""
    rows = (
        [row["setting"], str(row["steps"]), str(row["different_steps"]), ", ".join(row["kinds"]) or "none"]
        for row in figures["repeats"]
    )
    yield from _table("two runs side by side | steps | steps that differ | in what", rows)


def gpu_inference(figures: dict[str, Any]) -> Iterator[str]:
    """Generation by batch, and exact arithmetic beside the usual one."""
    rows = (
        [
            *(str(row["batch"]), row["guards"], f"{row['step_ms']:.1f}", f"{row['busy_ms']:.1f}"),
            *(f"{row['tokens_per_second']:,.0f}", f"{row['launches']:.0f}"),
        ]
        for row in figures["generation"]
    )
    columns = "8B, bf16: texts at a time | under | a token of each, ms | GPU busy, ms | tokens/s | launches"
    yield from _table(columns, rows)
    usual, exact = (f"{row['ms']:.0f} ms" for row in figures["forward_pass"])
    tokens = figures["forward_pass"][0]["tokens"]
    yield f"A forward pass of {tokens:,} tokens, 1B, bf16: {usual}, in exact arithmetic {exact}."
    yield ""


def gpu_rates(figures: dict[str, Any]) -> Iterator[str]:
    """Grouped products, the host's time per call, and reserved memory; the file has more."""
    kinds = ("forward", "input_gradient", "weight_gradient")
    rows = (
        [
            *(str(row[name]) for name in ("experts", "hidden", "width", "rows", "groups")),
            *(f"{row[f'{kind}_tflops']:.0f}" for kind in kinds),
        ]
        for row in figures["grouped_products"]
    )
    columns = "experts | hidden | width | rows | groups | forward, TFLOP/s | input gradient | weight gradient"
    yield from _table(columns, rows)
    calls = (f"{row['call']} {row['us']:.0f}" for row in figures["host"])
    yield f"Microseconds of the host for a call on the smallest tensors: {', '.join(calls)}."
    yield ""
    last = figures["reserved"][-1]
    yield (
        f"8B with 10 layers: {last['allocated_gib']:.1f} GiB allocated at most, {last['reserved_gib']:.1f} "
        f"reserved, {last['used_on_device_gib']:.1f} in use on the device."
    )
    yield ""


def gpu_memory(figures: dict[str, Any]) -> Iterator[str]:
    """Predictions over measurements, from the lowest to the highest of each format."""
    rows = []
    for key in dict.fromkeys((row["compile"], row["dtype"]) for row in figures["cases"]):
        ratios = [row["ratio"] for row in figures["cases"] if (row["compile"], row["dtype"]) == key]
        rows.append([*key, str(len(ratios)), f"{min(ratios):.3f}", f"{max(ratios):.3f}"])
    yield from _table("compiled | format | cases | memory predicted / allocated, lowest | highest", rows)


def transformers_plans(results: dict[str, Any]) -> Iterator[str]:
    """How many plans of models work, which, and why others do not."""
    names: dict[str, list[str]] = {}
    for row in results["plans"]:
        names.setdefault(row["outcome"], []).append(row["model"])
    counts = results["counts"]
    yield "| outcome | configurations | |"
    yield "|---|---|---|"
    yield f"| works | {counts['works']} | {', '.join(dict.fromkeys(names['works']))} |"
    yield f"| refused: experts, latent attention | {counts['refused']} | come with the expert axis |"
    others = {
        "unfit": "refused: the forward pass does not fit the plan, in `transformers` neither",
        "not built": "not tried: takes no token ids alone, cannot be made small, or is part of another model",
    }
    for name, what in others.items():
        models = dict.fromkeys(row["model"] for row in results["plans"] if row["outcome"] == name)
        yield f"| {what} | {counts[name]} | {', '.join(models)} |"


def moe_conformance(results: dict[str, Any]) -> Iterator[str]:
    """A row per check, a column per framework: outcome, largest figure, scenarios tried; then what failed."""
    frameworks = results["frameworks"]
    rows = []
    for number, check in enumerate(frameworks["hexad"]):
        cells = []
        for found in (checks[number] for checks in frameworks.values()):
            figure = "" if found["figure"] is None else f" {found['figure']:.1g},"
            tried = f"{figure} {found['tried']} of {len(found['scenarios'])}"
            cells.append(found["outcome"] + (f":{tried}" if found["tried"] else ""))
        rows.append([f"{check['check']}. {check['title']}", *cells])
    yield from _table(" | ".join(["failure", *frameworks]), rows)
    for name, checks in frameworks.items():
        for found in checks:
            failed = next((one for one in found["scenarios"] if one["outcome"] == "failed"), None)
            if failed:
                yield f"- {name}, {found['check']} ({failed['scenario']}): {failed['note'][:92].rstrip()}"


_RECIPES = {
    "experts": "deepseek gpt_oss llama4 mixtral qwen3_235b qwen3_30b",
    "no attention in some layers (Mamba, Hyena)": "hyena mamba2 nemotron_nano nemotronh",
    "other activations, norms or layers": "baichuan chatglm gemma llama31_nemotron_ultra llama33_nemotron "
    "nemotron3 nemotron4 starcoder",
    "encoders, embeddings, rerankers": "bert e5 llama_embedding llama_reranker t5",
    "models of `transformers`, which [`hexad.parallelize`](any-model.md) takes": "hf_auto",
}
"""Why recipes are refused, by how their names begin."""


def nemo_recipes(results: dict[str, Any]) -> Iterator[str]:
    """How many recipes are accepted, which, and why others are not."""
    accepted = [name for name, row in results["recipes"].items() if row["outcome"] == "accepted"]
    refused: dict[str, list[str]] = {}
    for name in results["recipes"]:
        if name not in accepted:
            kinds = (why for why, begins in _RECIPES.items() if name.startswith(tuple(begins.split())))
            refused.setdefault(next(kinds, results["recipes"][name]["why"]), []).append(name)
    yield "| outcome | recipes | |"
    yield "|---|---|---|"
    own = [row["own"] for row in results["recipes"].values() if "own" in row]
    yield f"| accepted | {len(accepted)} | {_files(accepted)} |"
    yield f"| of them with the settings of Hexad's own recipe of that name | {sum(own)} of {len(own)} | |"
    for why, names in refused.items():
        yield f"| refused: {why} | {len(names)} | {_files(names)} |"


def _files(names: Sequence[str]) -> str:
    return ", ".join(dict.fromkeys(name.partition(":")[0] for name in names))


def lightning_tests(results: dict[str, Any]) -> Iterator[str]:
    """A row per file of Lightning's tests, and one per reason of failures."""
    counted = ("passed", "differs", "unexplained")
    rows = []
    for file, row in results["files"].items():
        kinds = [test.get("kind", test["outcome"]) for test in row["tests"]]
        if kinds:
            others = sum(kind not in counted for kind in kinds)
            cells = [kinds.count("passed"), sum(kind in counted for kind in kinds), others or ""]
            rows.append([f"`{file}`", *map(str, cells)])
    summary = results["summary"]
    others = sum(summary.get(kind, 0) for kind in ("internal", "refused", "skipped"))
    rows.append(["all", *map(str, (summary["passed"], summary["applicable"], others))])
    yield from _table("file of `tests/tests_pytorch` | passed | that apply | that do not", rows)
    failures = [test for row in results["files"].values() for test in row["tests"] if "reason" in test]
    reasons: dict[tuple[str, str], list[str]] = {}
    for test in failures:
        names = reasons.setdefault((test["kind"], test["reason"]), [])
        names.append(test["test"].partition("::")[2].partition("[")[0].rpartition("::")[2])
    yield from _table(
        "failures | kind | reason | tests",
        (
            [str(len(names)), kind, reason, ", ".join(f"`{name}`" for name in dict.fromkeys(names))]
            for (kind, reason), names in sorted(reasons.items(), key=lambda item: item[0])
        ),
    )


def deepspeed_interface(results: dict[str, Any]) -> Iterator[str]:
    """A row per ZeRO level: the script with Hexad's API and with the package."""
    yield "| ZeRO | Hexad s | DeepSpeed s | ratio: wall | paired | CPU | MB | loss, last step |"
    yield "|---|---|---|---|---|---|---|---|"
    for row in results["rows"]:
        ours, theirs = row["interface"], row["package"]
        cells = [f"{row['step_seconds']:.2f}" for row in (ours, theirs)]
        cells += [f"{row[name]:.2f}" for name in ("ratio", "paired", "cpu_ratio")]
        cells += [f"{ours['peak_rss_mb'] / theirs['peak_rss_mb']:.2f}", f"{ours['last_loss']:.5f}"]
        yield f"| {row['stage']} | {' | '.join(cells)} |"


def lightning_interface(results: dict[str, Any]) -> Iterator[str]:
    """A row per fit: a model, its precision and clipping, and a strategy."""
    yield "| model | precision | clipping | strategy | wall s | paired (quartiles) | CPU | MB | last loss |"
    yield "|---|---|---|---|---|---|---|---|---|"
    for row in results["fits"]:
        case = [row["model"], row["precision"], "norm" if float(row["clip"]) else "", f"`{row['strategy']}`"]
        low, high = row["quartiles"]
        cells = [f"{row['step_seconds']:.3g}", f"{row['paired']:.2f} ({low:.2f}-{high:.2f})"]
        cells += [f"{row['cpu_ratio']:.2f}", f"{row['peak_rss_mb']:.0f}", f"{row['last_loss']:.5f}"]
        yield f"| {' | '.join(case + cells)} |"


def cpu_layouts(results: dict[str, Any]) -> Iterator[str]:
    """A row per layout, with both formats side by side."""
    rows: dict[str, dict[str, dict[str, Any]]] = {}
    for row in results["predictions"]:
        rows.setdefault(row["layout"], {})[row["dtype"]] = row
    formats = list(next(iter(rows.values())))
    cells = []
    for layout, by_format in rows.items():
        cell = [layout, str(next(iter(by_format.values()))["ranks"])]
        for dtype in formats:
            one = by_format[dtype]
            error = one["predicted"] / one["measured"] - 1
            cell += [f"{one['measured']:.2f}", f"{one['predicted']:.2f}", f"{error:+.1%}"]
        cells.append(cell)
    names = " | ".join(f"{dtype}: measured s | predicted | error" for dtype in formats)
    yield from _table(f"layout | ranks | {names}", cells)
    order = f"order right in {results['right']} of {results['pairs']} pairs"
    yield f"{len(results['predictions'])} layouts: mean absolute error {results['mape']:.1%}; {order}."


def roofline(results: dict[str, Any]) -> Iterator[str]:
    """A row per model and tensor degree; before and after."""
    columns = (
        "launches per layer",
        "ms per layer",
        "ms of the head",
        "MFU at most",
        "with waiting",
        "update ms",
        "exposed / sent ms",
        "ms per layer, planned",
    )
    yield f"| model | tensor | {' | '.join(columns)} |"
    yield f"|{'---|' * (2 + len(columns))}"
    pairs = zip(results["bounds"][::2], results["bounds"][1::2])
    for before, after in pairs:
        figures = (
            ("block_launches", "d"),
            ("block_ms", ".2f"),
            ("head_ms", ".2f"),
            ("mfu_bound", ".2f"),
            ("mfu_bound_timeline", ".2f"),
            ("update_ms", ".1f"),
            ("block_exposed_ms", ".2f"),
        )
        cells = " | ".join(f"{before[name]:{kind}} → {after[name]:{kind}}" for name, kind in figures)
        cells += f" of {after['block_sent_ms']:.2f} | {after['planned_ms']:.2f}"
        yield f"| {after['model']} | {after['tensor']} | {cells} |"


def context_balance(results: dict[str, Any]) -> Iterator[str]:
    """A row per data set and balance."""
    columns = ("slowest / mean, median", "largest", "received", "ms, median", "ms, largest")
    yield f"| documents | tokens, median | balance | {' | '.join(columns)} |"
    yield "|---|---|---|---|---|---|---|---|"
    for name, figures in results["sets"].items():
        head = f"{name}, {figures['samples']} samples | {figures['document_tokens']['median']:,.0f}"
        for balance in ("none", "zigzag", "work"):
            it = figures[balance]
            slowest, took = it["slowest"], it["milliseconds"]
            yield (
                f"| {head} | `{balance}` | {slowest['median']:.3f} | {slowest['largest']:.3f} | "
                f"{it['received']:.1%} | {took['median']:.1f} | {took['largest']:.1f} |"
            )
            head = " | "


_PEERS = ("deepspeed", "lightning", "transformers", "megatron-core")


def origin(results: dict[str, Any]) -> Iterator[str]:
    """Where the figures come from."""
    torch = results.get("torch") or results["versions"]["torch"]
    peers = [item for item in results.get("versions", {}).items() if item[0] in _PEERS]
    versions = ", ".join(f"{name} {version}" for name, version in [("torch", torch), *peers])
    dtype = (
        ""
        if {"sets", "fits", "source", "frameworks"} & results.keys()
        else f"; {results.get('dtype', 'fp32')}"
    )
    yield f"{results['machine']}; {versions}{dtype}."
    if "command" in results:
        yield f"Command: `{results['command']}`"


def step_time(results: dict[str, Any]) -> Iterator[str]:
    """A row per mode and program; Hexad's figures over a peer's stand in the peer's row, with the smallest
    and the largest of several runs."""
    yield "| mode | program | wall s | CPU s | MB | loss, last step | ratio: wall | paired | CPU | MB |"
    yield "|---|---|---|---|---|---|---|---|---|---|"
    for mode, measured in results["modes"].items():
        ratios = measured.get("ratios", {"torch": measured["ratio"]})
        for program in ("hexad", *ratios):
            figures, ratio = measured[program], ratios.get(program)
            cells = [f"{figures['step_seconds']:.2f}", f"{figures['cpu_seconds']:.2f}"]
            cells += [f"{figures['peak_rss_mb']:.0f}", f"{figures['last_loss']:.5f}"]
            spread = measured.get("spread", {}).get(program, {}) if measured.get("runs", 1) > 1 else {}
            cells += [_ratio(ratio[name], spread.get(name)) if ratio else "" for name in RATIOS]
            title = f"**{program}**" if program == measured.get("best") else program
            title += " *" if program.endswith("_accumulate") else ""
            yield f"| {mode if program == 'hexad' else ''} | {title} | " + " | ".join(cells) + " |"


def _ratio(value: float, spread: list[float] | None) -> str:
    return f"{value:.2f}" + (f" ({spread[0]:.2f}-{spread[1]:.2f})" if spread else "")


def overlap(results: dict[str, Any]) -> Iterator[str]:
    """A row per ZeRO level."""
    yield (
        "| ZeRO | MB sent | compute s | full speed s | waited for s | overlapped s | ideal s | alone s "
        "| hidden, waited for | hidden, overlapped |"
    )
    yield "|---|---|---|---|---|---|---|---|---|---|"
    for stage, figures in results["stages"].items():
        names = ("free", "full", "waiting", "overlapped", "ideal", "alone")
        cells = [stage, f"{figures['sent_bytes'] / 1e6:.1f}", *(f"{figures[name]:.2f}" for name in names)]
        cells += [f"{figures[f'hidden_{name}']:.0%}" for name in ("waiting", "overlapped")]
        yield "| " + " | ".join(cells) + " |"
    if PICTURE.exists():
        yield ""
        yield f"![Seconds of a step by ZeRO level](images/{PICTURE.name})"


def overlap_tensor(results: dict[str, Any]) -> Iterator[str]:
    """A row per layout."""
    yield "| layout | MB sent | compute s | overlapped s | at once s | waits s | waits, at once s |"
    yield "|---|---|---|---|---|---|---|"
    for layout, figures in results["layouts"].items():
        names = ("free", "overlapped", "at_once", "waited_overlapped", "waited_at_once")
        cells = [layout, f"{figures['sent_bytes'] / 1e6:.1f}", *(f"{figures[name]:.2f}" for name in names)]
        yield "| " + " | ".join(cells) + " |"


def checkpoint_io(results: dict[str, Any]) -> Iterator[str]:
    """A row per kind of step: the disk itself, Hexad, torch.distributed.checkpoint."""
    seconds, ratios = results["seconds"], results["bandwidth_over_raw"]
    size = f"{results['bytes'] / 1e9:.2f} GB of state on {results['ranks']} ranks"
    yield f"{size}; seconds, and bandwidth over the disk's own:"
    yield ""
    yield "| | raw | Hexad | DCP | Hexad / raw | DCP / raw |"
    yield "|---|---|---|---|---|---|"
    rows = {
        "save, fsync included": ("raw_write", "hexad_save", "dcp_save", "save"),
        "load, files in the page cache": ("raw_read", "hexad_load", "dcp_load", "load"),
        "load, files on the disk": ("raw_read_cold", "hexad_load_cold", "dcp_load_cold", "load_cold"),
    }
    for title, (raw, ours, theirs, ratio) in rows.items():
        cells = [f"{seconds[name]:.2f}" for name in (raw, ours, theirs)]
        cells += [f"{ratios[name]:.2f}" for name in (ratio, f"dcp_{ratio}")]
        yield f"| {title} | {' | '.join(cells)} |"
    yield ""
    pause = f"{seconds['pause']:.2f} s, {results['pause_over_synchronous']:.0%} of a synchronous one"
    memory = f"{results['transient_over_share']['hexad_load']:.1%} of the rank's shard"
    yield f"An asynchronous save pauses training for {pause}. Loading needs {memory} as additional memory."


def cost_of_start(results: dict[str, Any]) -> Iterator[str]:
    """A row per part of the first rank's work, and what it costs beside that."""
    layout, figures, store = results["layout"], results["first_rank"], results["store"]
    degrees = ", ".join(f"{axis} {layout[axis]}" for axis in ("tensor", "pipeline", "data"))
    yield f"{layout['world']} ranks ({degrees}), {results['parameters'] / 1e9:.0f}e9 parameters:"
    yield ""
    yield "| the first rank's work | s | most memory so far, MB |"
    yield "|---|---|---|"
    for title, part in figures["parts"].items():
        yield f"| {title} | {part['seconds']:.2f} | {part['peak_mb']:.0f} |"
    yield ""
    most, median = (results["connections_per_rank"][which] for which in ("most", "median"))
    sent, own = figures["bytes_sent_on_loading"] / 1e6, figures["rectangles_of_the_first_rank"]
    calls, traffic, seconds = store["calls"], store["bytes"] / 1e6, store["seconds_of_one_server"]
    size = figures["manifest_bytes"] / 1e6
    yield " ".join(
        [
            f"{figures['rectangles']:,} rectangles in {figures['tensor_files']:,} files, "
            f"manifest {size:.0f} MB.",
            f"Loading sends {sent:.0f} MB from the first rank, which itself needs {own} rectangles.",
            f"Connections for agreements: {most} on the rank that has most, {median} on most ranks.",
            f"Connecting them takes {calls:,} calls of the store ({store['calls_per_rank']} per rank), "
            f"{traffic:.0f} MB, {seconds:.1f} s at the rate at which it answers one client here. The first "
            f"rank's store has {store['sockets']['of_the_first_rank']:,} connections.",
        ]
    )


def main() -> None:
    """Renew the pages, or check them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="only say whether the pages are up to date")
    options = parser.parse_args()
    for path in PAGES:
        old = path.read_text(encoding="utf-8")
        new = page(old)
        if options.check and new != old:
            sys.exit(f"{path} is out of date: run python benchmarks/report.py")
        if new != old:
            path.write_text(new, encoding="utf-8")
            print(f"wrote {path}")


if __name__ == "__main__":
    main()
