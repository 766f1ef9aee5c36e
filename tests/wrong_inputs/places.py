"""The files that wrong inputs name: a data set, runs and published models that are as they should be, and
damaged copies of them. All names are relative to one directory, in which the commands run."""

import contextlib
import gzip
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import yaml

from ..checkpoint import hugging_face
from ..training.command import SETTINGS, Result, call
from .cases import Case

TEXTS = {
    "empty.yaml": "",
    "list.yaml": "- 1\n- 2\n",
    "word.yaml": "hello\n",
    "tab.yaml": "run:\n\tsteps: 3\n",
    "twice.yaml": "run: {steps: 3}\nrun: {seed: 3}\n",
    "open.yaml": "run: {steps: 3\n",
    "tag.yaml": "run: !!python/object:os.system {}\n",
    "dotted.yaml": "run.steps: 3\n",
    "null-group.yaml": "run: null\n",
    "number-group.yaml": "model: 3\n",
    "number-key.yaml": "3: 4\n",
    "alias.yaml": "run: *none\n",
    "two.yaml": "run: {steps: 3}\n---\nrun: {steps: 4}\n",
    "deep.yaml": f"run: {'[' * 3000}{']' * 3000}\n",
    "self.yaml": "run: &a {steps: *a}\n",
    "hex.yaml": f"run: {{steps: 0x{'f' * 200_000}}}\n",
    "binary.yaml": f"run: {{steps: 0b{'1' * 19_000}}}\n",
    "base-60.yaml": f"run: {{steps: !!int {'1:' * 50_000}1}}\n",
    "long.yaml": f"run: {{steps: {'a' * 1_000_000}}}\n",
    "large.yaml": f"# {'x' * (5 << 20)}\n",
    "laughs.yaml": "run:\n  a0: &a0 [x, x]\n"
    + "".join(f"  a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 12))
    + "  steps: *a11\n",
    "merges.yaml": "a: &a {steps: 3}\nb0: &b0 {<<: [*a, *a]}\n"
    + "".join(f"b{n}: &b{n} {{<<: [{', '.join([f'*b{n - 1}'] * 9)}]}}\n" for n in range(1, 12)),
    "ds-digits.json": f'{{"train_batch_size": {"9" * 200_000}}}',
    "ds-digits.hjson": f"{{train_batch_size: {'9' * 200_000}}}",
    "switch.yaml": "on: {steps: 3}\n",
    "merge.yaml": "base: &b {steps: 3}\nrun:\n  <<: *b\n",
    "control.yaml": "run: {steps: 3\x01}\n",
    "text.txt": "a text\n",
    "nul.txt": "a\0b" * 9,
    "empty.txt": "",
    "a file": "in the way\n",
    "not-json.jsonl": '{"text": "a"}\n{"text": \n',
    "number.jsonl": '{"text": 5}\n',
    "no-key.jsonl": '{"body": "a"}\n',
    "list.jsonl": "[1, 2]\n",
    "two-kinds.jsonl": '{"text": "a", "messages": []}\n',
    "prompt-only.jsonl": '{"prompt": "a"}\n',
    "completion-only.jsonl": '{"completion": "a"}\n',
    "empty-completion.jsonl": '{"prompt": "a", "completion": ""}\n',
    "surrogate.jsonl": '{"text": "\\ud800"}\n',
    "chat.jsonl": '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}\n',
    "empty-chat.jsonl": '{"messages": []}\n',
    "text-chat.jsonl": '{"messages": "a"}\n',
    "no-role.jsonl": '{"messages": [{"content": "a"}]}\n',
    "odd-role.jsonl": '{"messages": [{"role": "usr", "content": "a"}]}\n',
    "no-answer.jsonl": '{"messages": [{"role": "user", "content": "a"}]}\n',
    "number-content.jsonl": '{"messages": [{"role": "assistant", "content": 5}]}\n',
    "tools.jsonl": '{"messages": [{"role": "assistant", "content": "a"}], "tools": 3}\n',
    "t.jinja": "{% for m in messages %}{{ m['role'] + m['content'] }}{% endfor %}",
    "other.jinja": "{% for m in messages %}{{ m['role'] + ':' + m['content'] }}{% endfor %}",
    "open.jinja": "{% for m in messages %}{{ m",
    "prompts.jsonl": '{"prompt": "a"}\n{"prompt": 3}\n',
    "words.jsonl": "hello\n",
    "no-prompts.jsonl": "\n",
    "chat-prompts.jsonl": '{"messages": [{"role": "user", "content": "a"}]}\n',
    "both.jsonl": '{"prompt": "a", "messages": []}\n',
    "nan.jsonl": '{"text": NaN}\n',
    "deep.jsonl": f'{{"text": {"[" * 100_000}{"]" * 100_000}}}\n',
    "object.json": '{"text": "a"}',
    "null-instruction.jsonl": '{"instruction": null, "output": "a"}\n',
    "weight.jsonl": '{"messages": [{"role": "user", "content": "a"}, '
    '{"role": "assistant", "content": "b", "weight": 0}]}\n',
    "deep.json": '{"a":' * 5000 + "1" + "}" * 5000,
    "schedule.json": '{"ranks": "none"}\n',
    "broken.json": "{",
    "list.json": "[1]",
    "ds.json": '{"train_batch_size": 4, "zero_optimization": {"stage": 1}}',
    "ds-batch.json": '{"train_batch_size": 8, "train_micro_batch_size_per_gpu": 3}',
    "ds-twice.json": '{"train_batch_size": 8, "train_batch_size": 4}',
    "ds-unknown.json": '{"train_batch_size": 8, "zero_optimisation": {"stage": 1}}',
}


def make(directory: Path) -> None:
    """Write everything into a directory."""
    with contextlib.chdir(directory):
        for name, text in TEXTS.items():
            Path(name).write_text(text)
        Path("latin.txt").write_bytes("größer".encode("latin-1") * 9)
        Path("latin.yaml").write_bytes("run: {dir: größer}".encode("latin-1"))
        Path("cut.txt.gz").write_bytes(gzip.compress(b"some text " * 99)[:-12])
        Path("plain.txt.gz").write_text("not compressed")
        Path("fake.parquet").write_text("not parquet")
        Path("archive.zip").write_text("zip")
        Path("utf16.jsonl").write_text('{"text": "a"}\n', encoding="utf-16")
        Path("folder").mkdir()
        Path("loop").symlink_to("loop")
        for name in ("pipe", "pipe.json"):
            os.mkfifo(name)
        _data()
        _runs()
        _models()
        _tokenizers()


def _good(*arguments: str) -> None:
    result = call(*arguments)
    assert result.status == 0, result.err


def _data() -> None:
    Path("words.txt").write_text("\n".join(f"line {n}: {n * n} is the square of {n}" for n in range(80)))
    chat = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b" * 40}]}
    Path("chats.jsonl").write_text((json.dumps(chat) + "\n") * 9)
    build = ("data", "build", "--tokenizer", "byte", "--workers", "1")
    _good(*build, "--input", "words.txt", "--output", "data")
    _good(*build, "--input", "chats.jsonl", "--chat-template", "t.jinja", "--output", "chats")
    _good(*build, "--input", "chats.jsonl", "--chat-template", "other.jinja", "--output", "other-chats")
    for name in ("cut-bin", "cut-idx", "no-bin", "no-idx", "bad-idx", "empty-idx"):
        for suffix in (".bin", ".idx"):
            shutil.copy(f"data{suffix}", f"{name}{suffix}")
    for suffix in (".bin", ".idx"):
        shutil.copy(f"data{suffix}", f"folder-mask{suffix}")
    Path("folder-mask.mask").mkdir()
    for name in ("cut-mask", "bad-mask", "other-mask"):
        for suffix in (".bin", ".idx", ".mask"):
            shutil.copy(f"chats{suffix}", f"{name}{suffix}")
    _cut("cut-bin.bin")
    _cut("cut-idx.idx")
    _cut("cut-mask.mask")
    Path("bad-idx.idx").write_bytes(b"no index" * 99)
    Path("empty-idx.idx").write_bytes(b"")
    Path("bad-mask.mask").write_bytes(b"no mask " * 99)
    shutil.copy("data.bin", "other-mask.bin")
    shutil.copy("data.idx", "other-mask.idx")
    Path("no-bin.bin").unlink()
    Path("no-idx.idx").unlink()


def _cut(name: str) -> None:
    """Remove the second half of a file."""
    path = Path(name)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def write(name: str, **groups: dict[str, Any]) -> None:
    """A configuration of the tests' settings, with some replaced."""
    tree = {group: dict(settings) for group, settings in SETTINGS.items()}
    tree["run"] |= {"steps": 2, "dir": "new"}
    tree["data"]["train"] = "data"
    for group, settings in groups.items():
        tree.setdefault(group, {}).update(settings)
    Path(name).write_text(yaml.safe_dump(tree))


def _runs() -> None:
    write("run.yaml")
    write("trained.yaml", run={"dir": "trained"})
    _good("train", "trained.yaml")
    write("lora.yaml", run={"dir": "lora"}, model={"load": "trained", "lora": {"rank": 2}})
    _good("train", "lora.yaml")
    newest = Path("trained") / "checkpoints" / Path("trained/checkpoints/latest").read_text().strip()
    shutil.copytree(newest, "good")
    for name in ("no-manifest", "bad-manifest", "no-tensors", "cut-tensors", "changed-tensors"):
        shutil.copytree(newest, name)
    manifest = next(Path("good").glob("*.json")).name
    Path("no-manifest", manifest).unlink()
    _cut(f"bad-manifest/{manifest}")
    tensors = max(Path("good").iterdir(), key=lambda path: path.stat().st_size).name
    Path("no-tensors", tensors).unlink()
    _cut(f"cut-tensors/{tensors}")
    with Path("changed-tensors", tensors).open("r+b") as file:
        file.seek(-9, os.SEEK_END)
        file.write(b"wrong")
    Path("bad-metrics").mkdir()
    Path("bad-metrics/metrics.jsonl").write_text("not json\nnot json\n")
    Path("empty-metrics").mkdir()
    Path("empty-metrics/metrics.jsonl").write_text("")
    Path("bad-timeline").mkdir()
    Path("bad-timeline/timeline.json").write_text("{}")
    write("blocked.yaml", run={"dir": "blocked"})
    Path("blocked").mkdir()
    Path("blocked/checkpoints").touch()
    for name in ("changed", "damaged"):
        shutil.copytree("trained", name)
        write(f"{name}.yaml", run={"dir": name, "steps": 3})
    with next(Path("damaged").glob(f"checkpoints/step-*/{tensors}")).open("r+b") as file:
        file.truncate(99)


def _models() -> None:
    hugging_face.save("llama", Path("hf"), torch.float32)
    for name in (
        "hf-digits",
        "hf-no-config",
        "hf-bad-config",
        "hf-bad-weights",
        "hf-no-weights",
        "hf-unknown",
        "hf-wrong",
        "hf-deep",
    ):
        shutil.copytree("hf", name)
    Path("hf-no-config/config.json").unlink()
    Path("hf-bad-config/config.json").write_text("{")
    for path in Path("hf-bad-weights").glob("*.safetensors"):
        _cut(str(path))
    for path in Path("hf-no-weights").glob("*.safetensors*"):
        path.unlink()
    Path("hf-deep/config.json").write_text(TEXTS["deep.json"])
    Path("hf-digits/config.json").write_text(f'{{"hidden_size": {"9" * 200_000}}}')
    config = json.loads(Path("hf/config.json").read_text())
    Path("hf-unknown/config.json").write_text(json.dumps({**config, "model_type": "t5"}))
    Path("hf-wrong/config.json").write_text(json.dumps({**config, "hidden_size": 72}))


def _tokenizers() -> None:
    hostile = {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": {"type": "FixedLength", "length": 0},
        "model": {
            "type": "WordLevel",
            "unk_token": "unk",
            "vocab": {"unk": 0, "a": 1},
        },
    }
    huge = {**hostile, "pre_tokenizer": None, "model": {**hostile["model"], "vocab": {"unk": 0, "a": 2**31}}}
    for name, text in (
        ("bad-tokenizer", "{"),
        ("odd-tokenizer", '{"version": "1.0"}'),
        ("panic-tokenizer", json.dumps(hostile)),
        ("huge-tokenizer", json.dumps(huge)),
    ):
        Path(name).mkdir()
        Path(name, "tokenizer.json").write_text(text)
    Path("bad.model").write_text("no sentences")
    Path("bad.tiktoken").write_text("no ranks here\n")
    _good("tokenizer", "train", "--input", "words.txt", "--vocab", "270", "--output", "tok", "--json")


@contextlib.contextmanager
def variables(given: dict[str, str]) -> Iterator[None]:
    """These variables of the environment, for a while."""
    before = {name: os.environ.get(name) for name in given}
    os.environ |= given
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def outcome(case: Case) -> Result:
    """How a case's command ended in the working directory."""
    with variables(case.variables):
        return call(*case.arguments)


_WRITTEN = ("new", "out", "new-tok", "new.yaml", "new-demo")


def clear() -> None:
    """Remove what a command that was not refused, or too late, has written here."""
    for path in (path for name in _WRITTEN for path in Path().glob(f"{name}*")):
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()
