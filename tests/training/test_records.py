"""What a run writes: metrics, validation, TensorBoard, configuration; and what is told before it starts."""

import json
import math
import resource
from collections.abc import Callable
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pytest
import yaml

from hexad import Callback, train
from hexad.dataset.indexed import IndexedWriter
from hexad.dataset.load.loader import loader_from_config
from hexad.dataset.text.tokenizer import load_tokenizer
from hexad.engine.engine import Engine
from hexad.model.configuration import load_config
from hexad.planning.costs import flops_per_token, parameter_count
from hexad.training.record import StepsFile

from ..pool import Pool
from .command import FOUR, Process, RunFile, call
from .conftest import MakeRun

KEYS = {
    "step": int,
    "loss": float,
    "grad_norm": float,
    "lr": float,
    "samples": int,
    "tokens": int,
    "step_seconds": float,
    "tokens_per_second": float,
    "mfu": float,
    "peak_memory_bytes": int,
    "comm_bytes": dict,
    "skipped": bool,
}


def test_metrics_have_the_keys_of_the_contract(alone: RunFile, four: RunFile) -> None:
    for run in (alone, four):
        for line in run.metrics:
            slowest = line["slowest"]
            assert {name: type(value) for name, value in line.items() if name != "slowest"} == KEYS
            assert (slowest is None) == (line["step"] == 1)
            assert slowest is None or 0 < slowest["fastest_seconds"] <= slowest["seconds"] < 60
            assert set(line["comm_bytes"]) == {"tensor", "data", "context", "pipeline", "expert"}
            assert line["samples"] == 4 * line["step"] and line["tokens"] == 16 * line["samples"]
            assert line["tokens_per_second"] == pytest.approx(64 / line["step_seconds"])
            assert 0 < line["mfu"] < 1 and not line["skipped"]
    assert not any(alone.metrics[0]["comm_bytes"].values())
    assert four.metrics[0]["comm_bytes"]["tensor"] > 0 < four.metrics[0]["comm_bytes"]["data"]
    # An untrained model is near the uniform distribution; this one learns.
    assert alone.losses[0] == pytest.approx(math.log(257), abs=0.1)
    assert alone.losses[-1] < alone.losses[0] - 1


def test_mfu_counts_attention_inside_documents(
    tmp_path: Path, make_run: MakeRun, pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FLOPs follow from the documents in all data ranks' microbatches; joined ones are complete sequences."""
    with IndexedWriter(tmp_path / "short", np.uint16) as writer:
        writer.add_documents(np.arange(1829) % 250, np.arange(2, 61))
    data = {"train": str(tmp_path / "short"), "sequence": 64, "documents": "isolate"}
    settings = {"run": {"steps": 2}, "data": data}
    monkeypatch.setattr("hexad.training.loop.peak_flops", lambda *_: 1e9)
    run, both, joined = make_run(**settings), make_run(**settings), make_run(**settings)
    assert run.train().status == 0 and joined.train("data.documents=join").status == 0
    assert [status for status, _ in both.world(pool, 2, "parallel.data=2")] == [0, 0]
    config = load_config(run.directory / "config.yaml")
    with loader_from_config(config, 0, 1, load_tokenizer("byte")) as loader:
        for line, whole in zip(run.metrics, joined.metrics):
            lengths = [
                end - begin
                for batch in loader.step(line["samples"] - 4)
                for begin, end in pairwise(batch.documents)
            ]
            assert len(lengths) > 4
            flops = sum(length * flops_per_token(config.model, length) for length in lengths)
            assert line["mfu"] * 1e9 * line["step_seconds"] == pytest.approx(flops)
            every = 4 * 64 * flops_per_token(config.model, 64)
            assert whole["mfu"] * 1e9 * whole["step_seconds"] == pytest.approx(every) and every > 1.01 * flops
    ratios = [line["mfu"] / line["tokens_per_second"] for line in both.metrics]
    alone = [line["mfu"] / line["tokens_per_second"] for line in run.metrics]
    assert ratios[0] / ratios[1] == pytest.approx(alone[0] / alone[1])  # whatever the peak of two ranks


def test_a_run_compares_at_its_interval(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[int] = []
    monkeypatch.setattr(Engine, "check_replicas", lambda self: steps.append(self.step))
    assert make_run().train("log.check_replicas=5").status == 0
    assert steps == [5, 10]
    assert make_run().train("log.check_replicas=0").status == 0
    assert steps == [5, 10]


def test_what_a_run_writes(four: RunFile, pool: Pool) -> None:
    names = {path.name for path in four.directory.iterdir()}
    assert {"config.yaml", "metrics.jsonl", "checkpoints", *(f"log-rank{r}.txt" for r in range(4))} <= names
    resolved = load_config(four.directory / "config.yaml")
    assert resolved.model.vocab == 257 and resolved.parallel.tensor == 2
    assert load_config(four.newest / "config.yaml") == resolved
    assert four.state()["world"] == 4 and four.state()["reason"] == "schedule"


def test_validation(make_run: MakeRun, data: str, alone: RunFile, pool: Pool) -> None:
    validation = data.removesuffix("train") + "validation"
    groups = {"data": {"validation": validation}, "validate": {"every": 3, "batches": 2}, "run": {"steps": 6}}
    run, other = make_run(**groups), make_run(**groups, log={"every": 4})  # losses of step 3 are logged too
    assert run.train().status == 0
    losses = _validation_losses(run)
    assert list(losses) == [3, 6] and losses[6] < losses[3]
    assert run.losses == alone.losses[:6]  # looking changes nothing
    assert other.world(pool, 2, "parallel.data=2") == [(0, "")] * 2
    assert _validation_losses(other) == pytest.approx(losses, rel=1e-9)


def _validation_losses(run: RunFile) -> dict[int, float]:
    return {line["step"]: line["validation_loss"] for line in run.metrics if "validation_loss" in line}


def test_log_every(make_run: MakeRun, alone: RunFile) -> None:
    run = make_run(run={"steps": 8}, log={"every": 3})
    assert run.train().status == 0
    assert [(m["step"], m["loss"]) for m in run.metrics] == [(n, alone.losses[n - 1]) for n in (3, 6, 8)]


def test_metrics_wait_for_space(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A full disk, here a limit of file sizes, stops no run; what could not be written is written later."""
    path = tmp_path / "metrics.jsonl"
    file = StepsFile(path, 0)
    file.write({"step": 1})
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    size = path.stat().st_size
    for limit in (size, size + 5, 5):  # no byte more; a part of a line; no room for a copy
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
        try:
            file.write({"step": 2})
            file.write({"step": 3})
            file.rewind(1)  # a roll back
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert path.read_text() == '{"step": 1}\n'
    assert caplog.text.count("cannot be written: ") == 3
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size, before[1]))
    try:
        file.write({"step": 2})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    file.write({"step": 3})
    file.close()
    assert path.read_text() == '{"step": 1}\n{"step": 2}\n{"step": 3}\n'


def test_a_full_disk_hides_no_error(make_run: MakeRun) -> None:
    """The traceback does not fit into the log, here by a limit of file sizes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    class Fails(Callback):
        def on_step(self, trainer: Any, metrics: Any) -> None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
            raise ValueError("x" * 200_000)

    try:
        with pytest.raises(ValueError, match="xxx"):
            train(make_run().path, callbacks=[Fails()])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_tensorboard(make_run: MakeRun) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = make_run(run={"steps": 3}, log={"tensorboard": True})
    assert run.train().status == 0
    events = EventAccumulator(str(run.directory / "tensorboard"))
    events.Reload()
    values = {scalar.step: scalar.value for scalar in events.Scalars("loss")}
    assert values == pytest.approx(dict(enumerate(run.losses, 1)), rel=1e-6)
    assert "comm_bytes/tensor" in events.Tags()["scalars"]


def test_the_time_is_known_once_the_run_has_made_steps(make_run: MakeRun, pool: Pool) -> None:
    run = make_run()
    path, more = str(run.path), "run.steps=1000"
    facts = json.loads(call("config", "check", path, "--json").out)["summary"]
    assert (facts["steps_left"], facts["step_seconds"]) == (facts["steps"], None)
    run.train("run.steps=5")
    seconds = median(line["step_seconds"] for line in run.metrics)
    facts = json.loads(call("config", "check", path, more, "--json").out)["summary"]
    assert (facts["steps_left"], facts["step_seconds"]) == (995, seconds)
    left = timedelta(seconds=round(995 * seconds))
    assert f"\ntime        {left} for the 995 steps that are left" in call("config", "check", path, more).out
    for other in ("batch.global=8", "parallel.data=2", "precision.dtype=fp32", "data.sequence=8"):
        facts = json.loads(call("config", "check", path, more, other, "--json").out)["summary"]
        assert (facts["steps_left"], facts["step_seconds"]) == (995, None)
        assert "\ntime" not in call("config", "check", path, more, other).out
    # In another layout: of its own steps only.
    assert run.world(pool, 2, "run.steps=7", "parallel.data=2") == [(0, "")] * 2
    facts = json.loads(call("config", "check", path, more, "parallel.data=2", "--json").out)["summary"]
    assert facts["step_seconds"] == median(line["step_seconds"] for line in run.metrics[5:])


def test_dry_run(make_run: MakeRun) -> None:
    run = make_run()
    result = run.train("--dry-run", *FOUR)
    assert result.status == 0 and not result.err
    assert yaml.safe_load(result.out)["model"]["vocab"] == 257  # the rest is comments
    assert "\n# ranks       4: tensor 2 x data 2\n" in result.out
    assert result.out.startswith("# parameters  ")  # what people ask first
    document = json.loads(run.train("--dry-run", "--json", *FOUR).out)
    assert document["world"] == 4 and document["degrees"] == {"tensor": 2, "data": 2}
    assert document["config"]["batch"]["global"] == 4
    checked = call("config", "check", str(run.path), "--json", *FOUR)
    assert document["summary"] == json.loads(checked.out)["summary"]
    memory = document["memory_bytes_per_rank"]
    parts = ("parameters", "gradients", "master", "optimizer", "buffers")
    assert memory["total"] == sum(memory[name] for name in parts) + sum(memory["activations"].values())
    assert memory["activations"]["residual"] > 0 and memory["action"].startswith(("F", "BW"))
    assert memory["optimizer"] == 2 * memory["gradients"]
    assert run.train("--dry-run", "--nproc", "3", *FOUR).status == 2
    assert not run.directory.exists()


def test_json_says_how_a_run_ended(make_run: MakeRun, data: str) -> None:
    run = make_run(
        run={"steps": 6}, validate={"every": 6, "batches": 1}, data={"validation": data}, log={"every": 4}
    )
    result = run.train("--json")
    assert result.status == 0, result.err
    document = json.loads(result.out)  # one document, nothing else
    assert document.pop("validation_loss") == run.metrics[-1]["validation_loss"]
    assert document == {
        "finished": True,
        "stopped_by": None,
        "step": 6,
        "steps": 6,
        "loss": run.metrics[-1]["loss"],
        "samples": 24,
        "tokens": 24 * 16,
        "run_dir": str(run.directory),
        "checkpoint": str(run.newest),
    }
    again = json.loads(run.train("--json").out)  # nothing left to do
    assert (again["step"], again["loss"]) == (6, document["loss"])
    refused = run.train("--json", "model.hidden=32")
    assert refused.status == 2 and refused.out == "" and refused.error


@pytest.mark.slow
def test_json_is_printed_by_one_of_several_ranks(make_run: MakeRun, start: Callable[..., Process]) -> None:
    run = make_run(run={"steps": 3})
    result = start([*run.arguments("--json"), "--nproc", "2"]).wait()
    assert result.status == 0, result.err
    assert json.loads(result.out)["step"] == 3


def test_config_show_and_check(make_run: MakeRun) -> None:
    run = make_run()
    path = str(run.path)
    shown = call("config", "show", path, "optimizer.lr=0.5")
    assert shown.status == 0 and yaml.safe_load(shown.out)["optimizer"]["lr"] == 0.5
    assert json.loads(call("config", "show", path, "--json").out)["model"]["hidden"] == 16
    good = call("config", "check", path, *FOUR)
    first, *facts = good.out.splitlines()
    assert first == f"{path}: valid for 4 ranks: tensor 2 x data 2"
    assert [line.split()[0] for line in facts[:6]] == [
        "parameters", "tokens", "ranks", "step", "precision", "memory"
    ]  # fmt: skip
    document = json.loads(call("config", "check", path, "--world", "2", "--json").out)
    summary = document.pop("summary")
    assert document == {"ok": True, "world": 2, "degrees": {"data": 2}, "notes": []}
    assert (summary["tokens_per_step"], summary["steps"], summary["tokens"]) == (64, 12, 768)
    assert summary["parameters"] == parameter_count(load_config(path, ["model.vocab=257"]).model)
    complete = call("config", "check", path, "--all")
    assert "\nparallel:\n" in complete.out and "\nparallel:\n" not in good.out
    refused = call("config", "check", path, "parallel.tensor=3")
    assert refused.status == 2 and refused.error.startswith("parallel.tensor: found 3")
