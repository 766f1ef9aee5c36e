"""What a release has: every data file, pinned tools, no token. ``.ci/package`` builds and tries it."""

import tomllib
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src/hexad"


def test_every_data_file_is_declared() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    patterns = settings["package-data"]["hexad"]
    by_pattern = {pattern: set(PACKAGE.glob(pattern)) for pattern in patterns}
    assert not [pattern for pattern, files in by_pattern.items() if not files]
    files = {path for path in PACKAGE.rglob("*") if path.is_file() and "__pycache__" not in path.parts}
    data = {path for path in files if path.suffix != ".py"}
    assert len(data) > 50
    assert not sorted(map(str, data - set().union(*by_pattern.values())))


def test_every_module_is_in_a_package() -> None:
    """Without an ``__init__.py`` setuptools leaves a directory's modules out."""
    directories = {path.parent for path in PACKAGE.rglob("*.py")}
    assert not [str(path) for path in directories if not (path / "__init__.py").is_file()]


def test_the_tools_of_a_release_are_pinned_with_hashes() -> None:
    names = [
        line.partition("=")[0].partition(">")[0].strip()
        for line in (ROOT / "requirements/release.in").read_text().splitlines()
        if line and not line.startswith("#")
    ]
    text = (ROOT / "requirements/release.txt").read_text()
    pinned = [line for line in text.splitlines() if "==" in line]
    assert names and all(any(line.startswith(f"{name}==") for line in pinned) for name in names)
    entries = text.replace("\\\n", " ").splitlines()
    assert all("--hash=sha256:" in entry for entry in entries if "==" in entry)


def test_the_workflow_uploads_what_was_tried_without_a_token() -> None:
    text = (ROOT / ".github/workflows/publish.yml").read_text()
    jobs = yaml.safe_load(text)["jobs"]
    assert any(step.get("run") == "make dist" for step in jobs["build"]["steps"])
    assert jobs["pypi"]["permissions"] == {"id-token": "write"} and "build" in jobs["pypi"]["needs"]
    uploads = [step for step in jobs["pypi"]["steps"] if "pypi-publish" in step["uses"]]
    assert [step["with"] for step in uploads] == [{"attestations": True}]
    assert "secrets." not in text and "password" not in text
