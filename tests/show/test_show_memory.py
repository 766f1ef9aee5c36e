"""``hexad show memory``: the plan of a run, as a table, as JSON and as a picture."""

import json
from pathlib import Path

import pytest

from hexad.planning.memory import MemoryPlan
from hexad.show.memory import MOST_BARS, memory_figure
from hexad.topology.devices import named_gpus, published_peaks

from ..training.command import call
from .common import document_of, error_of, labels_of, text_of

YAML = """
model: {layers: 4, hidden: 64, heads: 4, ffn_hidden: 128, vocab: 300}
data: {sequence: 32}
batch: {micro: 2, global: 16}
parallel: {tensor: 2, pipeline: 2}
"""


@pytest.fixture
def path(tmp_path: Path) -> str:
    (tmp_path / "run.yaml").write_text(YAML)
    return str(tmp_path / "run.yaml")


def test_json_adds_up_and_the_default_is_the_largest(path: str) -> None:
    document = document_of("memory", path)
    parts = ("parameters", "gradients", "master", "optimizer", "buffers")
    assert document["total"] == sum(document[n] for n in parts) + sum(document["activations"].values())
    assert [entry["rank"] for entry in document["pipeline"]] == [0, 2]
    assert document["total"] == max(entry["total"] for entry in document["pipeline"])
    last = document_of("memory", path, "--rank", "3")
    assert last["rank"] == 3 and last["total"] == document["pipeline"][1]["total"]
    assert last["activations"]["loss"] > 0 and "loss" not in document["activations"]


def test_zero_and_recompute_save_memory(path: str) -> None:
    plain = document_of("memory", path, "parallel.data=4")
    for level, sharded in enumerate(("optimizer", "gradients", "parameters"), 1):
        document = document_of("memory", path, "parallel.data=4", f"parallel.zero={level}")
        assert document[sharded] < plain[sharded] / 3
    for smaller in ("memory.recompute=selective", "memory.recompute=full"):
        assert document_of("memory", path, "parallel.data=4", smaller)["total"] < plain["total"]


def test_table_and_picture(path: str, tmp_path: Path) -> None:
    total = document_of("memory", path)["total"] / 2**30
    text = text_of("memory", path)
    assert "activations: feed forward" in text and f"total {total:.5f}" in " ".join(text.split())
    labels = labels_of("memory", path, file=tmp_path / "memory.svg")
    title = "Predicted peak memory: llama, 4 layers, bf16, 4 ranks: tensor 2 x pipeline 2"
    assert {title, "GiB", "parameters", "buffers", f"{total:.3g}"} <= set(labels)


def test_whether_it_fits_is_said_everywhere(path: str, tmp_path: Path) -> None:
    need = document_of("memory", path)["total"]
    for size, fits in ((need, True), (need - 1, False)):
        facts = document_of("memory", path, "--device", f"{size}B")["device"]
        margin = size - need
        assert facts.pop("needed") == {"tensors": need, "reserved": 0, "context": 0, "communicators": 0}
        assert facts == {"name": f"{size}B", "capacity": size, "fits": fits, "margin": margin}
    usable = 79.1 * 2**30
    facts = document_of("memory", path, "--device", "H100")["device"]
    # Of a GPU by name also what the allocator, CUDA and NCCL take: here of the tensor axis, and of the
    # pipeline with its two directions.
    others = {"reserved": int(0.145 * need), "context": 600 * 2**20, "communicators": 4 * 500 * 2**20}
    assert facts["needed"] == {"tensors": need, **others}
    assert facts["fits"] and facts["margin"] == pytest.approx(usable - need - sum(others.values()), abs=1)
    text = " ".join(text_of("memory", path, "--device", "h100").split())
    parts = "tensors 0.00, 0.00 reserved besides, 0.59 of CUDA, 1.95 of NCCL"
    assert f"fits: yes, 2.54 of 79.10 GiB on h100 ({parts})" in text
    assert "fits: no, " in text_of("memory", path, "--device", "100KB")
    labels = labels_of("memory", path, "--device", "a100-40gb", file=tmp_path / "memory.svg")
    assert "a100-40gb: 39.30 GiB" in labels and any("fits: yes" in label for label in labels)


def test_three_figures_are_reported(path: str) -> None:
    """Tensors; with what the allocator keeps; with CUDA and NCCL besides: what fits is the last."""
    document = document_of("memory", path, "--device", "h100")
    needed, figures = document["device"]["needed"], document["figures"]
    assert figures == {
        "tensors": document["total"],
        "reserved": needed["tensors"] + needed["reserved"],
        "device": sum(needed.values()),
    }
    assert document["device"]["margin"] == document["device"]["capacity"] - figures["device"]
    line = "tensors 0.00 GiB, reserved 0.00, device 2.54 (with CUDA and 4 communicators of NCCL)"
    assert line in " ".join(text_of("memory", path).split())
    # As in 'hexad train --dry-run', which prints the same summary.
    checked = json.loads(call("config", "check", path, "--elsewhere", "--json").out)
    assert checked["summary"]["memory_bytes"]["figures"] == figures
    assert f"device      {line}" in call("config", "check", path, "--elsewhere").out
    assert document_of("memory", path, "run.device=cpu")["figures"] is None
    assert "communicators" not in text_of("memory", path, "run.device=cpu")


def test_a_rank_asked_for_does_not_change_whether_the_run_fits(path: str) -> None:
    whole = document_of("memory", path, "--device", "1MB")
    least = document_of("memory", path, "--device", "1MB", "--rank", "3")
    assert least["total"] < whole["total"] and least["device"] == whole["device"]


def test_devices_are_gpus_or_sizes(path: str) -> None:
    wrong = error_of("memory", path, "--device", "h10")
    assert wrong.startswith(
        "--device: found 'h10', expected a GPU or a size such as 80GB (did you mean 'h100'"
    )
    assert "expected a GPU or a size" in error_of("memory", path, "--device", "80")
    assert "expected a GPU or a size" in error_of("memory", path, "--device", "")
    # Of a GPU by name the run's memory there is predicted, whatever run.device is.
    assert (
        document_of("memory", path, "run.device=cpu", "--device", "h100")["total"]
        == document_of("memory", path)["total"]
        != document_of("memory", path, "run.device=cpu")["total"]
    )
    names = {name: usable for name, (_, usable) in named_gpus().items()}
    assert names["a100"] == names["a100-80gb"] > names["a100-40gb"]
    assert all(published_peaks(name.upper().replace("-", " ")) for name in names if "pcie" not in name)


def test_auto_is_planned_in_the_format_that_the_named_gpu_trains_in(path: str, tmp_path: Path) -> None:
    wide, narrow = (document_of("memory", path, f"precision.dtype={dtype}") for dtype in ("fp32", "bf16"))
    for device, expected in (("v100-16gb", wide), ("t4", wide), ("a100", narrow), ("16GB", narrow)):
        document = document_of("memory", path, "--device", device)
        del document["device"]
        assert document == expected, device
    assert wide["dtype"] == "fp32" and wide["parameters"] == 2 * narrow["parameters"]
    text = " ".join(text_of("memory", path, "--device", "v100").split())
    assert "llama, 4 layers, fp32, 4 ranks" in text and f"total {wide['total'] / 2**30:.5f}" in text
    labels = labels_of("memory", path, "--device", "v100", file=tmp_path / "memory.svg")
    assert any("llama, 4 layers, fp32" in label for label in labels)
    # A named format is kept, and what auto does not allow is refused as without the device.
    assert document_of("memory", path, "--device", "v100", "precision.dtype=fp16")["dtype"] == "fp16"
    fp8 = ("memory", path, "precision.dtype=fp8", "--device")
    for device in ("t4", "a100", "a10g"):
        assert f"found fp8, but {device} has no fp8 matrix units" in error_of(*fp8, device)
    assert document_of(*fp8, "l4")["dtype"] == document_of(*fp8, "h100")["dtype"] == "fp8"
    assert "found bf16 with precision.dtype auto" in error_of(
        "memory", path, "--device", "a100", "precision.reduce=bf16"
    )


def test_the_legend_has_no_empty_entries_and_no_colour_twice() -> None:
    def plan(rank: int, **kinds: int) -> MemoryPlan:
        return MemoryPlan(rank, 2**20, 2**20, 0, 2**21, kinds, 2**20, 0, "F")

    large = dict.fromkeys(("residual", "norm", "attention", "feed_forward", "loss", "boundary"), 2**19)
    (axes,) = memory_figure([plan(0, **large, positions=7), plan(1, residual=2**19)]).axes
    _, names = axes.get_legend_handles_labels()
    assert "master" not in names and "activations: positions" not in names
    assert names.count("activations: other") == 1 and names[-1] == "buffers"
    colours = [container.patches[0].get_facecolor() for container in axes.containers]
    assert len(set(colours)) == len(colours) == len(names)


def test_bars_are_as_high_as_the_plan() -> None:
    def plan(rank: int) -> MemoryPlan:
        return MemoryPlan(rank, 2**30, 2**30, 0, 2**31, {"residual": 3 * 2**30}, 2**30, 0, "F")

    (axes,) = memory_figure([plan(0), plan(5)]).axes
    tops: dict[float, float] = {}
    for bar in axes.patches:
        tops[bar.get_x()] = max(tops.get(bar.get_x(), 0.0), bar.get_y() + bar.get_height())
    assert list(tops.values()) == pytest.approx([8.0, 8.0])
    assert [label.get_text() for label in axes.get_xticklabels()] == ["0", "5"]
    (many,) = memory_figure([plan(rank) for rank in range(50)]).axes
    assert f"the first {MOST_BARS} of 50" in many.get_xlabel()


def test_errors_name_the_argument(path: str) -> None:
    assert error_of("memory").startswith("show memory: found no configuration file")
    assert error_of("memory", path, "--rank", "9").startswith("--rank: found 9, expected 0 to 3")
    assert error_of("memory", path, "memory.recompute_layers=2").startswith(
        "memory.recompute_layers: found 2"
    )
