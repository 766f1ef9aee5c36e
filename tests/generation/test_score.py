"""``hexad score``, and ``--exact``: what generation has written is scored to the same bytes."""

import json
from pathlib import Path
from unittest import mock

import pytest
import torch

import hexad
from hexad.dataset.load.microbatch import Microbatch
from hexad.engine.losses import Outputs
from hexad.generation.generator import Generator
from hexad.generation.sampler import log_probabilities
from hexad.topology.mesh import Axis

from ..training.command import Process, RunFile, call, write_run
from .test_update import engine_of


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory, trained: RunFile) -> RunFile:
    """A run like ``trained``, in float32."""
    prefix = str(trained.path.parent / "data")
    directory = tmp_path_factory.mktemp("score")
    run_file = write_run(
        directory, prefix, run={"steps": 3}, precision={"dtype": "fp32"}, model={"layers": 2}
    )
    assert run_file.train().status == 0
    return run_file


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize(
    ("dtype", "layout"),
    [("fp32", ()), ("bf16", ("--nproc", "2", "parallel.tensor=2", "parallel.sequence=true"))],
    ids=str,
)
def test_the_training_forward_pass_gives_the_same_bytes(
    dtype: str, layout: tuple[str, ...], single: RunFile, tmp_path: Path
) -> None:
    prompts = [{"prompt": "the q"}, {"prompt": [116, 104]}, {"prompt": "jumps over the lazy"}]
    (tmp_path / "in.jsonl").write_text("".join(f"{json.dumps(prompt)}\n" for prompt in prompts))
    options = ["--prompts", str(tmp_path / "in.jsonl"), "--tokens", "9", "--temperature", "1", "--exact"]
    options += ["--output", str(tmp_path / "written.jsonl"), "--logprobs", "--prompt-logprobs"]
    result = call("generate", str(single.directory), *options, f"precision.dtype={dtype}")
    assert result.status == 0, result.err
    files = ["--input", str(tmp_path / "written.jsonl"), "--output", str(tmp_path / "scored.jsonl")]
    command = ["score", str(single.directory), *files, "--exact", f"precision.dtype={dtype}", *layout]
    result = Process.hexad(command, tmp_path).wait() if layout else call(*command)
    assert result.status == 0, result.err
    assert "scored.jsonl: 3 sequences" in result.err
    assert (tmp_path / "scored.jsonl").read_bytes() == (tmp_path / "written.jsonl").read_bytes()
    assert not list(tmp_path.glob("*.partial"))


def test_sequences_of_tokens(single: RunFile, tmp_path: Path) -> None:
    """With other keys, and longer than what is computed at a time."""
    rows = [{"tokens": [5], "name": "é"}, {"tokens": [*range(40)]}, {"tokens": [7, 8, 9]}]
    (tmp_path / "in.jsonl").write_text("".join(f"{json.dumps(row)}\n\n" for row in rows))
    files = ["--input", str(tmp_path / "in.jsonl"), "--output", str(tmp_path / "out.jsonl")]
    assert call("score", str(single.directory), *files).status == 0
    made = lines(tmp_path / "out.jsonl")
    assert [{key: row[key] for key in row if key != "logprobs"} for row in made] == rows
    scores = [row["logprobs"] for row in made]
    assert [len(values) for values in scores] == [0, 39, 2]  # type: ignore[arg-type]
    assert scores == hexad.score(single.directory, [row["tokens"] for row in rows])  # type: ignore[misc]
    with Generator(single.directory) as generator:
        texts = generator.score([rows[1]["tokens"]])  # type: ignore[list-item]
    values = [logprob.value for logprob in texts[0].prompt_logprobs or ()]
    assert scores[1] == pytest.approx(values, rel=1e-5)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "in.jsonl:2: not JSON"),
        ("[]", 'expected an object with "tokens", a list of ids'),
        ('{"tokens": "abc"}', 'expected an object with "tokens"'),
        ('{"tokens": []}', "found [], expected a list of ids, at least one"),
        ('{"tokens": [1, "2"]}', "expected a list of ids"),
        ('{"tokens": [1, true]}', "expected a list of ids"),
        ('{"tokens": [1, 257]}', "found the id 257, expected 0 to 256"),
        ('{"tokens": [1], "prompt": [-1]}', "found token id -1"),
        ('{"tokens": [1], "prompt": 5}', "expected an object with"),
    ],
)
def test_a_line_that_cannot_be_scored(line: str, message: str, single: RunFile, tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text(f'{{"tokens": [1]}}\n{line}\n')
    files = ["--input", str(tmp_path / "in.jsonl"), "--output", str(tmp_path / "out.jsonl")]
    result = call("score", str(single.directory), *files)
    assert result.status and message in result.err and result.err.count("\n") == 1
    assert not (tmp_path / "out.jsonl").exists()


def test_files_that_cannot_be_used(single: RunFile, tmp_path: Path) -> None:
    file = tmp_path / "in.jsonl"
    file.write_text('{"tokens": [1, 2]}\n')
    partial = tmp_path / "x.partial"
    partial.write_text('{"tokens": [1, 2]}\n')
    run = str(single.directory)
    for options, message in (
        (["--input", str(tmp_path / "none"), "--output", str(tmp_path / "out")], "cannot be read"),
        (["--input", str(file), "--output", str(file)], "which would overwrite the input"),
        (["--input", str(tmp_path), "--output", str(tmp_path / "out")], "is no regular file"),
        (["--input", "/dev/null", "--output", str(tmp_path / "out")], "is no regular file"),
        (["--input", str(file), "--output", "/dev/null"], "is no regular file"),
        (["--input", str(partial), "--output", str(tmp_path / "x")], "which would overwrite the input"),
        (["--input", str(file), "--output", str(tmp_path / "a" / "b")], "no such directory"),
        (["--input", str(file), "--output", str(tmp_path)], "is no regular file"),
    ):
        result = call("score", run, *options)
        assert result.status and message in result.err, result.err
    result = call(
        "score", run, "--input", str(file), "--output", str(tmp_path / "o"), "precision.dtype=fp64", "--exact"
    )
    assert result.status and "precision.exact: found true with precision.dtype fp64" in result.err
    file.write_text("")
    assert call("score", run, "--input", str(file), "--output", str(tmp_path / "o")).status == 0
    assert (tmp_path / "o").read_text() == ""


def test_sequences_beyond_the_models_length_are_reported(single: RunFile, tmp_path: Path) -> None:
    for length, reported in ((17, False), (18, True)):  # the model was made for 16 tokens, and predicts one
        (tmp_path / "in.jsonl").write_text(json.dumps({"tokens": [1] * length}))
        files = ["--input", str(tmp_path / "in.jsonl"), "--output", str(tmp_path / "out.jsonl")]
        result = call("score", str(single.directory), *files)
        warning = "warning: a sequence reaches 17 positions, the model was made for 16 (model.max_positions)"
        assert result.status == 0 and (warning in result.err) == reported


def test_sequences_in_one_microbatch() -> None:
    made = Microbatch.of_sequences([[1, 2, 3], [4], [5, 6]], 4, [2, 1, 1], {"weight": [[0.5], [], [2.0]]})
    assert made.tokens.tolist() == [[1, 2, 5, 0]]
    assert made.labels.tolist() == [[-100, 3, 6, -100]]
    assert made.documents == (0, 2, 3, 4)
    assert made.extras["weight"].tolist() == [[0.0, 0.5, 2.0, 0.0]]
    assert Microbatch.of_sequences([[4]], 3).tokens.tolist() == [[0, 0, 0]]


@pytest.mark.parametrize(
    ("given", "weights", "message"),
    [
        ([1], [[0.1, 0.2], [0.3]], "given: found 1 values for 2 sequences"),
        ([0, 1], [[0.1, 0.2], [0.3]], "sequence 1: found 0 of 3 ids given"),
        ([1, 3], [[0.1, 0.2], [0.3]], "sequence 2: found 3 of 2 ids given"),
        ([1, 1], [[0.1], [0.2, 0.3]], "weight of sequence 1: found 1 values for 2 predicted tokens"),
        ([1, 1], [[0.1, 0.2]], "weight: found 1 values for 2 sequences"),
    ],
)
def test_values_that_do_not_fit_their_sequences(
    given: list[int], weights: list[list[float]], message: str
) -> None:
    with pytest.raises(hexad.HexadError, match=message):
        Microbatch.of_sequences([[1, 2, 3], [5, 6]], 1, given, {"weight": weights})


def test_a_certain_token_has_the_same_bytes() -> None:
    """0.0 in both, not -0.0."""
    logits = torch.tensor([[60.0, 0.0, 1.0, 2.0]])
    (sampled,) = log_probabilities(logits, torch.tensor([0]), [None], exactly=True)
    outputs = mock.Mock(**{"_mesh.tensor": Axis("tensor"), "_stage.vocab": 4, "_stage.shard.exact": True})
    outputs.local_logits.return_value = logits
    (trained,) = Outputs.log_probabilities(outputs, torch.tensor([0])).tolist()
    assert json.dumps([sampled.value, trained]) == "[0.0, 0.0]"


def test_calls_with_something_else(single: RunFile) -> None:
    for wrong in ([5, 6], [[1], []], [torch.tensor([1, 2])], ["ab"]):
        with pytest.raises(hexad.HexadError, match=r"sequence \d: found .*, expected a list of ids"):
            hexad.score(single.directory, wrong)  # type: ignore[arg-type]


def test_frequencies_that_change_within_a_text() -> None:
    scaling = {
        "type": "longrope",
        "original_positions": 11,
        "short_factors": [1, 1.2, 1.4],
        "long_factors": [1.5, 2, 4],
    }
    engine = engine_of("llama", {}, "fp32", [], rope_scaling=scaling)
    with Generator(engine) as generator:
        generator.generate([{"prompt": [1, 2]}], tokens=10)
        with pytest.raises(
            hexad.HexadError, match=r"precision\.exact: 2 prompt tokens and 11 new ones exceed 11"
        ):
            generator.generate([{"prompt": [1, 2]}], tokens=11)
