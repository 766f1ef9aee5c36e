"""``hexad plan validate``: files of measurements, the form of the output, reasons of uncovered rows."""

import json
from pathlib import Path
from typing import Any

import pytest

from hexad.config import HexadError
from hexad.planning.validation import compare, read_rows, validate_rows
from tests.training.command import call

# Zero Bubble Pipeline Parallelism (arXiv 2401.10241), table 4: 14.4 samples per second and GPU would be
# 14,745.6 tokens; the row is the published one of ZB-2p.
ROW: dict[str, Any] = {
    "id": "zero_bubble/0",
    "source": "Zero Bubble Table 4",
    "model": {
        "name": "gpt-1.5B",
        "layers": 22,
        "hidden": 2304,
        "heads": 24,
        "kv_heads": 24,
        "ffn": 9216,
        "vocab": None,
        "seq": 1024,
        "tied": True,
        "gated": False,
        "bias": True,
    },
    "gpu": "A100-SXM-80GB (4 nodes RoCE)",
    "n_gpus": 8,
    "tp": 1,
    "cp": 1,
    "pp": 8,
    "dp": 1,
    "zero_fsdp": "none",
    "micro_batch": 6,
    "global_batch": 144,
    "n_microbatches": 24,
    "recompute": "none",
    "precision": "fp16/bf16 n/s",
    "schedule": "ZB-2p",
    "measured": {"samples_per_s_per_gpu": 14.5, "tokens_per_s_per_gpu": 14848.0, "peak_mem_gb": 59},
}
ERRORS = {"covered", "mape", "bias", "worst"}


def changed(**changes: Any) -> dict[str, Any]:
    """The row with other values; those of ``model`` are merged, None removes a key."""
    model = {**ROW["model"], **changes.pop("model", {})}
    row = {**ROW, **changes, "model": model}
    return {name: value for name, value in row.items() if value is not None}


def test_json_has_the_errors_of_every_source_and_of_all(tmp_path: Path) -> None:
    """The errors are those of the predictions; a row with a time and a memory counts in both."""
    file = tmp_path / "rows.jsonl"
    rows = [
        ROW,
        changed(source="another", system="megatron-2022", measured={"tokens_per_s_per_gpu": 14848.0 / 2}),
    ]
    file.write_text("\n".join(map(json.dumps, rows)) + "\n\n", encoding="utf-8")
    result = json.loads(call("plan", "validate", str(file), "--json").out)
    assert set(result) == {"sources", "overall"}
    assert [source["source"] for source in result["sources"]] == ["Zero Bubble Table 4", "another"]
    for score in [*result["sources"], result["overall"]]:
        assert set(score) - {"source"} == {"rows", "time", "memory", "oom", "uncovered"}
        assert set(score["time"]) == set(score["memory"]) == ERRORS
        assert set(score["oom"]) == {"rows", "right"}
    first, second = result["sources"]
    predicted, measured = compare(ROW).seconds or (0.0, 0.0)
    assert measured == pytest.approx(144 / 8 / 14.5)
    assert first["time"]["bias"] == pytest.approx(predicted / measured - 1)
    # At half the speed a step takes twice as long.
    assert second["time"]["bias"] == pytest.approx((predicted / measured) / 2 - 1)
    assert (first["memory"]["covered"], second["memory"]["covered"]) == (1, 0)
    assert second["memory"] == {"covered": 0, "mape": None, "bias": None, "worst": None}
    overall = result["overall"]
    both = [first["time"]["bias"], second["time"]["bias"]]
    assert overall["time"]["covered"] == overall["rows"] == 2
    assert overall["time"]["mape"] == pytest.approx(sum(map(abs, both)) / 2)
    assert overall["time"]["worst"] == max(both, key=abs)


@pytest.mark.parametrize(
    "row, reason",
    [
        (changed(model={"layers": None}), "model.layers is not stated"),
        (changed(model={"ffn": None}), "model.ffn is not stated"),
        (changed(micro_batch=None), "micro_batch is not stated"),
        (changed(global_batch=None, n_microbatches=None), "global_batch is not stated"),
        (changed(n_gpus=None), "n_gpus is not stated"),
        (changed(gpu="Q900"), "found 'Q900'"),
        (changed(tp=7, n_gpus=56), "heads do not divide"),
        (changed(measured={"bubble": 0.1}), "but bubble"),
        (changed(measured={}), "nothing"),
        (changed(measured={"mfu": 40.0}), "convention"),
        (changed(model={"hybrid": {"pattern": "M*"}}), "Mamba"),
        (changed(model={"ffn": 3}, tp=2, n_gpus=16), "does not divide by 2"),
        (changed(model={"layers": 1e30}), "model.layers: found 1e+30"),
        (changed(model={"kv_heads": 3}, tp=8, n_gpus=64), "key/value heads do not divide"),
        (changed(model={"moe": "many"}), "model.moe: found 'many'"),
        (changed(measured={"peak_mem_gb": "much"}), "peak_mem_gb"),
        (changed(tp="two"), "tp: found 'two'"),
        (changed(model={"layers": 2.5}), "model.layers: found 2.5"),
    ],
)
def test_rows_that_cannot_be_expressed_are_counted_with_the_reason(row: dict[str, Any], reason: str) -> None:
    """Once, with one reason, and in no error."""
    overall = validate_rows([row])["overall"]
    assert overall["rows"] == 1
    assert overall["time"]["covered"] == overall["memory"]["covered"] == 0
    ((found, count),) = overall["uncovered"].items()
    assert reason in found
    assert count == 1


def test_model_states_of_zero() -> None:
    """Rajbhandari et al., ZeRO (arXiv 1910.02054), table 1: 7.5B parameters, 64 ranks, in 1e9 bytes."""
    rows = []
    for level, stated in ((1, 31.4), (2, 16.6), (3, 1.88)):
        measured = {"model_state_gb": stated}
        rows.append(
            {"model": {"params": 7.5e9}, "dp": 64, "zero_fsdp": f"ZeRO-{level}", "measured": measured}
        )
    memory = validate_rows(rows)["overall"]["memory"]
    assert memory["covered"] == 3
    assert abs(memory["worst"]) < 0.005


def test_states_and_activations_of_a_first_stage() -> None:
    """Korthikanti et al. (arXiv 2205.05198), figure 1: 22B, tensor 8, with the paper's methods and not."""
    model = {"layers": 48, "hidden": 6144, "heads": 64, "kv_heads": 64, "ffn": 24576, "seq": 2048}
    common: dict[str, Any] = {"n_gpus": 8, "tp": 8, "pp": 1, "micro_batch": 4, "global_batch": 4}
    common |= {
        "n_microbatches": 1,
        "source": "Korthikanti22 Figure 1",
        "model": {"vocab": 51200, **model},
        "schedule": "none",
    }
    whole = {"params_opt_gib": 45.5625, "activation_gib": 59.25}
    less = {"params_opt_gib": 45.5625, "activation_gib": 9.5625}
    rows = [
        changed(**common, recompute="none", sp=False, measured=whole),
        changed(**common, recompute="selective", sp=True, measured=less),
    ]
    memory = validate_rows(rows)["overall"]["memory"]
    assert memory["covered"] == 2
    assert memory["mape"] < 0.03


def test_rows_out_of_memory() -> None:
    """Counted apart; right where the prediction does not fit either."""
    fits = changed(measured={"oom": True})
    too_large = changed(micro_batch=60, global_batch=1440, measured={"oom": True})
    score = validate_rows([fits, too_large])["overall"]
    assert score["oom"] == {"rows": 2, "right": 1}
    assert score["memory"]["covered"] == 0
    assert not score["uncovered"]


@pytest.mark.parametrize("line", ['{"id": ', "[1, 2]", "3", '{"model": 3}', '{"measured": []}', "\x00"])
def test_a_damaged_line_is_named(tmp_path: Path, line: str) -> None:
    """One line on stderr with the file and the line's number."""
    file = tmp_path / "rows.jsonl"
    file.write_text(f"{json.dumps(ROW)}\n\n{line}\n", encoding="utf-8")
    done = call("plan", "validate", str(file))
    assert done.status == 2
    assert f"{file}:3: " in done.error
    assert len(done.error.strip().splitlines()) == 1


def test_a_missing_file_is_one_line(tmp_path: Path) -> None:
    """As is one that is no text."""
    with pytest.raises(HexadError, match="cannot be read"):
        list(read_rows(tmp_path / "none.jsonl"))
    (tmp_path / "bytes.jsonl").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(HexadError, match="cannot be read"):
        list(read_rows(tmp_path / "bytes.jsonl"))


def test_the_table_has_every_source_and_the_reasons(tmp_path: Path) -> None:
    """For people."""
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(map(json.dumps, [ROW, changed(micro_batch=None)])), encoding="utf-8")
    text = call("plan", "validate", str(file)).out
    assert "Zero Bubble Table 4" in text
    assert "micro_batch is not stated" in text
