"""The pages say what is: generated ones are current, and commands marked as tested run."""

import os
import re
import sys
from pathlib import Path

import pytest
from docs import generate

import hexad
from hexad.config import Config, setting_names

from .. import forks
from ..training.command import call, write_run

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"<!-- tested(?:: (\d) ranks)? -->\s*\n```(bash|python)\n(.*?)\n```", re.DOTALL)
PAGES = {
    str(path.relative_to(ROOT)): blocks
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md")))
    if path.exists() and (blocks := BLOCK.findall(path.read_text(encoding="utf-8")))
}


@pytest.mark.parametrize("path", generate.PAGES, ids=lambda path: path.name)
def test_generated_pages_are_current(path: Path) -> None:
    assert path.read_text(encoding="utf-8") == generate.PAGES[path](), "run 'make docs'"


def test_every_setting_is_described() -> None:
    rows = {
        match[1]: match[2]
        for match in re.finditer(r"^\| `([\w.]+)` \|.*\| (.*) \|$", generate.page(), re.MULTILINE)
    }
    groups = set(Config.model_fields) | {field.alias for field in Config.model_fields.values()}
    assert set(rows) == set(setting_names()) - groups
    assert all(len(meaning) > 10 for meaning in rows.values())


def test_every_public_name_is_in_the_reference() -> None:
    reference = (ROOT / "docs/api.md").read_text(encoding="utf-8")
    described = set(re.findall(r"^::: hexad\.(\w+)$", reference, re.MULTILINE))
    assert described == {name for name in hexad.__all__ if not name.startswith("_")}


def test_there_are_tested_commands() -> None:
    assert "docs/training.md" in PAGES


FIRST = ("README.md", "docs/tutorials/first-run.md")
"""What a new user reads; the other pages take minutes and are in the slow sweep."""
STANDALONE = (*FIRST, "docs/tutorials/")
"""Beginnings of the paths of pages that make all they need, and so run in an empty directory."""


@pytest.mark.parametrize(
    "page", [p if p in FIRST else pytest.param(p, marks=pytest.mark.slow) for p in PAGES]
)
def test_marked_commands_run(page: str, tmp_path: Path) -> None:
    """All marked blocks of a page in order, in a directory with ``corpus/``, ``data/`` and ``run.yaml``;
    those of the README and of tutorials in an empty one."""
    if not page.startswith(STANDALONE):
        prepare(tmp_path)
    programs = tmp_path / ".programs"
    programs.mkdir()
    forks.stand_ins(programs)
    environment = {**os.environ, "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}"}
    for ranks, language, block in PAGES[page]:
        command = ["bash", "-euo", "pipefail", "-c", block]
        if language == "python":
            (tmp_path / "block.py").write_text(block, encoding="utf-8")
            start = ["-m", "torch.distributed.run", "--nproc-per-node", ranks] if ranks else []
            command = [sys.executable, *start, "block.py"]
        result = forks.run(
            command,
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
        )
        assert result.returncode == 0, f"{page}:\n{block}\n{result.stdout}\n{result.stderr}"


def prepare(tmp_path: Path) -> None:
    """What the other pages assume."""
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    (tmp_path / "data").mkdir()
    for name in ("train", "validation"):
        (corpus / f"{name}.txt").write_text("\n".join(f"line {n}: {n * n}" for n in range(200)))
        prefix = str(tmp_path / "data" / name)
        options = ("--output", prefix, "--tokenizer", "byte", "--workers", "1")
        assert call("data", "build", "--input", str(corpus / f"{name}.txt"), *options).status == 0
    data = {"train": "data/train", "validation": "data/validation"}
    write_run(tmp_path, "data/train", run={"dir": "runs/demo"}, data=data)
