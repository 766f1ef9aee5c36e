"""``hexad show run``: the summary of made-up runs, damaged files, and the picture."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from hexad.cli.show import show
from hexad.show.run import read_metrics, readable_bytes, run_figure, sparkline

from .common import refusal


def line(step: int, **changes: Any) -> dict[str, Any]:
    whole = {
        "step": step,
        "loss": 8.0 / step,
        "grad_norm": 2.0,
        "lr": 3e-4,
        "samples": 32 * step,
        "tokens": 16384 * step,
        "step_seconds": 0.8,
        "tokens_per_second": 20480.0,
        "mfu": 0.41,
        "peak_memory_bytes": 1000 + step,
        "comm_bytes": {"tensor": 41_000_000, "data": 900, "context": 0, "pipeline": 0, "expert": 0},
        "skipped": False,
    }
    return {**whole, **changes}


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    lines = [line(step) for step in range(1, 201)]
    lines[49]["validation_loss"] = 0.5
    lines[19].update(loss=math.nan, skipped=True)
    write(tmp_path, lines)
    return tmp_path


def write(directory: Path, lines: list[dict[str, Any]], rest: str = "") -> None:
    text = "".join(json.dumps(one) + "\n" for one in lines)
    (directory / "metrics.jsonl").write_text(text + rest)


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(show, ["run", *map(str, arguments)])


def error_of(*arguments: str | Path) -> str:
    return refusal(run(*arguments))


def test_summary(directory: Path) -> None:
    document = json.loads(run(directory, "--json").stdout)
    assert document["lines"] == 200 and document["first_step"] == 1 and document["last_step"] == 200
    assert document["loss"] == {"first": 8.0, "last": 0.04, "min": 0.04, "min_step": 200, "max": 8.0}
    assert document["validation_loss"]["last"] == 0.5
    assert document["skipped_steps"] == 1
    assert document["tokens"] == 16384 * 200
    assert document["tokens_per_second"] == 20480.0
    assert document["peak_memory_bytes"] == 1200
    assert document["comm_bytes_per_step"] == {"tensor": 41_000_000, "data": 900}


def test_a_step_logged_again_after_a_resume_counts_once(tmp_path: Path) -> None:
    write(tmp_path, [line(1), line(2), line(3), line(2, loss=9.0), line(3, loss=7.0)])
    assert read_metrics(tmp_path).series("loss") == ([1, 2, 3], [8.0, 9.0, 7.0])


def test_the_terminal_shows_the_course(directory: Path) -> None:
    result = run(directory)
    assert result.exit_code == 0
    for words in ("loss", "validation loss", "tokens/s", "20,480", "sent: tensor", "41 MB", "1 of 200", "█"):
        assert words in result.stdout
    assert "sent: context" not in result.stdout


def test_a_run_with_only_a_loss(tmp_path: Path) -> None:
    write(tmp_path, [{"step": 1, "loss": 8.0}])
    assert "nothing was sent" in run(tmp_path).stdout
    assert json.loads(run(tmp_path, "--json").stdout)["grad_norm"] is None
    assert run(tmp_path, "--output", tmp_path / "a.png").exit_code == 0
    write(tmp_path, [{"step": 1, "loss": math.nan}])
    assert json.loads(run(tmp_path, "--json").stdout)["loss"] is None
    assert run(tmp_path, "--output", tmp_path / "a.png").exit_code == 0


@pytest.mark.parametrize("ending", [".png", ".svg", ".html"])
def test_pictures_are_written(directory: Path, ending: str) -> None:
    file = directory / f"run{ending}"
    result = run(directory, "--output", file, "--reference", "unigram entropy=5.25")
    assert result.exit_code == 0 and file.stat().st_size > 20_000


def test_the_picture_shows_what_was_logged(directory: Path) -> None:
    figure = run_figure(read_metrics(directory), {"unigram entropy": 5.25})
    loss, norm, speed, sent = figure.axes
    labels = loss.get_legend_handles_labels()[1]
    assert labels == [
        "training (each step)",
        "training (mean of 7 lines)",
        "validation",
        "unigram entropy: 5.250",
        "skipped step",
    ]
    assert len(loss.lines[0].get_xdata()) == 199  # the skipped step has no finite loss
    assert sent.get_yscale() == "log" and sent.get_legend_handles_labels()[1] == ["tensor", "data"]
    assert norm.get_ylim()[0] == speed.get_ylim()[0] == 0


def test_half_a_last_line_is_left_out_with_a_note(directory: Path) -> None:
    lines = [line(1), line(2)]
    write(directory, lines, rest='{"step": 3, "lo')
    result = run(directory, "--json")
    assert json.loads(result.stdout)["last_step"] == 2
    assert "unfinished" in result.stderr


def test_mistakes_are_one_line(tmp_path: Path) -> None:
    assert error_of(tmp_path / "none").endswith("none: no such run directory")
    assert "metrics.jsonl: not found" in error_of(tmp_path)
    write(tmp_path, [], rest='{"step": 1')
    assert "no complete line yet" in error_of(tmp_path)
    write(tmp_path, [line(1)], rest='{"step": 2, "lo\n' + json.dumps(line(3)) + "\n")
    assert "metrics.jsonl, line 2: not valid JSON" in error_of(tmp_path)
    write(tmp_path, [line(1)], rest="[1, 2]\n")
    assert "line 2: found '[1, 2]', expected an object" in error_of(tmp_path)
    write(tmp_path, [line(1)])
    assert "expected NAME=NATS" in error_of(tmp_path, "--reference", "entropy")
    assert "expected NAME=NATS" in error_of(tmp_path, "--reference", "entropy=high")
    assert "use one of" in error_of(tmp_path, "--output", "a.jpg")


def test_small_parts() -> None:
    assert sparkline([1, 2, 3, 4, 5, 6, 7, 8], 8) == "▁▂▃▄▅▆▇█"
    assert sparkline([5.0] * 9, 3) == "▅▅▅"
    assert len(sparkline(list(range(1000)), 40)) == 40
    sizes = [0, 999, 1500, 41_000_000, 2_000_000_000, 3e12]
    assert [readable_bytes(size) for size in sizes] == ["0 B", "999 B", "1.5 kB", "41 MB", "2 GB", "3 TB"]
