"""Models whose logits are not finite: one error of every command, and JSON that is JSON."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
import torch
from safetensors.torch import load_file, save_file

import hexad
from hexad.config import HexadError, json_text
from hexad.engine.evaluation import Score
from hexad.generation.generator import Generator
from hexad.generation.server.app import Access, make_app
from hexad.generation.server.metrics import ServerMetrics
from hexad.generation.server.service import Service

from ..checkpoint.test_hugging_face import convert
from ..training.command import RunFile, call

VALUES = [float("nan"), float("inf"), -float("inf")]
MESSAGE = "the model's logits are not finite"


@pytest.fixture(scope="module")
def broken(trained: RunFile, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model for which texts with "z", "y" or "x" have no logits, by one of :data:`VALUES` each."""
    directory = tmp_path_factory.mktemp("broken") / "hf"
    convert("export", trained.directory, directory)
    weights = {name: values.float() for name, values in load_file(directory / "model.safetensors").items()}
    for letter, value in zip(b"zyx", VALUES):
        weights["model.embed_tokens.weight"][letter, 3] = value
    assert "lm_head.weight" in weights  # else all texts have none
    save_file(weights, directory / "model.safetensors", {"format": "pt"})
    return directory


OPTIONS = ("--tokens", "3", "precision.dtype=fp32")


@pytest.mark.parametrize("letter", "zyx")
@pytest.mark.parametrize(
    "options",
    [(), ("--json",), ("--temperature", "1"), ("--logprobs", "--json"), ("--prompt-logprobs",), ("--exact",)],
)
def test_generate_reports_one_error(letter: str, options: tuple[str, ...], broken: Path) -> None:
    result = call("generate", f"hf:{broken}", "--prompt", f"the q{letter}", *OPTIONS, *options)
    assert (result.status, result.out) == (2, "")
    assert result.error.startswith(f"prompt 1: after 6 tokens {MESSAGE} (NaN or infinite); check its weights")


def test_texts_before_are_kept(broken: Path, tmp_path: Path) -> None:
    """And those that are not of such tokens are written."""
    prompts, output = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
    prompts.write_text("".join(f"{json.dumps({'prompt': text})}\n" for text in ["the q", "jumps", "a zebra"]))
    files = ("--prompts", str(prompts), "--output", str(output))
    result = call("generate", f"hf:{broken}", *files, *OPTIONS, "inference.sequences=1")
    assert result.status == 2 and result.error.startswith(f"prompt 3: after 7 tokens {MESSAGE}")
    assert [json.loads(line)["prompt"] for line in output.read_text().splitlines()] == ["the q", "jumps"]


def test_scores_and_losses_are_refused(broken: Path, trained: RunFile, tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text('{"tokens": [116, 104, 101]}\n{"tokens": [116, 122, 101]}\n')
    files = ("--input", str(tmp_path / "in.jsonl"), "--output", str(tmp_path / "out.jsonl"))
    result = call("score", f"hf:{broken}", *files, "precision.dtype=fp32")
    assert result.status == 2 and result.error.startswith(f"sequence 2: {MESSAGE}")
    assert not (tmp_path / "out.jsonl").exists()
    data = ("--data", str(trained.path.parent / "data"), "--batches", "1")
    result = call("evaluate", f"hf:{broken}", *data, "data.sequence=16", "precision.dtype=fp32", "--json")
    assert (result.status, result.out) == (2, "")
    assert result.error.startswith("--data: data: found the loss nan: the model's logits are not finite")
    with pytest.raises(HexadError, match=f"sequence 1: {MESSAGE}"):
        hexad.score(f"hf:{broken}", [[116, 122, 101]], overrides=["precision.dtype=fp32"])


def test_a_generator_goes_on(broken: Path) -> None:
    with Generator(f"hf:{broken}", ["precision.dtype=fp32"]) as generator:
        before = generator.generate("the q", tokens=3)
        with pytest.raises(HexadError, match=f"prompt 2: after 1 token {MESSAGE}"):
            generator.generate(["the q", "z"], tokens=3)
        assert generator.generate("the q", tokens=3) == before


@pytest.fixture
def answers(broken: Path) -> Iterator[Any]:
    """Answers of a server in this process to requests at once."""
    with Generator(f"hf:{broken}", ["precision.dtype=fp32"]) as generator:

        async def asked(bodies: list[dict[str, Any]]) -> list[httpx.Response]:
            service = Service(generator, ServerMetrics(), 8)
            transport = httpx.ASGITransport(make_app(service, "m", positions=16, access=Access()))
            service.start()
            async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
                posts = (client.post("/v1/completions", json={"model": "m", **body}) for body in bodies)
                responses = await asyncio.gather(*posts)
            service.stop()
            await asyncio.to_thread(service.join)
            return responses

        yield lambda bodies: asyncio.run(asked(bodies))


def test_the_server_answers_such_requests_with_an_error(answers: Any) -> None:
    """Others get their texts; a stream ends with the error."""
    common = {"max_tokens": 3, "temperature": 0, "logprobs": 1}
    prompts = ["the q", "the z", "jumps", "y"]
    bodies = [{"prompt": prompt, **common, "stream": prompt == "y"} for prompt in prompts]
    good, bad, fine, stream = answers([*bodies, {"prompt": ["the q", "the x"], **common}])[:4]
    assert good.status_code == fine.status_code == 200 and len(good.json()["choices"][0]["text"]) > 0
    assert bad.status_code == stream.status_code == 500
    for answer in (bad, stream):
        error = answer.json()["error"]
        assert error["type"] == "server_error" and error["message"].startswith(f"request: {MESSAGE}")


def test_numbers_of_json() -> None:
    tree = {"a": [1.5, float("nan"), (float("inf"), {"b": -float("inf")})], "c": "NaN", "d": None}
    assert json.loads(json_text(tree)) == {"a": [1.5, None, [None, {"b": None}]], "c": "NaN", "d": None}


def test_perplexity() -> None:
    assert Score(800.0, 1).perplexity == float("inf")
    assert Score(2.0, 2).perplexity == pytest.approx(2.718281828)
    undefined = Score(float("nan"), 1).perplexity
    assert torch.tensor(undefined).isnan()
