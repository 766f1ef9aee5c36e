"""``hexad checkpoint inspect``."""

from __future__ import annotations

from pathlib import Path

import pytest

from hexad.cli.main import run


def test_a_state_without_the_number_of_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "state.json").write_text("{}")
    state = {"step": 3, "samples": 12, "config": {}}
    monkeypatch.setattr("hexad.checkpoint.directory.read_state", lambda path: state)
    monkeypatch.setattr("hexad.checkpoint.chunks.stored_tensors", lambda path: {})
    assert run(["checkpoint", "inspect", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert out == f"{tmp_path}: step 3, 12 samples, written by an unknown number of rank(s)\n"
