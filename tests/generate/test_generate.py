"""Generation: the cache changes nothing, nor do tensor ranks or, for a seed, chance."""

from __future__ import annotations

import contextlib
import io
import json
import os
from pathlib import Path
from unittest import mock

import pytest
import torch

from hexad.cli.main import run
from hexad.config import ConfigError
from hexad.dataset.tokenizer import ByteTokenizer, train_bpe
from hexad.generate.generator import KeyValueCache, generate
from hexad.generate.sampling import Sampling, choose
from hexad.model.configuration import build_config
from hexad.model.transformer import Transformer
from hexad.parallel.sharding import declared_parameters, initialise

from ..layers import shard_of, whole_model
from ..pool import Pool
from ..train.command import Process, RunFile, call, free_port, write_run

FAMILIES = ("llama", "gpt2", "qwen2", "qwen3")


def model_of(family: str) -> Transformer:
    tree = {"family": family, "layers": 2, "hidden": 16, "heads": 4, "ffn_hidden": 24, "vocab": 50}
    positions = {"max_positions": 32} if family == "gpt2" else {}
    config = build_config({"model": {**tree, **positions, "init_std": 0.5}})
    model = whole_model(config.model, shard_of())
    initialise(declared_parameters(model), 7)
    return model.eval()


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_the_cache_equals_a_full_forward(family: str) -> None:
    model = model_of(family)
    tokens = torch.randint(0, 50, (1, 20), generator=torch.Generator().manual_seed(3))
    whole = model.logits(model(tokens))
    caches = [KeyValueCache(20) for _ in model.layers]
    parts, start = [], 0
    for count in (8, *(1 for _ in range(12))):  # the prompt, then one token at a time
        parts.append(model.logits(model(tokens[:, start : start + count], stores=caches, start=start)))
        start += count
    torch.testing.assert_close(torch.cat(parts), whole, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_greedy_generation_equals_argmax_of_full_forwards(family: str) -> None:
    model = model_of(family)
    prompt = [3, 1, 4, 1, 5]
    expected = list(prompt)
    for _ in range(12):
        logits = model.logits(model(torch.tensor([expected])))[-1, : model.vocab]
        expected.append(int(logits.argmax()))
    assert list(generate(model, prompt, 12, Sampling())) == expected[len(prompt) :]
    # It ends after the stop token, which is yielded.
    stop = expected[len(prompt) + 3]
    ended = list(generate(model, prompt, 12, Sampling(), stop))
    assert ended == expected[len(prompt) : expected.index(stop, len(prompt)) + 1]


def test_choose() -> None:
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()

    def drawn(**options: float) -> set[int]:
        generator = torch.Generator().manual_seed(0)
        sampling = Sampling(temperature=1.0, **options)  # type: ignore[arg-type]
        return {int(choose(logits, sampling, generator)) for _ in range(300)}

    assert int(choose(logits, Sampling(), torch.Generator())) == 0
    assert drawn() == {0, 1, 2, 3}
    assert drawn(top_k=2) == {0, 1}
    assert drawn(top_p=0.7) == {0, 1}  # 0.5 does not reach it, 0.5 + 0.3 does
    assert drawn(top_p=1e-9) == {0}


@pytest.mark.parametrize(
    ("options", "field"),
    [({"temperature": -1.0}, "--temperature"), ({"top_k": -1}, "--top-k"), ({"top_p": 0.0}, "--top-p")],
)
def test_sampling_out_of_range(options: dict[str, float], field: str) -> None:
    with pytest.raises(ConfigError, match=f"^{field}: found "):
        Sampling(**options)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
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


def generated(run_file: RunFile, *options: str) -> str:
    result = call("generate", str(run_file.directory), "--prompt", "the q", "--tokens", "12", *options)
    assert result.status == 0, result.err
    return result.out


def test_the_command(trained: RunFile, tmp_path: Path) -> None:
    greedy = generated(trained)
    assert greedy.strip()
    assert generated(trained) == greedy
    warm = [generated(trained, "--temperature", "2", "--seed", seed) for seed in ("1", "1", "2")]
    assert warm[0] == warm[1] != warm[2]
    document = json.loads(generated(trained, "--json"))
    assert document["text"] in greedy
    process = Process.hexad(
        ["generate", str(trained.newest), "--prompt", "the q", "--tokens", "12", "--nproc", "2"], tmp_path
    )
    result = process.wait()
    assert result.status == 0, result.err
    assert result.out == greedy


def generated_by(rank: int, world: int, request: dict[str, object], port: int) -> str:
    """What one rank of a world prints."""
    place = {"RANK": rank, "WORLD_SIZE": world, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": world}
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    from hexad.cli.generate import generate_here

    out = io.StringIO()
    with (
        mock.patch.dict(os.environ, {name: str(value) for name, value in {**place, **address}.items()}),
        contextlib.redirect_stdout(out),
    ):
        generate_here(request)
    return out.getvalue()


@pytest.mark.parametrize(
    ("world", "overrides"),
    [
        (2, ("parallel.pipeline=2",)),
        (4, ("parallel.pipeline=2",)),
        (3, ("parallel.pipeline=3",)),
        (4, ("parallel.tensor=4",)),
    ],
)
def test_other_layouts_generate_the_same(
    trained: RunFile, pool: Pool, world: int, overrides: tuple[str, ...]
) -> None:
    """The model has one layer, three stages are embedding, layer and head; and two KV heads, which on four
    tensor ranks have a cache on two each."""
    sampling = {"temperature": 1.5, "top_k": 0, "top_p": 0.95, "seed": 3, "as_json": False}
    text = {"prompt": "the q", "tokens": 12, "checkpoint": str(trained.newest)}
    alone = generated(trained, "--temperature", "1.5", "--top-p", "0.95", "--seed", "3")
    request = {**sampling, **text, "nproc": world, "overrides": overrides}
    first, *others = pool.apart(world, generated_by, request, free_port())
    assert first == alone and set(others) <= {""}


@pytest.mark.parametrize(
    ("options", "start"),
    [
        (["--temperature", "-1"], "--temperature: found -1.0"),
        (["--top-k", "-1"], "--top-k: found -1"),
        (["--top-p", "0"], "--top-p: found 0.0"),
        (["--top-p", "1.5"], "--top-p: found 1.5"),
        (["--prompt", ""], "--prompt: found no tokens"),
        (["--tokens", "0"], "Invalid value for '--tokens'"),
        (["--nproc", "3"], "parallel.tensor: found 3"),
        (["--nproc", "3", "parallel.pipeline=2"], "--nproc: found 3, expected parallel.tensor 1 x "),
        (["--nproc", "2", "parallel.pipeline=2", "parallel.schedule=zb_v"], "parallel.schedule: found zb_v"),
        (["--nproc", "8", "parallel.pipeline=8"], "parallel.pipeline: found 8 stages"),
        (["--nproc", "2", "--top-p", "0"], "--top-p: found 0.0"),
        (["parallel.tensor=2"], "--nproc: found 1, expected parallel.tensor 2 x parallel.pipeline 1 = 2"),
        (["model.hidden=32"], "model.hidden: found 32, but checkpoint"),
        (["--stop", "x"], "No such option"),
    ],
)
def test_errors(trained: RunFile, options: list[str], start: str) -> None:
    result = call("generate", str(trained.directory), "--prompt", "a", *options)
    assert result.status == 2 and result.error.startswith(start)


@pytest.mark.parametrize("ranks", [(), ("--nproc", "2")])
def test_a_tokenizer_with_more_ids_than_the_model(
    trained: RunFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: tuple[str, ...]
) -> None:
    def never(*_: object) -> None:
        raise AssertionError("ranks were started")

    monkeypatch.setattr("hexad.cli.generate.start_local", never)
    train_bpe(["some text"] * 9, 262, tmp_path)
    for where, problem in ((tmp_path, "with 262 ids, more than the model's 257"), ("nowhere", "no such")):
        arguments = [str(trained.directory), "--prompt", "a", f"data.tokenizer={where}", *ranks]
        result = call("generate", *arguments)
        assert result.status == 2 and result.error.startswith("data.tokenizer: ")
        assert problem in result.error


def test_prompts_begin_as_the_tokenizer_says(trained: RunFile, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts: list[list[int]] = []
    monkeypatch.setattr(ByteTokenizer, "bos", (256,))
    monkeypatch.setattr("hexad.generate.generator.generate", lambda _, ids, *rest: prompts.append(ids) or [])
    for override in ("data.bos=auto", "data.bos=no"):
        generated(trained, override)
    assert prompts == [[256, *b"the q"], [*b"the q"]]


def test_another_sequence_length_is_of_no_matter(trained: RunFile) -> None:
    assert generated(trained, "data.sequence=64") == generated(trained)


def test_no_checkpoint(tmp_path: Path) -> None:
    result = call("generate", str(tmp_path), "--prompt", "a")
    assert result.status == 2
    assert result.error.startswith(f"{tmp_path}: neither a checkpoint nor a run directory")
