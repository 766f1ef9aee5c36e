"""``hexad generate``: prompts, files, settings, layouts, errors."""

import contextlib
import io
import json
import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from hexad.config import HexadError
from hexad.dataset.text.tokenizer import ByteTokenizer
from hexad.dataset.text.tokenizer_training import train_bpe
from hexad.generation.generator import Generator
from hexad.generation.requests import Request
from hexad.generation.texts import Continuation

from ..checkpoint.test_hugging_face import convert
from ..pool import Pool
from ..training.command import Process, RunFile, call, free_port
from .conftest import chatty_run


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
        (2, ("parallel.data=2",)),
        (4, ("parallel.data=2",)),
        (6, ("parallel.data=3", "parallel.pipeline=2")),
    ],
)
def test_other_layouts_generate_the_same(
    trained: RunFile, pool: Pool, world: int, overrides: tuple[str, ...]
) -> None:
    """The model has one layer, three stages are embedding, layer and head; and two KV heads, which on four
    tensor ranks have a cache on two each. Context ranks need not divide the length of samples."""
    sampling = {"temperature": 1.5, "top_k": 0, "top_p": 0.95, "seed": 3, "as_json": False}
    text = {"prompts": [{"prompt": "the q"}], "tokens": 12, "checkpoint": str(trained.newest)}
    text |= {"samples": 1, "stop": (), "file": None, "output": None, "min_p": 0.0, "repetition_penalty": 1.0}
    text |= {"presence_penalty": 0.0, "frequency_penalty": 0.0, "logit_bias": (), "schema": None}
    text |= {"logprobs": False, "prompt_logprobs": False, "top_logprobs": 0, "routing": False}
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
        (["--prompt", ""], "--prompt: prompt 2: found no tokens"),
        (["--tokens", "0"], "Invalid value for '--tokens'"),
        (["--nproc", "3"], "parallel.tensor: found 3"),
        (["--nproc", "3", "parallel.pipeline=2"], "--nproc: found 3, expected parallel.tensor 1 x "),
        (["--nproc", "2", "parallel.pipeline=2", "parallel.schedule=zb_v"], "parallel.schedule: found zb_v"),
        (["--nproc", "8", "parallel.pipeline=8"], "parallel.pipeline: found 8 stages"),
        (["--nproc", "2", "--top-p", "0"], "--top-p: found 0.0"),
        (
            ["parallel.tensor=2"],
            "--nproc: found 1, expected parallel.tensor 2 x parallel.context 1 x parallel.pipeline 1 x "
            "parallel.data 1 = 2",
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
    prompts: list[tuple[int, ...]] = []
    original = Generator.check

    def noted(generator: Generator, request: Request) -> None:
        prompts.append(request.prompt)
        original(generator, request)

    monkeypatch.setattr(ByteTokenizer, "bos", (256,))
    monkeypatch.setattr(Generator, "check", noted)
    for override in ("data.bos=auto", "data.bos=no"):
        generated(trained, override)
    assert prompts == [(256, *b"the q"), (*b"the q",)]


def test_another_sequence_length_is_of_no_matter(trained: RunFile) -> None:
    assert generated(trained, "data.sequence=64") == generated(trained)


def test_no_checkpoint(tmp_path: Path) -> None:
    result = call("generate", str(tmp_path), "--prompt", "a")
    assert result.status == 2
    assert result.error.startswith(f"{tmp_path}: neither a checkpoint nor a run directory")


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
    printed = lines("--prompts", str(file), "inference.sequences=2")
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


OWN: list[dict[str, Any]] = [
    {"tokens": 3},
    {"temperature": 1.5, "seed": 7},
    {"temperature": 1.5, "top_k": 2, "min_p": 0.01},
    {"temperature": 2.0, "top_p": 0.5, "samples": 3},
    {"temperature": 0},
    {"stop": "o"},
    {"stop": ["ump", "ick"], "logprobs": 2},
    {"prompt_logprobs": 1, "logprobs": None},
    {"logit_bias": {"113": 50, "32": -100}},
    {"repetition_penalty": 3.0, "presence_penalty": 1, "frequency_penalty": -1.5},
    {"schema": {"type": "integer"}, "tokens": 6},
]


def test_settings_of_a_prompt_are_those_of_the_call(trained: RunFile) -> None:
    """Beside any others, which other prompts have."""
    common: dict[str, Any] = {"tokens": 5, "temperature": 0.8, "top_p": 0.9, "logprobs": 0}
    with Generator(trained.directory) as generator:
        others = generator.generate(["jumps"], **common)
        for own in OWN:
            kept = {
                name: value
                for name, value in common.items()
                if (own.get("temperature"), name) != (0, "top_p")
            }
            expected = generator.generate("the q", **{**kept, **own})
            mixed = generator.generate([{"prompt": "the q", "id": 1, **own}, "jumps"], **common)
            for text, wanted in zip(mixed, [*expected, *others], strict=True):
                assert (text.tokens, text.text, text.ended) == (wanted.tokens, wanted.text, wanted.ended), own
                assert values(text) == pytest.approx(values(wanted), rel=1e-9), own


def values(text: Continuation) -> list[float]:
    """All log-probabilities of a text; the length tells whether they were asked for."""
    scores = [*(text.logprobs or ()), *(text.prompt_logprobs or ())]
    return [value for one in scores for value in (one.value, *(likely for _, likely in one.top))]


def test_settings_of_lines(trained: RunFile, tmp_path: Path) -> None:
    """Printed, and written to a file, which is complete after another start."""
    lines = [
        {"prompt": "the q", "tokens": 2},
        {"prompt": "fox", "samples": 2, "temperature": 1},
        {"prompt": "l"},
    ]
    file, output = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    options = ("generate", str(trained.directory), "--prompts", str(file), "--tokens", "4")
    printed = [json.loads(line) for line in call(*options).out.splitlines()]
    assert [len(row["tokens"]) for row in printed] == [2, 4, 4, 4]
    assert [row.get("sample") for row in printed] == [None, 0, 1, None]
    for _ in range(2):
        assert call(*options, "--output", str(output)).status == 0
        written = [json.loads(line) for line in output.read_text().splitlines()]
        assert sorted(row["text"] for row in written) == sorted(row["text"] for row in printed)


@pytest.mark.parametrize(
    ("own", "message"),
    [
        ({"tokens": "x"}, "tokens: found 'x', expected an integer of at least 1"),
        ({"tokens": 0}, "tokens: found 0"),
        ({"tokens": [1, 2]}, "tokens: found [1, 2], expected an integer"),  # a line of an output
        ({"temperature": -1}, "temperature: found -1, expected a number from 0"),
        ({"temperature": None}, "temperature: found None"),
        ({"top_k": 5}, "top_k: found 5 with temperature 0"),
        ({"samples": 2}, "samples: found 2 with temperature 0, where all are the same"),
        ({"seed": 1.5}, "seed: found 1.5"),
        ({"stop": 5}, "stop: found 5, expected a text or a list of texts"),
        ({"stop": [""]}, "stop: found an empty text"),
        ({"logprobs": 21}, "logprobs: found 21, expected 0 to 20"),
        ({"logit_bias": [1]}, "logit_bias: found [1], expected numbers by token id"),
        ({"logit_bias": {"a": 1}}, "logit_bias: found a: 1, expected ids"),
        ({"logit_bias": {"1": "a"}}, "logit_bias: found 1: a, expected ids"),
        ({"logit_bias": {"999": 1}}, "--logit-bias: found token 999, but the model's vocabulary is 257"),
        ({"schema": 5}, "schema: is not a JSON schema"),
    ],
)
def test_wrong_settings_of_lines_are_named(
    own: dict[str, Any], message: str, trained: RunFile, tmp_path: Path
) -> None:
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"prompt": "a", **own}))
    result = call("generate", str(trained.directory), "--prompts", str(tmp_path / "prompts.jsonl"))
    where = "" if message.startswith("--") else "prompt 1: "
    assert result.status == 2 and result.error.startswith(f"{where}{message}"), result.error


def test_a_file_without_prompts_is_named(trained: RunFile, tmp_path: Path) -> None:
    (tmp_path / "prompts.jsonl").write_text("\n\n")
    result = call("generate", str(trained.directory), "--prompts", str(tmp_path / "prompts.jsonl"))
    assert result.status == 2
    assert result.error == f"--prompts: {tmp_path / 'prompts.jsonl'}: found no lines with prompts"


def test_a_closed_generator_says_so(trained: RunFile) -> None:
    with Generator(trained.directory) as generator:
        for sequences in (None, [None], "abc", [[1.5]], [5]):
            with pytest.raises(HexadError, match=r"^(sequences: found|prompt 1: found)"):
                generator.score(sequences)  # type: ignore[arg-type]
        for prompts in ([None], [5], 5, {}, [{"prompt": [1.5]}], [[1]], b"a"):
            with pytest.raises(HexadError, match=r"^prompt"):
                generator.generate(prompts)  # type: ignore[arg-type]
        with pytest.raises(HexadError, match=r"^top_k: found 3 with temperature 0"):
            generator.generate("a", top_k=3)
        assert len(generator.generate("a", tokens=2)) == 1  # it still works
    generator.close()
    for action in (lambda: generator.generate("a"), lambda: generator.score([[1]])):
        with pytest.raises(HexadError, match=r"^Generator: it is closed; make another generator"):
            action()


def test_conversations_are_rendered_by_the_tokenizers_template(trained: RunFile, tmp_path: Path) -> None:
    (tmp_path / "prompts.jsonl").write_text('{"messages": [{"role": "user", "content": "the q"}]}\n')
    error = call("generate", str(trained.directory), "--prompts", str(tmp_path / "prompts.jsonl")).error
    assert error.startswith("data.tokenizer: byte has no chat template for the messages of prompt 1")


def test_prompts_beyond_the_models_length_are_reported(trained: RunFile) -> None:
    result = call("generate", str(trained.directory), "--prompt", "the q", "--tokens", "13")
    assert "warning: prompt and new tokens reach 17 positions, the model was made for 16" in result.err
    assert not call("generate", str(trained.directory), "--prompt", "the q", "--tokens", "12").err


def test_an_answer_ends_where_the_template_ends_it(tmp_path: Path) -> None:
    """The token that closes a turn is not the end of a document, and no text of its own."""
    run_file = chatty_run(tmp_path)
    (tmp_path / "ask.jsonl").write_text('{"messages": [{"role": "user", "content": "what?"}]}\n')

    def written(*options: str) -> dict[str, object]:
        result = call("generate", str(run_file.directory), "--tokens", "24", *options)
        assert result.status == 0, result.err
        return json.loads(result.out)

    asked = written("--prompts", str(tmp_path / "ask.jsonl"))
    assert (asked["text"], asked["ended"]) == ("fox", "document")
    plain = "<|im_start|>user\nwhat?<|im_end|>\n<|im_start|>assistant\n"
    stopped = written("--prompt", plain, "--stop", "<|im_end|>", "--json")
    assert (stopped["text"], stopped["ended"]) == ("fox", "document")  # which it ends anyway
    assert written("--prompt", plain, "--json")["tokens"] == stopped["tokens"]  # its data are conversations
    ends = {"eos_token_id": [stopped["tokens"][0]]}
    (run_file.newest / "tokenizer" / "generation_config.json").write_text(json.dumps(ends))
    assert written("--prompt", plain, "--json")["tokens"] == stopped["tokens"][:1]


def test_an_exported_chat_model_stops_where_ours_does(tmp_path: Path) -> None:
    """transformers ends at the same tokens: those of ``generation_config.json``."""
    import transformers

    run_file = chatty_run(tmp_path)
    convert("export", run_file.directory, tmp_path / "hf")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    ends = json.loads((tmp_path / "hf" / "generation_config.json").read_text())["eos_token_id"]
    assert ends == [tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<|im_end|>")]
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    text = "<|im_start|>user\nwhat?<|im_end|>\n<|im_start|>assistant\n"
    prompt = tokenizer(text, return_tensors="pt")
    theirs = model.generate(**prompt, do_sample=False, max_new_tokens=24)[
        0, prompt.input_ids.shape[1] :
    ].tolist()
    assert tokenizer.decode(theirs) == "fox<|im_end|>"
    for source in (str(run_file.directory), f"hf:{tmp_path / 'hf'}"):
        result = call(
            "generate", source, "--prompt", text, "--tokens", "24", "--json", "precision.dtype=fp64"
        )
        assert result.status == 0, result.err
        assert json.loads(result.out)["tokens"] == theirs


def test_lines_of_prompts_end_at_line_feeds_only(trained: RunFile, tmp_path: Path) -> None:
    (tmp_path / "odd.jsonl").write_text(json.dumps({"prompt": "a\u2028b\u0085c"}, ensure_ascii=False))
    result = call(
        "generate", str(trained.directory), "--prompts", str(tmp_path / "odd.jsonl"), "--tokens", "2"
    )
    assert result.status == 0 and json.loads(result.out)["prompt"] == "a\u2028b\u0085c"
    (tmp_path / "half.jsonl").write_text('{"prompt": "a\\ud800"}')
    error = call("generate", str(trained.directory), "--prompts", str(tmp_path / "half.jsonl")).error
    assert error.startswith("--prompt: prompt 1 is not Unicode text")


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def prompts_in(path: Path, count: int) -> Path:
    path.write_text(
        "".join(json.dumps({"prompt": "the quick brown"[: n % 15 + 1], "id": n}) + "\n" for n in range(count))
    )
    return path


def test_a_file_of_texts_is_continued_where_it_ended(trained: RunFile, tmp_path: Path) -> None:
    """Each text is written once, whatever was written of a last line; those of others are refused."""
    prompts, output = prompts_in(tmp_path / "in.jsonl", 20), tmp_path / "out.jsonl"
    options = ["--prompts", str(prompts), "--output", str(output), "--tokens", "6", "--samples", "2"]
    options += ["--temperature", "1"]

    def write(*more: str) -> str:
        result = call("generate", str(trained.directory), *options, *more)
        assert result.status == 0, result.err
        return result.err

    assert "40 texts, " in write()
    whole = rows_of(output)
    assert sorted((row["id"], row["sample"]) for row in whole) == [
        (n, s) for n in range(20) for s in range(2)
    ]
    printed = call("generate", str(trained.directory), *options[:2], *options[4:]).out.splitlines()
    same = [{key: row[key] for key in row if key != "request"} for row in whole]
    assert sorted(map(json.dumps, map(json.loads, printed))) == sorted(map(json.dumps, same))
    lines = output.read_bytes().splitlines(keepends=True)
    output.write_bytes(b"".join(lines[:17]) + lines[17][:30])
    assert "23 texts (17 were there), " in write("inference.sequences=3")
    assert sorted(map(json.dumps, rows_of(output))) == sorted(map(json.dumps, whole))
    assert "0 texts (40 were there), " in write()
    other = call("generate", str(trained.directory), *options, "--seed", "5")
    assert other.error.startswith(
        f"--output: {output}: 40 of its 40 texts belong to other prompts or settings"
    )
    (tmp_path / "notes.txt").write_text("mine\n")
    options[3] = str(tmp_path / "notes.txt")
    error = call("generate", str(trained.directory), *options).error
    assert "notes.txt:1: not a line that 'hexad generate' has written" in error
    assert (tmp_path / "notes.txt").read_text() == "mine\n"
    (tmp_path / "notes.txt").write_text('{"model": "x"}')  # a file without a line's end
    assert "not a line that" in call("generate", str(trained.directory), *options).error
    assert (tmp_path / "notes.txt").read_text() == '{"model": "x"}'


def test_log_probabilities_are_written(trained: RunFile, tmp_path: Path) -> None:
    result = json.loads(generated(trained, "--json", "--logprobs", "--prompt-logprobs"))["results"][0]
    assert len(result["logprobs"]) == len(result["tokens"]) and len(result["prompt_logprobs"]) == 4
    # What was written, given as a prompt, has the same ones.
    (tmp_path / "ids.jsonl").write_text(json.dumps({"prompt": [*b"the q", *result["tokens"]]}))
    again = call(
        "generate", str(trained.directory), "--prompts", str(tmp_path / "ids.jsonl"), "--tokens", "1",
        "--prompt-logprobs", "--top-logprobs", "2",
    )  # fmt: skip
    row = json.loads(again.out)
    values = [entry["value"] for entry in row["prompt_logprobs"]]
    assert values == pytest.approx(result["prompt_logprobs"] + result["logprobs"], abs=1e-4)
    assert all(entry["top"][0][1] >= entry["top"][1][1] for entry in row["prompt_logprobs"])
    assert "logprobs" not in row


def test_texts_conform_to_a_schema(trained: RunFile, tmp_path: Path) -> None:
    pytest.importorskip("llguidance")
    properties = {"name": {"enum": ["fox", "dog"]}, "legs": {"type": "integer", "minimum": 2, "maximum": 4}}
    schema = {"type": "object", "properties": properties, "required": ["name", "legs"]}
    (tmp_path / "schema.json").write_text(json.dumps({**schema, "additionalProperties": False}))
    options = ["--schema", str(tmp_path / "schema.json"), "--tokens", "60", "--temperature", "1.5", "--json"]
    for seed in range(3):
        result = json.loads(generated(trained, *options, "--seed", str(seed)))
        value = json.loads(result["text"])
        assert value["name"] in ("fox", "dog") and 2 <= value["legs"] <= 4 and result["ended"] == "document"
    (tmp_path / "schema.json").write_text('{"type": "objekt"}')
    wrong = call("generate", str(trained.directory), "--prompt", "a", *options)
    assert wrong.error.startswith("--schema: found one that cannot be used: ")
    (tmp_path / "schema.json").write_text("{")
    wrong = call("generate", str(trained.directory), "--prompt", "a", *options)
    assert wrong.error.startswith("--schema: is not a JSON schema: ")


@pytest.mark.parametrize(
    ("options", "start"),
    [
        (["--logit-bias", "a=1"], "--logit-bias: found 'a=1', expected ID=NUMBER"),
        (["--logit-bias", "257=1"], "--logit-bias: found token 257, but the model's vocabulary is 257"),
        (["--min-p", "2", "--temperature", "1"], "--min-p: found 2.0"),
        (["--output", "x.jsonl", "--json"], "--output: found --json beside it"),
        (
            ["inference.cache_tokens=16", "--tokens", "64"],
            "--tokens: 1 prompt tokens and 64 new ones exceed the",
        ),
        (["inference.memory_part=2"], "inference.memory_part: found 2"),
        (["--schema", "/none"], "--schema: /none: cannot be read"),
        (["--top-logprobs", "2"], "--top-logprobs: found 2 without --logprobs or --prompt-logprobs"),
        (["--stop", "x" * 1025], "--stop: found 1 texts, expected at most 64 texts of 1024 characters"),
    ],
)
def test_more_errors(trained: RunFile, options: list[str], start: str) -> None:
    result = call("generate", str(trained.directory), "--prompt", "a", *options)
    assert result.status == 2 and result.error.startswith(start)
