"""Building: every kind of input, the same bytes for any number of workers, nothing half-written."""

import json
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result

from hexad.cli.main import hexad
from hexad.config import ConfigError, HexadError
from hexad.dataset.build.builder import build, inspect
from hexad.dataset.build.corpus import build_demo_data, standard_library_files, unigram_entropy
from hexad.dataset.indexed import IndexedDataset, IndexedWriter
from hexad.dataset.load.loader import loader_from_config
from hexad.dataset.sidecar import bin_path, idx_path, read_sidecar, sidecar_path, write_sidecar
from hexad.dataset.text.tokenizer import ByteTokenizer, load_tokenizer
from hexad.dataset.text.tokenizer_training import train_bpe
from hexad.model.configuration import load_config

from ..forks import PATIENCE

BYTE = load_tokenizer("byte")


def texts_of(prefix: Path) -> list[str]:
    """The documents of a byte dataset, which must all end with the end-of-document token."""
    data = IndexedDataset(prefix)
    documents = [data[i].tolist() for i in range(len(data))]
    assert all(ids[-1] == 256 and 256 not in ids[:-1] for ids in documents)
    return [BYTE.decode(ids) for ids in documents]


@pytest.fixture
def inputs(tmp_path: Path) -> Path:
    """Text, JSON lines and Parquet in nested directories, with the texts they hold in ``expected``."""
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    root = tmp_path / "in"
    (root / "b").mkdir(parents=True)
    (root / ".git").mkdir()
    (root / ".git" / "config").write_bytes(b"\xff hidden")
    (root / "a.txt").write_bytes(b"one\r\ntwo\n")
    (root / "b" / "c.py").write_text("x = 'ü'\n")
    (root / "b" / "empty").write_text("")
    lines = [{"text": "first 🙂"}, {"text": ""}, {"id": 1, "text": "second\nline"}]
    (root / "d.jsonl").write_text("\n\n".join(json.dumps(line) for line in lines))
    table = pyarrow.table({"text": ["p1", None, "p2", "p3"]})
    parquet.write_table(table, root / "e.parquet", row_group_size=2)
    return root


EXPECTED = ["one\r\ntwo\n", "first 🙂", "second\nline", "p1", "p2", "p3", "x = 'ü'\n"]


def test_all_kinds_of_input_in_order(inputs: Path, tmp_path: Path) -> None:
    summary = build([inputs], tmp_path / "new" / "d", "byte", workers=1)
    assert texts_of(tmp_path / "new" / "d") == EXPECTED
    assert (summary.documents, summary.skipped, summary.vocab, summary.eod) == (7, 3, 257, 256)
    assert summary.tokens == sum(len(text.encode()) + 1 for text in EXPECTED)
    assert summary.dtype == "uint16"
    sidecar = read_sidecar(tmp_path / "new" / "d")
    assert sidecar is not None
    assert (sidecar.tokenizer, sidecar.vocab, sidecar.max_token, sidecar.tokens) == (
        "byte",
        257,
        256,
        summary.tokens,
    )
    build([inputs / "e.parquet", inputs / "a.txt"], tmp_path / "other", "byte", workers=1)
    assert texts_of(tmp_path / "other") == ["p1", "p2", "p3", "one\r\ntwo\n"]


def test_no_end_of_document(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("ab")
    assert build([tmp_path / "a"], tmp_path / "d", "byte", append_eod=False).eod is None
    assert IndexedDataset(tmp_path / "d").tokens.tolist() == [97, 98]


def test_documents_begin_as_the_tokenizer_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And a run whose ``data.bos`` says otherwise is refused; data of unknown origin is not."""
    (tmp_path / "a").write_text("ab")
    monkeypatch.setattr(ByteTokenizer, "bos", (255, 254))
    for bos, begin in ((True, [255, 254]), (False, [])):
        prefix = tmp_path / f"with{bos}"
        assert build([tmp_path / "a"], prefix, "byte", workers=1, prepend_bos=bos).bos == tuple(begin)
        assert IndexedDataset(prefix).tokens.tolist() == [*begin, 97, 98, 256]
        sidecar = read_sidecar(prefix)
        assert sidecar is not None and sidecar.bos == begin
        tree = {
            "model": {"vocab": 257},
            "data": {"train": str(prefix), "sequence": 2},
            "batch": {"global": 2},
        }
        right, wrong = ("auto", "no") if bos else ("no", "auto")
        loader_from_config(load_config(tree, [f"data.bos={right}"]), 0, 1, ByteTokenizer()).close()
        config = load_config(tree, [f"data.bos={wrong}"])
        with pytest.raises(ConfigError, match=f"built with the ids .* set data.bos to {right}"):
            loader_from_config(config, 0, 1, ByteTokenizer())
        write_sidecar(prefix, replace(sidecar, bos=None))
        loader_from_config(config, 0, 1, ByteTokenizer()).close()


def test_workers_do_not_change_the_result(
    inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = [json.dumps({"text": f"document {i} " * (i % 50)}) for i in range(4000)]
    (inputs / "f.jsonl").write_text("\n".join(lines) + "\n")
    train_bpe(lines[:50], 400, tmp_path / "bpe")
    monkeypatch.setattr("hexad.dataset.build.builder._TASK_BYTES", 20_000)
    monkeypatch.setattr("hexad.dataset.build.sources._JSONL_PIECE", 10_007)
    done: list[tuple[int, int]] = []
    for workers in (1, 3):
        prefix = tmp_path / f"with{workers}"
        build([inputs], prefix, str(tmp_path / "bpe"), workers=workers, progress=lambda *at: done.append(at))
        assert done[-1][0] == done[-1][1]
    assert len(done) > 100
    for path in (bin_path, idx_path):
        assert path(tmp_path / "with1").read_bytes() == path(tmp_path / "with3").read_bytes()
    decoded = load_tokenizer(str(tmp_path / "bpe"))
    data = IndexedDataset(tmp_path / "with3")
    long = [json.loads(line)["text"] for line in lines if json.loads(line)["text"]]
    assert [decoded.decode(data[i]) for i in range(len(data)) if len(data[i]) > 20][-1] == long[-1]
    assert len(data) == len(long) + 7


@pytest.mark.parametrize("piece", [1, 7, 64, 1000])
def test_lines_are_read_once_wherever_a_file_is_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, piece: int
) -> None:
    monkeypatch.setattr("hexad.dataset.build.sources._JSONL_PIECE", piece)
    expected = [f"{'ü' * (i % 13)}{i}" for i in range(40)]
    (tmp_path / "a.jsonl").write_text("\r\n".join(json.dumps({"t": text}) for text in expected))
    build([tmp_path / "a.jsonl"], tmp_path / "d", "byte", workers=1, json_key="t")
    assert texts_of(tmp_path / "d") == expected


MISTAKES = {
    "a.jsonl": (b'{"text": "x"}\n{"text": 1}\n', r"a\.jsonl:2: 'text' is a number \(1\), expected text"),
    "b.jsonl": (b'{"text": "x"}\n\n{"body": "x"}', r"b\.jsonl:3: none of 'text', .*; keys found: 'body'"),
    "c.jsonl": (b'{"text": "x"\n', r"c\.jsonl:1: not valid JSON"),
    "d.jsonl": (b'{"text": "x"}\n{"text": "\xff"}\n', r"d\.jsonl:2: byte 0xff is not UTF-8"),
    "e.jsonl": (b"[1]\n", r"e\.jsonl:1: found a list, expected an object"),
    "f.txt": (b"fine\nfine\nbad \xfe\n", r"f\.txt:3: byte 0xfe is not UTF-8"),
    "g.parquet": (b"PAR1", r"g\.parquet: not a readable \.parquet file"),
    "h.txt": (b"", r"h\.txt: no text found in 1 files"),
}


@pytest.mark.parametrize("name", MISTAKES)
@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_mistakes_name_file_and_line(tmp_path: Path, name: str, workers: int) -> None:
    content, message = MISTAKES[name]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(HexadError, match=message) as error:
        build([tmp_path / name], tmp_path / "out" / "d", "byte", workers=workers)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "out").exists() or list((tmp_path / "out").iterdir()) == []


def test_mistakes_in_workers_are_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hexad.dataset.build.builder._TASK_BYTES", 1)
    for i in range(6):
        (tmp_path / f"{i}.txt").write_bytes(b"\xff" if i == 4 else b"fine")
    with pytest.raises(HexadError, match=r"4\.txt:1: byte 0xff"):
        build(sorted(tmp_path.iterdir()), tmp_path / "out" / "d", "byte", workers=2)
    assert list((tmp_path / "out").iterdir()) == []


def test_missing_inputs_and_columns(inputs: Path, tmp_path: Path) -> None:
    with pytest.raises(HexadError, match="nowhere: no such file or directory"):
        build([tmp_path / "nowhere"], tmp_path / "d", "byte")
    (tmp_path / "hollow").mkdir()
    with pytest.raises(HexadError, match="hollow: no files found"):
        build([tmp_path / "hollow"], tmp_path / "d", "byte")
    with pytest.raises(HexadError, match=r"e\.parquet: no column 'body'; columns found: text"):
        build([inputs / "e.parquet"], tmp_path / "d", "byte", json_key="body")


def test_parquet_without_pyarrow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.parquet").write_bytes(b"")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(HexadError, match=r"a\.parquet: .* pip install 'hexad\[parquet\]'"):
        build([tmp_path], tmp_path / "d", "byte")


def test_output_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("text")
    with pytest.raises(HexadError, match="cannot be written"):
        build([tmp_path / "a"], tmp_path / "a" / "d", "byte")


@pytest.mark.parametrize("documents", [1, 20_000], ids=["tokens", "index"])
def test_full_disk(tmp_path: Path, documents: int) -> None:
    """As far as a program can tell, a limit on the size of its files is a full disk."""
    lines = [json.dumps({"text": "x" * (100_000 // documents)})] * documents
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    prefix = tmp_path / "out" / "d"
    with IndexedWriter(prefix, np.uint16) as earlier:
        earlier.add_document([1, 2])
    before = {path.name: path.read_bytes() for path in prefix.parent.iterdir()}
    # Bytes: the tokens of the one document take 200,000, those of the many 240,000 and their index 400,000.
    limit = 100_000 if documents == 1 else 300_000
    script = (
        "import resource, sys\nfrom hexad.cli.main import run\n"
        f"resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit}))\n"
        "sys.exit(run(sys.argv[1:]))\n"
    )
    command = [sys.executable, "-c", script, "data", "build", "--input", str(tmp_path / "a.jsonl")]
    command += ["--output", str(prefix), "--tokenizer", "byte", "--workers", "1"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    name = "d.bin" if documents == 1 else "d.idx"
    assert result.stderr == f"hexad: error: {prefix.parent / name}: cannot be written: File too large\n"
    assert result.returncode == 2
    assert {path.name: path.read_bytes() for path in prefix.parent.iterdir()} == before


KILLED = """
import sys, time
from hexad.dataset.build import builder as module
module._TASK_BYTES = 1
def stop(done, total):
    if done > total / 2:
        print("half", flush=True)
        time.sleep(60)
if __name__ == "__main__":
    module.build([sys.argv[1]], sys.argv[2], "byte", workers=int(sys.argv[3]), progress=stop)
"""


def children(process: int) -> list[int]:
    """Process ids of the children, from Linux's /proc."""
    tasks = Path(f"/proc/{process}/task").glob("*/children")
    return [int(child) for task in tasks for child in task.read_text().split()]


def alive(process: int) -> bool:
    try:
        return "State:\tZ" not in Path(f"/proc/{process}/status").read_text()
    except OSError:
        return False


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="looks for processes in Linux's /proc")
@pytest.mark.parametrize(("before", "workers"), [(False, 1), (True, 2)])
def test_killed_build_leaves_what_was_there(tmp_path: Path, before: bool, workers: int) -> None:
    (tmp_path / "in").mkdir()
    for i in range(10):
        (tmp_path / "in" / str(i)).write_text("text " * 1000)
    prefix = tmp_path / "d"
    if before:
        build([tmp_path / "in" / "0"], prefix, "byte")
    there = {path.name: path.read_bytes() for path in tmp_path.glob("d.*")}
    assert len(there) == (3 if before else 0)
    (tmp_path / "killed.py").write_text(KILLED)
    command = [sys.executable, str(tmp_path / "killed.py"), str(tmp_path / "in"), str(prefix), str(workers)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "half\n"
        started = children(process.pid)
        assert len(started) >= (workers if workers > 1 else 0)
        process.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 120
    while any(map(alive, started)):
        assert time.monotonic() < deadline, "a worker outlived the build"
        time.sleep(0.05)
    assert {path.name: path.read_bytes() for path in tmp_path.glob("d.*")} == there
    # And the next build is not in its way.
    assert build([tmp_path / "in"], prefix, "byte").documents == 10


def invoke(*args: object) -> Result:
    # Through the main command, as always: click keeps the help option that a group has at its first use.
    return CliRunner().invoke(hexad, ["data", *map(str, args)], catch_exceptions=False, standalone_mode=False)


def test_commands(inputs: Path, tmp_path: Path) -> None:
    first, second = inputs / "a.txt", inputs / "d.jsonl"
    prefix = tmp_path / "d"
    result = invoke(
        "build", "--input", first, second, "--output", prefix, "--tokenizer", "byte", "--workers", 1
    )
    assert "3 documents" in result.stdout and "skipped: 1 without text" in result.stdout
    assert texts_of(prefix) == EXPECTED[:3]
    again = (
        "build",
        "--output",
        prefix,
        "--input",
        second,
        "--input",
        first,
        "--tokenizer",
        "byte",
        "--no-eod",
    )
    summary = json.loads(invoke(*again, "--json").stdout)
    assert summary["documents"] == 3 and summary["eod"] is None
    facts = json.loads(invoke("inspect", prefix, "--json", "--first", 5).stdout)
    assert facts == inspect(prefix, first=5)
    assert facts["first_text"] == "first" and facts["first_tokens"] == list(b"first")
    assert facts["length"] == {"min": 9, "median": 10.0, "max": 11} and facts["tokens"] == 30
    assert "documents" in invoke("inspect", prefix).stdout


def test_inspect_without_a_sidecar(tmp_path: Path) -> None:
    with IndexedWriter(tmp_path / "d", np.int32) as writer:
        writer.add_documents([104, 105], [0, 2])
    sidecar_path(tmp_path / "d").unlink()
    facts = inspect(tmp_path / "d")
    assert facts["tokenizer"] is None and facts["first_text"] is None and facts["first_tokens"] == [104, 105]
    assert inspect(tmp_path / "d", tokenizer="byte")["first_text"] == "hi"
    assert not sidecar_path(tmp_path / "d").exists()
    assert "unknown" in invoke("inspect", tmp_path / "d").stdout


def test_command_starts_without_heavy_imports() -> None:
    script = (
        "import sys\nfrom hexad.cli.data import data\n"
        "assert not {'torch', 'numpy', 'pydantic', 'rich'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_standard_library_files_are_the_same_each_time() -> None:
    files = standard_library_files()
    assert files == standard_library_files()
    assert len(files) > 300 and sum(path.stat().st_size for path in files) > 5_000_000
    some = standard_library_files(max_bytes=100_000)
    assert some == files[: len(some)] and sum(path.stat().st_size for path in some) <= 100_000
    assert not any({"test", "site-packages"} & set(path.parts[-4:]) for path in files)


def test_demo_data(tmp_path: Path) -> None:
    demo = build_demo_data(tmp_path, vocab_size=400, max_bytes=300_000, workers=1)
    validation_tokens = len(IndexedDataset(demo.validation).tokens)
    assert demo.vocab == 400 and demo.train_tokens > 10 * validation_tokens > 0
    train = IndexedDataset(demo.train)
    assert len(train.tokens) == demo.train_tokens
    # Independent of the streaming count: entropy from sorted unique values.
    _, counts = np.unique(train.tokens, return_counts=True)
    share = counts / counts.sum()
    assert demo.unigram_entropy == pytest.approx(float(-(share * np.log(share)).sum()), rel=1e-12)
    assert demo.unigram_entropy == unigram_entropy(demo.train) < np.log(400)
    tokenizer = load_tokenizer(demo.tokenizer)
    assert tokenizer.eod is not None and train[0][-1] == tokenizer.eod
    files = standard_library_files(300_000)
    held_out = files[19::20] or files[-1:]
    kept = [path for path in files if path not in held_out]
    assert tokenizer.decode(train[0]) == kept[0].read_text(encoding="utf-8")
    assert len(train) == len(kept) and len(IndexedDataset(demo.validation)) == len(held_out)


def test_files_of_an_earlier_build_are_no_inputs(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    first = build([tmp_path], tmp_path / "d", "byte", workers=1)
    assert build([tmp_path], tmp_path / "d", "byte", workers=1) == first
    before = (tmp_path / "d.bin").read_bytes()
    with pytest.raises(
        HexadError, match=r"output: found '.*d', whose files would replace the input .*d\.bin"
    ):
        build([tmp_path / "d.bin"], tmp_path / "d", "byte", workers=1)
    assert (tmp_path / "d.bin").read_bytes() == before
