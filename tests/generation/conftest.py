"""Runs that have learned a few bytes, and a few conversations."""

import json
from pathlib import Path

import pytest

from hexad.cli.main import run
from hexad.dataset.text.tokenizer_training import train_bpe

from ..training.command import RunFile, write_run


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> RunFile:
    """A run that has learned a few bytes."""
    directory = tmp_path_factory.mktemp("generate")
    (directory / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 40)
    prefix = str(directory / "data")
    options = ["--tokenizer", "byte", "--workers", "1"]
    assert run(["data", "build", "--input", str(directory / "text.txt"), "--output", prefix, *options]) == 0
    run_file = write_run(directory, prefix, run={"steps": 40}, optimizer={"lr": 0.02})
    assert run_file.train().status == 0
    return run_file


def chatty_run(tmp_path: Path) -> RunFile:
    """A run on conversations whose answers end with ``<|im_end|>``."""
    template = (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    tokens = tmp_path / "tok"
    train_bpe(["what is it? a fox"] * 9, 264, tokens, special_tokens=("<|im_start|>", "<|im_end|>"))
    (tokens / "chat_template.jinja").write_text(template)
    pair = [{"role": "user", "content": "what?"}, {"role": "assistant", "content": "fox"}]
    (tmp_path / "chat.jsonl").write_text(f"{json.dumps({'messages': pair})}\n" * 8)
    build = ["--input", str(tmp_path / "chat.jsonl"), "--output", str(tmp_path / "chat"), "--workers", "1"]
    assert run(["data", "build", *build, "--tokenizer", str(tokens)]) == 0
    groups = {"data": {"tokenizer": str(tokens), "sequence": 48}, "optimizer": {"lr": 0.02}}
    run_file = write_run(tmp_path, str(tmp_path / "chat"), run={"steps": 60}, **groups)
    assert run_file.train().status == 0
    return run_file


@pytest.fixture(scope="session")
def chatty(tmp_path_factory: pytest.TempPathFactory) -> RunFile:
    """See :func:`chatty_run`."""
    return chatty_run(tmp_path_factory.mktemp("chatty"))
