"""``hexad plan``: the fastest layouts and dry runs, as tables and JSON, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from hexad.engine.dry.run import COMPONENTS

from ..training.command import call

YAML = """
run: {device: cuda}
model: {layers: 4, hidden: 64, heads: 4, ffn_hidden: 128, vocab: 300}
data: {sequence: 32}
batch: {micro: 2, global: 16}
parallel: {tensor: 2, pipeline: 2}
"""


@pytest.fixture
def path(tmp_path: Path) -> str:
    (tmp_path / "run.yaml").write_text(YAML)
    return str(tmp_path / "run.yaml")


def document_of(*arguments: str) -> Any:
    result = call("plan", "--dry-run", *arguments, "--json")
    assert result.status == 0, result.err
    return json.loads(result.out)


def test_counted_beside_predicted(path: str) -> None:
    document = document_of(path, "--rank", "3")
    memory = document["memory"]
    assert [*memory] == [*COMPONENTS, "total"]
    for part in ("predicted_bytes", "bytes"):
        assert memory["total"][part] == sum(memory[name][part] for name in COMPONENTS)
    total = memory["total"]
    assert total["difference_percent"] == pytest.approx(100 * (total["predicted_bytes"] / total["bytes"] - 1))
    assert document["coordinates"]["pipeline"] == document["coordinates"]["tensor"] == 1
    assert document["sent"]["tensor"]["bytes"] > 0 == document["sent"]["data"]["bytes"]
    assert all(sent["predicted_bytes"] == sent["bytes"] for sent in document["sent"].values())
    assert document["seconds"] > 0 and document["resident_bytes"] > 2**26


def test_table_and_default_rank(path: str) -> None:
    result = call("plan", "--dry-run", path)
    words = " ".join(result.out.split())
    assert result.status == 0 and "llama, 4 layers, bf16, 4 ranks: tensor 2 x pipeline 2" in words
    assert "memory at the peak, GiB predicted counted difference parameters" in words
    assert "rank 0 of 4: tensor 0" in words and "sent in a step, GiB" in words


def test_a_model_and_a_cluster_take_the_place_of_a_file() -> None:
    settings = ["layers=2", "hidden=64", "heads=4", "kv_heads=2", "ffn_hidden=96", "vocab=300"]
    fixed = [f"--fix=model.{setting}" for setting in settings] + ["--fix=parallel.tensor=2"]
    job = ["--model=llama3-8b", "--cluster=a100-40gb:8", "--sequence=64", "--global-batch=8"]
    document = document_of(*job, *fixed, "--fix=batch.micro=1", "--rank=7")
    assert (document["world"], document["coordinates"]["data"], document["dtype"]) == (8, 3, "bf16")
    assert document["device"] == "gpu"
    older = document_of(*job[:1], "--cluster=v100:2", *job[2:], *fixed, "--fix=batch.micro=1")
    assert older["dtype"] == "fp32" and older["world"] == 2


REFUSED = {
    "no model": ([], "found no model"),
    "two models": (["--model", "llama3-8b", "PATH"], "found --model llama3-8b beside"),
    "an unknown preset": (["--model", "llama3-9b"], "model.preset: unknown preset 'llama3-9b'"),
    "an unknown GPU": (["PATH", "--cluster", "h10:4"], "--cluster: found 'h10', which is no known GPU"),
    "no count": (["PATH", "--cluster", "h100"], "--cluster: found 'h100', expected a GPU and how many"),
    "count of none": (["PATH", "--cluster", "h100:0"], "--cluster: found 'h100:0', expected"),
    "no such rank": (["PATH", "--rank", "4"], "--rank: found 4, expected 0 to 3"),
    "negative rank": (["PATH", "--rank", "-1"], "--rank: found -1, expected 0 to 3"),
    "a cluster that does not fit": (["PATH", "--cluster", "h100:6"], "world 6 is not divisible by"),
    "no fp8": (
        ["PATH", "--cluster", "a100:4", "precision.dtype=fp8"],
        "precision.dtype: found fp8, but a100",
    ),
    "an unknown setting": (["PATH", "--fix", "parallel.tensr=2"], "tensr"),
    "no setting": (["PATH", "--fix", "parallel.tensor"], "parallel.tensor"),
    "full compilation": (["PATH", "run.compile=full"], "run.compile: found full"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_name_the_cause(name: str, path: str) -> None:
    arguments, reason = REFUSED[name]
    result = call("plan", "--dry-run", *(path if text == "PATH" else text for text in arguments))
    assert result.status == 2 and result.out == "" and reason in result.error, result.err


SMALL = ["--cluster", "h100:8", "--fix", "parallel.context=1", "--fix", "batch.micro=2"]


def test_the_fastest_layouts(path: str, tmp_path: Path) -> None:
    """As JSON, as a table, and written as a configuration, which is checked."""
    output = tmp_path / "best.yaml"
    result = call("plan", path, *SMALL, "--top", "3", "--output", str(output), "--json")
    document = json.loads(result.out)
    assert 1 <= len(document["layouts"]) <= 3 and document["cluster"] == {"gpu": "h100", "gpus": 8}
    best = document["layouts"][0]
    assert sum(best["seconds"].values()) == pytest.approx(best["step_seconds"])
    assert best["margin"] == best["capacity"] - best["memory"]["device_total"] > 0
    assert call("config", "check", str(output), "--world", "8", "--elsewhere").status == 0
    again = call("plan", path, *SMALL, "--output", str(output))
    assert again.status == 2 and "best.yaml" in again.error  # it is there already


def test_one_layout_and_two(path: str) -> None:
    one = call("plan", path, *SMALL, "--explain", "tensor=4,pipeline=1,zero=1")
    assert one.status == 0 and "model FLOPs at the peak" in one.out and "NCCL's buffers" in one.out
    two = call("plan", path, *SMALL, "--compare", "tensor=4,pipeline=1", "tensor=1,pipeline=1,zero=3")
    assert two.status == 0 and "step seconds" in two.out and "B - A" in two.out


UNPLANNED = {
    "no model": ([], "plan: found no model"),
    "no cluster": (["PATH"], "plan: found no cluster"),
    "two models": (["PATH", "--model", "gpt2"], "found --model gpt2 beside"),
    "a rank": (["PATH", "--cluster", "h100:8", "--rank", "1"], "--rank: found without --dry-run"),
    "no layout": (["PATH", "--cluster", "h100:8", "--explain", "tensor"], "layout: found 'tensor', expected"),
    "a degree": (["PATH", "--cluster", "h100:8", "--explain", "tensor=3"], "parallel.tensor"),
    "a file": (["PATH", "--cluster", "missing.yaml:8"], "missing.yaml"),
}


@pytest.mark.parametrize("name", UNPLANNED)
def test_plans_that_are_refused(name: str, path: str) -> None:
    arguments, reason = UNPLANNED[name]
    result = call("plan", *(path if text == "PATH" else text for text in arguments))
    assert result.status == 2 and result.out == "" and reason in result.error, result.err
