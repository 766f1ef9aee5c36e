"""``hexad show run``: the summary of made-up runs, damaged files, and the picture."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from hexad.show.run import read_metrics, readable_bytes, run_figure

from ..training.command import Process
from .common import document_of, error_of, labels_of, png_size, text_of


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


def test_summary(directory: Path) -> None:
    document = document_of("run", directory)
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


def test_the_terminal_shows_first_last_and_course(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    text = text_of("run", directory)
    for words in ("loss (nats) 8.0000 0.0400 0.0400 8.0000 █", "20,480", "sent: tensor 41.0 MB", "1 of 200"):
        assert words in " ".join(text.split())
    assert "sent: context" not in text


def test_a_run_with_only_a_loss(tmp_path: Path) -> None:
    write(tmp_path, [{"step": 1, "loss": 8.0}])
    assert "nothing was sent" in text_of("run", tmp_path)
    assert document_of("run", tmp_path)["grad_norm"] is None
    assert "Gradient norm: not logged" in labels_of("run", tmp_path, file=tmp_path / "a.svg")
    write(tmp_path, [{"step": 1, "loss": math.nan}])
    assert document_of("run", tmp_path)["loss"] is None
    assert "Tokens per second: not logged" in labels_of("run", tmp_path, file=tmp_path / "a.svg")


def test_pictures_are_written(directory: Path) -> None:
    reference = ("--reference", "unigram entropy=5.25")
    labels = labels_of("run", directory, *reference, file=directory / "run.html")
    assert {"training", "validation", "skipped step", "unigram entropy: 5.250", "41.0 MB"} <= set(labels)
    page = (directory / "run.html").read_text()
    assert "<title>step 3: loss " in page and "<title>tensor: 41,000,000 bytes</title>" in page
    assert png_size("run", directory, file=directory / "run.png")[0] == 1500


def test_names_in_any_script(tmp_path: Path) -> None:
    """Characters that no font here has are reported in one line; a page leaves them to the browser.

    In processes of their own: filters of warnings are those of a process and of all its threads.
    """
    named = tmp_path / "走\U00013000"
    named.mkdir()
    write(named, [line(step) for step in (1, 2, 3)])
    labels = labels_of("run", named, file=tmp_path / "run.svg")
    assert "走\U00013000: loss, nats per target token" in labels
    silent = {"PYTHONWARNINGS": "ignore"}
    for ending, variables, note in ((".svg", {}, False), (".png", {}, True), (".png", silent, True)):
        command = ("show", "run", str(named), "--output", str(tmp_path / f"run{ending}"))
        result = Process.hexad(command, tmp_path, **variables).wait()
        assert result.status == 0
        assert ("of this picture; a browser has them" in result.err) == note
        assert "Warning" not in result.err


def test_steps_are_whole_numbers(directory: Path) -> None:
    write(directory, [line(step) for step in (1, 2, 3)])
    for axes in run_figure(read_metrics(directory)).axes[:3]:
        assert all(tick == int(tick) for tick in axes.get_xticks())


def test_the_picture_shows_what_was_logged(directory: Path) -> None:
    loss, norm, speed, sent = run_figure(read_metrics(directory)).axes
    assert "training, mean of 7 logged steps" in loss.get_legend_handles_labels()[1]
    assert len(loss.lines[0].get_xdata()) == 199  # the skipped step has no finite loss
    assert [bar.get_width() for bar in sent.patches] == [41_000_000, 900]
    assert norm.get_ylim()[0] == speed.get_ylim()[0] == 0
    lines = [line(step, grad_norm=100.0 if step == 7 else 2.0) for step in range(1, 30)]
    write(directory, lines)
    assert run_figure(read_metrics(directory)).axes[1].get_yscale() == "log"


def test_half_a_last_line_is_left_out(directory: Path) -> None:
    write(directory, [line(1), line(2)], rest='{"step": 3, "lo')
    assert document_of("run", directory)["last_step"] == 2


def test_mistakes_are_one_line(tmp_path: Path) -> None:
    assert "metrics.jsonl: cannot be read" in error_of("run", tmp_path / "none")
    write(tmp_path, [], rest='{"step": 1')
    assert "no complete line yet" in error_of("run", tmp_path)
    for damaged in ('{"step": 2, "lo', "[1, 2]", "3", '{"step": "2"}', '{"loss": 2}'):
        write(tmp_path, [line(1)], rest=damaged + "\n" + json.dumps(line(3)) + "\n")
        assert "metrics.jsonl, line 2: found" in error_of("run", tmp_path)
    write(tmp_path, [line(1)])
    for reference in ("entropy", "entropy=high"):
        assert "expected NAME=NATS" in error_of("run", tmp_path, "--reference", reference)


def test_bytes_are_readable() -> None:
    sizes = [999, 1500.4, 41_000_000, 2_000_000_000]
    assert [readable_bytes(size) for size in sizes] == ["999 bytes", "1.5 kB", "41.0 MB", "2.0 GB"]
