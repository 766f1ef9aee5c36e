"""Generation: the cache changes nothing, nor do tensor ranks or, for a seed, chance."""

import contextlib
import io
import json
import os
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch

from hexad.cli.main import run
from hexad.config import ConfigError, HexadError
from hexad.dataset.text.tokenizer import ByteTokenizer
from hexad.dataset.text.tokenizer_training import train_bpe
from hexad.generation.cache import KeyValueCache, Lengths
from hexad.generation.generator import Sampling, choose, generate_all
from hexad.generation.scoring import log_likelihoods
from hexad.model.configuration import build_config
from hexad.model.transformer import Transformer
from hexad.parallel.sharding import declared_parameters, initialise

from ..layers import shard_of, whole_model
from ..pool import Pool
from ..training.command import Process, RunFile, call, free_port, write_run

FAMILIES = ("llama", "gpt2", "qwen2", "qwen3")


def model_of(family: str, **settings: int) -> Transformer:
    tree = {
        "family": family,
        "layers": 2,
        "hidden": 16,
        "heads": 4,
        "ffn_hidden": 24,
        "vocab": 50,
        **settings,
    }
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
    lengths = Lengths([8], 20, torch.device("cpu"))
    caches = [KeyValueCache(lengths) for _ in model.layers]
    parts = [model.logits(model(tokens[:, :8], stores=caches))]
    for start in range(8, 20):  # the prompt, then one token at a time
        parts.append(model.logits(model(tokens[:, start : start + 1], None, caches, lengths.now)))
        lengths.advance()
    torch.testing.assert_close(torch.cat(parts), whole, rtol=1e-12, atol=1e-12)


def alone_after(
    model: Transformer, prompt: list[int], sampling: Sampling, stop: int | None = None
) -> list[int]:
    """Up to 12 new ids of one prompt, the last of which may be ``stop``."""
    return generate_all(model, [prompt], 12, sampling, lambda _, ids: ids[-1] == stop)[0]


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_prompts_of_any_lengths_continue_as_one_by_one(family: str, window: int | None) -> None:
    """Also with a window, with draws of their own, and where some end before others."""
    model = model_of(family, **({"sliding_window": window} if window else {}))
    prompts = [[3, 1, 4], [1], [5, 9, 2, 6, 5, 3, 5], [8, 9, 7], [9, 3]]
    lengths = [12, 3, 12, 5, 1]
    for sampling in (Sampling(), Sampling(temperature=1.3, top_k=9)):
        alone = [
            alone_after(model, prompt, replace(sampling, seed=number))
            for number, prompt in enumerate(prompts)
        ]
        together = generate_all(
            model, prompts, 12, sampling, lambda n, ids: len(ids) == lengths[n], seeds=range(len(prompts))
        )
        assert together == [ids[:length] for ids, length in zip(alone, lengths)]
        assert len({tuple(ids) for ids in alone}) > 1


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_greedy_generation_equals_argmax_of_full_forwards(family: str) -> None:
    model = model_of(family)
    prompt = [3, 1, 4, 1, 5]
    expected = list(prompt)
    for _ in range(12):
        logits = model.logits(model(torch.tensor([expected])))[-1, : model.vocab]
        expected.append(int(logits.argmax()))
    assert alone_after(model, prompt, Sampling()) == expected[len(prompt) :]
    # It ends after the stop token, which is among the ids.
    stop = expected[len(prompt) + 3]
    ended = alone_after(model, prompt, Sampling(), stop)
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
    (only,) = document.pop("results")  # one form for any number of texts
    assert only == document
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
        (4, ("parallel.context=2", "parallel.pipeline=2", "data.sequence=15")),
    ],
)
def test_other_layouts_generate_the_same(
    trained: RunFile, pool: Pool, world: int, overrides: tuple[str, ...]
) -> None:
    """The model has one layer, three stages are embedding, layer and head; and two KV heads, which on four
    tensor ranks have a cache on two each. Context ranks need not divide the length of samples."""
    sampling = {"temperature": 1.5, "top_k": 0, "top_p": 0.95, "seed": 3, "as_json": False}
    text = {"prompts": [{"prompt": "the q"}], "tokens": 12, "checkpoint": str(trained.newest)}
    text |= {"samples": 1, "stop": (), "batch": 4, "lines": False}
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
        (
            ["parallel.tensor=2"],
            "--nproc: found 1, expected parallel.tensor 2 x parallel.context 1 x parallel.pipeline 1 = 2",
        ),
        (["model.hidden=32"], "model.hidden: found 32, but checkpoint"),
        (["--stop", ""], "--stop: found an empty text"),
        (["--samples", "2"], "--samples: found 2 with --temperature 0"),
        (["--prompts", "/none"], "--prompts: /none: cannot be read: No such file"),
        (["--best", "x"], "No such option"),
        (
            ["--nproc", "3", "parallel.context=2"],
            "--nproc: found 3, expected parallel.tensor 1 x parallel.context 2 ",
        ),
        (
            ["--nproc", "8", "parallel.context=8", "parallel.context_method=ulysses"],
            "parallel.context: found 8 with parallel.context_method ulysses, but so many ranks cannot share",
        ),
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

    monkeypatch.setattr("hexad.cli.generate.run_ranks", never)
    train_bpe(["some text"] * 9, 262, tmp_path)
    for where, problem in ((tmp_path, "with 262 ids, more than the model's 257"), ("nowhere", "no such")):
        arguments = [str(trained.directory), "--prompt", "a", f"data.tokenizer={where}", *ranks]
        result = call("generate", *arguments)
        assert result.status == 2 and result.error.startswith("data.tokenizer: ")
        assert problem in result.error


def test_prompts_begin_as_the_tokenizer_says(trained: RunFile, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts: list[list[int]] = []
    monkeypatch.setattr(ByteTokenizer, "bos", (256,))
    monkeypatch.setattr("hexad.generation.texts.write", lambda _, __, ids, *rest: prompts.extend(ids) or [])
    for override in ("data.bos=auto", "data.bos=no"):
        generated(trained, override)
    assert prompts == [[256, *b"the q"], [*b"the q"]]


def test_another_sequence_length_is_of_no_matter(trained: RunFile) -> None:
    assert generated(trained, "data.sequence=64") == generated(trained)


def test_no_checkpoint(tmp_path: Path) -> None:
    result = call("generate", str(tmp_path), "--prompt", "a")
    assert result.status == 2
    assert result.error.startswith(f"{tmp_path}: neither a checkpoint nor a run directory")


@torch.no_grad()
def test_likelihoods_are_those_of_full_forwards() -> None:
    """Many sequences in one pass, each by itself."""
    model = model_of("llama")
    sequences = [([3, 1, 4, 1, 5], 2), ([9, 2], 1), ([6, 5, 3, 5], 3)]
    greedy = [7]
    for _ in range(3):
        greedy.append(int(model.logits(model(torch.tensor([greedy])))[-1, : model.vocab].argmax()))
    for (ids, first), likelihood in zip(
        [*sequences, (greedy, 1)], log_likelihoods(model, [*sequences, (greedy, 1)])
    ):
        logs = model.logits(model(torch.tensor([ids])))[:, : model.vocab].double().log_softmax(-1)
        wanted = sum(float(logs[place - 1, ids[place]]) for place in range(first, len(ids)))
        assert likelihood.log_probability == pytest.approx(wanted, rel=1e-6)
        assert likelihood.greedy == (ids == greedy)
    with pytest.raises(HexadError, match="found 2 tokens of which number 0 is the first"):
        log_likelihoods(model, [([1, 2], 0)])


def test_several_prompts_samples_and_stop_texts(trained: RunFile, tmp_path: Path) -> None:
    def lines(*options: str) -> list[dict[str, object]]:
        result = call("generate", str(trained.directory), "--tokens", "12", *options)
        assert result.status == 0, result.err
        return [json.loads(line) for line in result.out.splitlines()]

    prompts = ["the q", "jumps over", "l"]
    alone = [
        json.loads(generated(trained, "--json", "--prompt", text).strip())["results"][1] for text in prompts
    ]
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt": text, "id": n}) + "\n" for n, text in enumerate(prompts)))
    printed = lines("--prompts", str(file), "--batch", "2")
    assert [(line["id"], line["prompt"], line["text"]) for line in printed] == [
        (n, text, pair["text"]) for n, (text, pair) in enumerate(zip(prompts, alone))
    ]
    sampled = lines("--prompts", str(file), "--samples", "2", "--temperature", "1.5")
    assert [(line["id"], line["sample"]) for line in sampled] == [(n, s) for n in range(3) for s in range(2)]
    first = json.loads(generated(trained, "--temperature", "1.5", "--prompt", "l", "--json"))
    text = first["results"][-1]["text"]
    assert text == sampled[4]["text"] != sampled[5]["text"]  # whatever the other prompts are
    whole = alone[0]["text"]
    ended = lines("--prompts", str(file), "--stop", whole[3:6], "--stop", "never")[0]
    assert ended["text"] == whole[: whole.find(whole[3:6])] and ended["ended"] == "stop"
    assert generated(trained, "--prompt", "jumps over").count("---") == 1


def test_conversations_are_rendered_by_the_tokenizers_template(trained: RunFile, tmp_path: Path) -> None:
    (tmp_path / "prompts.jsonl").write_text('{"messages": [{"role": "user", "content": "the q"}]}\n')
    error = call("generate", str(trained.directory), "--prompts", str(tmp_path / "prompts.jsonl")).error
    assert error.startswith("data.tokenizer: byte has no chat template for the messages of prompt 1")


def test_prompts_beyond_the_models_length_are_reported(trained: RunFile) -> None:
    result = call("generate", str(trained.directory), "--prompt", "the q", "--tokens", "12")
    assert "warning: prompt and new tokens reach 17 positions, the model was made for 16" in result.err
    assert not call("generate", str(trained.directory), "--prompt", "the q", "--tokens", "11").err


def chatty(tmp_path: Path) -> RunFile:
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


def test_an_answer_ends_where_the_template_ends_it(tmp_path: Path) -> None:
    """The token that closes a turn is not the end of a document, and no text of its own."""
    run_file = chatty(tmp_path)
    (tmp_path / "ask.jsonl").write_text('{"messages": [{"role": "user", "content": "what?"}]}\n')

    def written(*options: str) -> dict[str, object]:
        result = call("generate", str(run_file.directory), "--tokens", "24", *options)
        assert result.status == 0, result.err
        return json.loads(result.out)

    asked = written("--prompts", str(tmp_path / "ask.jsonl"))
    assert (asked["text"], asked["ended"]) == ("fox", "document")
    plain = "<|im_start|>user\nwhat?<|im_end|>\n<|im_start|>assistant\n"
    stopped = written("--prompt", plain, "--stop", "<|im_end|>", "--json")
    assert (stopped["text"], stopped["ended"]) == ("fox", "document")
    assert len(written("--prompt", plain, "--json")["tokens"]) > len(stopped["tokens"])
    ends = {"eos_token_id": [stopped["tokens"][-1]]}
    (run_file.newest / "tokenizer" / "generation_config.json").write_text(json.dumps(ends))
    assert written("--prompt", plain, "--json")["tokens"] == stopped["tokens"]


def test_lines_of_prompts_end_at_line_feeds_only(trained: RunFile, tmp_path: Path) -> None:
    (tmp_path / "odd.jsonl").write_text(json.dumps({"prompt": "a\u2028b\u0085c"}, ensure_ascii=False))
    result = call(
        "generate", str(trained.directory), "--prompts", str(tmp_path / "odd.jsonl"), "--tokens", "2"
    )
    assert result.status == 0 and json.loads(result.out)["prompt"] == "a\u2028b\u0085c"
    (tmp_path / "half.jsonl").write_text('{"prompt": "a\\ud800"}')
    error = call("generate", str(trained.directory), "--prompts", str(tmp_path / "half.jsonl")).error
    assert error.startswith("--prompt: number 1 is not Unicode text")


def test_prompts_have_random_numbers_of_their_own() -> None:
    """A model whose next id depends on nothing but chance: prompts and samples would continue alike."""
    from hexad.generation.texts import stream

    seeds = {
        stream(seed, sample, ids)
        for seed in (3, 4)
        for sample in range(3)
        for ids in ([1], [2], [1, 2], [12])
    }
    assert len(seeds) == 24 and all(0 <= seed < 2**63 for seed in seeds)
    assert stream(3, 1, [7, 8]) == stream(3, 1, (7, 8))
