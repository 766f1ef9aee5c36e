"""An import reads what is in the model's directory, or in that model's part of the hub's cache."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from hexad.checkpoint.hugging_face.files import check_links
from hexad.config import HexadError

from ..training.command import call
from . import hugging_face as theirs

REVISION = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model") / "llama"
    theirs.save("llama", directory)
    (directory / "tokenizer_config.json").write_text("{}")
    return directory


def cached(model: Path, cache: Path) -> Path:
    """A snapshot as ``huggingface_hub`` has it: links to the blobs of the model."""
    repository = cache / "models--org--name"
    snapshot = repository / "snapshots" / REVISION
    for folder in (snapshot, repository / "blobs"):
        folder.mkdir(parents=True)
    for number, file in enumerate(sorted(model.iterdir())):
        shutil.copy(file, repository / "blobs" / f"{number:040}")
        (snapshot / file.name).symlink_to(f"../../blobs/{number:040}")
    return snapshot


def test_snapshots_of_the_hub_are_imported(model: Path, tmp_path: Path) -> None:
    snapshot = cached(model, tmp_path / "real" / "hub")
    (tmp_path / "cache").symlink_to("real/hub")
    (tmp_path / "mine").symlink_to(snapshot)
    (tmp_path / "copy").mkdir()
    for file in model.iterdir():  # links inside the directory, as git-annex makes them
        (tmp_path / "copy" / "objects").mkdir(exist_ok=True)
        shutil.copy(file, tmp_path / "copy" / "objects" / file.name)
        (tmp_path / "copy" / file.name).symlink_to(f"objects/{file.name}")
    through = tmp_path / "cache" / "models--org--name" / "snapshots" / REVISION
    for number, source in enumerate((snapshot, through, tmp_path / "mine", tmp_path / "copy", model)):
        target = tmp_path / f"imported{number}"
        result = call("checkpoint", "import", "--from", str(source), "--to", str(target))
        assert result.status == 0, result.err
        assert (target / "manifest.json").is_file()
    # Another model's blobs, and blobs that are elsewhere, are not this model's.
    other = cached(model, tmp_path / "other")
    (snapshot / "special_tokens_map.json").symlink_to(other.parents[1] / "blobs" / f"{0:040}")
    with pytest.raises(HexadError, match=r"special_tokens_map\.json: a link to .*models--org--name/blobs/0"):
        check_links(snapshot)
    blobs = other.parents[1] / "blobs"
    blobs.rename(tmp_path / "secret")
    blobs.symlink_to(tmp_path / "secret")
    with pytest.raises(HexadError, match="outside the model's directory"):
        check_links(other)


def _link(name: str, target: str) -> Callable[[Path], None]:
    def make(directory: Path) -> None:
        path = directory / name
        path.parent.mkdir(exist_ok=True)
        if path.exists():
            path.rename(directory.parent / path.name)
        path.symlink_to(target)

    return make


@pytest.mark.parametrize(
    "make",
    [
        _link("config.json", "../config.json"),
        _link("model.safetensors", "../model.safetensors"),
        _link("tokenizer.json", "/etc/passwd"),
        _link("tokenizer_config.json", "../tokenizer_config.json"),
        _link("chat_template.jinja", "/etc/hostname"),
        _link("tokenizer.model", "../../../../../../../../../../etc/passwd"),
        _link("additional_chat_templates", "/etc"),
        _link("additional_chat_templates/a.jinja", "/etc/passwd"),
        _link("generation_config.json", "/nonexistent"),
        lambda d: (os.symlink("/etc", d / "folder"), os.symlink("folder/passwd", d / "vocab.json")),
    ],
    ids=lambda make: None,
)
def test_links_out_of_the_directory_are_not_followed(
    model: Path, tmp_path: Path, make: Callable[[Path], object]
) -> None:
    directory = tmp_path / "model"
    shutil.copytree(model, directory)
    make(directory)
    error = call("checkpoint", "import", "--from", str(directory), "--to", str(tmp_path / "to")).error
    assert "outside the model's directory, which is not followed; if you trust" in error
    assert not (tmp_path / "to").exists()


def test_links_that_lead_nowhere_or_in_a_circle_end(model: Path, tmp_path: Path) -> None:
    directory = tmp_path / "model"
    shutil.copytree(model, directory)
    (directory / "me").symlink_to("me")
    (directory / "up").symlink_to(".")
    (directory / "gone").symlink_to("no-such-file")
    assert call("checkpoint", "import", "--from", str(directory), "--to", str(tmp_path / "to")).status == 0
    tree = yaml.safe_load((tmp_path / "to" / "config.yaml").read_text())
    assert tree["model"]["family"] == "llama"
