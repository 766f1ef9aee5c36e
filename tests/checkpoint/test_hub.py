"""Models by their names on a hub: a server here that answers as the real one does."""

import hashlib
import json
import shutil
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest

from hexad.config import HexadError
from hexad.config.hub import _downloaded, local
from hexad.dataset.text.tokenizer_training import train_bpe
from hexad.model.configuration import build_config

from ..training.command import call
from . import hugging_face as theirs

REVISION = "0123456789abcdef0123456789abcdef01234567"


class Hub(BaseHTTPRequestHandler):
    """The calls of ``snapshot_download``: what a repository holds, and its files."""

    files: Path
    asked: list[str]

    def do_GET(self) -> None:
        self.asked.append(self.path)
        if self.path.startswith("/api/models/org/private"):
            return self._send(404, b"{}", {"X-Error-Code": "RepoNotFound"})
        if self.path.startswith("/api/models/org/gated"):
            return self._send(403, b"{}", {"X-Error-Code": "GatedRepo"})
        if "no-such" in self.path:
            return self._send(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
        names = sorted(path.name for path in self.files.iterdir())
        if self.path.startswith("/api/"):
            entries = [
                {"type": "file", "path": name, "size": (self.files / name).stat().st_size, "oid": name}
                for name in names
            ]
            siblings = [{"rfilename": name} for name in names]
            tree: Any = {"id": "org/name", "sha": REVISION, "siblings": siblings}
            return self._send(200, json.dumps(entries if "/tree/" in self.path else tree).encode())
        content = (self.files / self.path.rpartition("/")[2]).read_bytes()
        marks = {"X-Repo-Commit": REVISION, "ETag": f'"{hashlib.sha1(content).hexdigest()}"'}
        return self._send(200, content, marks)

    do_HEAD = do_GET

    def _send(self, status: int, content: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Hub]]:
    files = theirs.save("llama", tmp_path / "served")
    train_bpe(["the quick brown fox jumps over the lazy dog"] * 9, 280, files)
    (files / "consolidated.safetensors").write_bytes(b"the same weights again")
    handler = type("Served", (Hub,), {"files": files, "asked": []})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setattr(
        huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE",
        f"http://127.0.0.1:{server.server_port}" + "/{repo_id}/resolve/{revision}/{filename}",
    )  # fmt: skip
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    _downloaded.cache_clear()
    yield handler
    server.shutdown()
    server.server_close()
    _downloaded.cache_clear()


def test_a_model_is_downloaded_once(hub: type[Hub], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    options = ("--prompt", "the quick", "--tokens", "4", "--json", "precision.dtype=fp32")
    result = call("generate", "hf:org/name", *options)
    assert result.status == 0, result.err
    directory = Path(local("hf:org/name").removeprefix("hf:"))
    assert directory.name == REVISION and not (directory / "consolidated.safetensors").exists()
    (hub.files / "consolidated.safetensors").unlink()
    theirs.assert_same_tensors(directory, hub.files)
    wanted = call("generate", f"hf:{hub.files}", *options)
    assert json.loads(result.out)["tokens"] == json.loads(wanted.out)["tokens"]
    # The hub is gone: the cache has it.
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    _downloaded.cache_clear()
    (tmp_path / "text.txt").write_text("the lazy dog " * 200)
    build = ("data", "build", "--input", "text.txt", "--output", "data", "--tokenizer", "hf:org/name")
    result = call(*build)
    assert result.status == 0, result.err
    run = ("model: {load: 'hf:org/name'}\ndata: {train: data, tokenizer: 'hf:org/name', sequence: 16}\n"
           "run: {dir: run, steps: 1}\nbatch: {micro: 1, global: 1}\n")  # fmt: skip
    (tmp_path / "run.yaml").write_text(run)
    result = call("train", "run.yaml")
    assert result.status == 0, result.err
    assert f"load: hf:{directory}" in (tmp_path / "run" / "config.yaml").read_text()
    result = call("checkpoint", "import", "--from", "hf:org/name", "--to", "imported")
    assert result.status == 0, result.err


def test_a_tokenizer_comes_without_weights(hub: type[Hub], tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("the lazy dog " * 200)
    build = ("data", "build", "--input", str(tmp_path / "text.txt"), "--output", str(tmp_path / "data"))
    result = call(*build, "--tokenizer", "hf:org/name")
    assert result.status == 0, result.err
    config = {"data": {"tokenizer": "hf:org/name"}}
    directory = Path(build_config(config).data.tokenizer)
    assert directory.name == REVISION and not list(directory.glob("*.safetensors"))
    assert list(Path(local("hf:org/name").removeprefix("hf:")).glob("*.safetensors"))  # which follow later


def test_problems_are_one_line(hub: type[Hub], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, problem in {
        "org/private": "the hub has no such model, or a private one: set HF_TOKEN",
        "org/gated": "its owner gives access to accounts",
        "org/name@no-such": "the model has no revision no-such",
    }.items():
        with pytest.raises(HexadError, match=f"^{name}: no such dir.*download: {problem}"):
            local(f"hf:{name}")
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    shutil.rmtree(tmp_path / "cache", ignore_errors=True)
    with pytest.raises(HexadError, match=r"it is not in the cache \(HF_HOME\), and the hub"):
        local("hf:org/other")


def test_directories_are_not_looked_up(
    hub: type[Hub], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org" / "name").mkdir(parents=True)
    for source in ("hf:org/name", "hf:/no/such/model", "hf:name", "org/name", "hf:./a/b"):
        assert local(source) == source
    assert hub.asked == []
