"""``hexad serve``: OpenAI's own client, wrong requests, clients that leave, a full queue, lost ranks."""

import asyncio
import json
import os
import re
import signal
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import httpx2 as httpx
import openai
import pydantic
import pytest

from ..training.command import LONGEST, LOOPBACK, Process, RunFile, call, listening, wait_until_gone
from .tool_models import TEMPLATES, tool_model

KEY = "s3cret"


class Server:
    """A running server."""

    def __init__(
        self, source: RunFile | str, where: Path, *options: str, interpreter: bool = False, **environment: str
    ) -> None:
        source = source if isinstance(source, str) else str(source.directory)
        arguments = ["serve", source, "--port", "0", "--name", "tiny", *options]
        self._where = where
        self.process = Process.hexad(arguments, where, interpreter, **environment)
        self.address = self._announced()

    def _announced(self) -> str:
        end = time.monotonic() + LONGEST
        while not (match := re.search(r"serving tiny at (http://\S+)", self.errors)):
            assert self.process.popen.poll() is None, self.errors
            assert time.monotonic() < end, self.errors
            time.sleep(0.05)
        return match[1]

    @property
    def errors(self) -> str:
        """What it has written to stderr."""
        return (self._where / "stderr").read_text()

    def client(self, key: str = KEY, **options: Any) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.address}/v1", api_key=key, max_retries=0, **options)

    def post(self, path: str, body: Any = None, **options: Any) -> httpx.Response:
        headers = {"Authorization": f"Bearer {KEY}", **options.pop("headers", {})}
        content = options.pop("content", None) or json.dumps(body)
        headers.setdefault("Content-Type", "application/json")
        return httpx.post(
            f"{self.address}{path}", content=content, headers=headers, timeout=LONGEST, **options
        )

    def metric(self, name: str) -> float:
        text = httpx.get(f"{self.address}/metrics").text
        match = re.search(rf"^{name} (\S+)$", text, re.MULTILINE)
        assert match, text
        return float(match[1])

    def stop(self, number: int = signal.SIGTERM) -> Any:
        self.process.popen.send_signal(number)
        return self.process.wait()


@pytest.fixture(scope="module")
def server(chatty: RunFile, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One rank, with a key, and few sequences at once."""
    where = tmp_path_factory.mktemp("server")
    options = ["inference.sequences=3", "--strict"]
    server = Server(chatty, where, *options, interpreter=True, HEXAD_API_KEY=f"other {KEY}")
    yield server
    if server.process.popen.poll() is None:
        result = server.stop()
        assert (result.status, "Traceback" in result.err) == (0, False), result.err


def texts_of(run_file: RunFile, *options: str) -> list[dict[str, Any]]:
    result = call("generate", str(run_file.directory), "--json", *options)
    assert result.status == 0, result.err
    return json.loads(result.out)["results"]


def test_completions_are_those_of_the_command(server: Server, chatty: RunFile) -> None:
    client = server.client()
    expected = texts_of(chatty, "--prompt", "what", "--tokens", "9", "--logprobs", "--top-logprobs", "2")[0]
    answer = client.completions.create(model="tiny", prompt="what", max_tokens=9, temperature=0, logprobs=2)
    (choice,) = answer.choices
    assert choice.text == expected["text"] and choice.finish_reason in ("length", "stop")
    values = [entry["value"] for entry in expected["logprobs"]]
    assert choice.logprobs.token_logprobs == pytest.approx(values, abs=1e-4)
    assert [len(top) for top in choice.logprobs.top_logprobs] == [2] * len(values)
    assert answer.usage.prompt_tokens == len("what") or answer.usage.prompt_tokens > 0
    assert answer.usage.completion_tokens == len(expected["tokens"])
    sampled = texts_of(
        chatty, "--prompt", "what", "--tokens", "9", "--temperature", "1.5", "--seed", "4", "--samples", "2"
    )
    options = {"max_tokens": 9, "temperature": 1.5, "seed": 4, "n": 2}
    answer = client.completions.create(model="tiny", prompt=["what", "is"], **options)
    assert [choice.text for choice in answer.choices[:2]] == [entry["text"] for entry in sampled]
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    ids = client.completions.create(model="tiny", prompt=[[5, 6], [7]], max_tokens=2, temperature=0)
    assert len(ids.choices) == 2
    same = client.completions.create(model="tiny", prompt="what", max_tokens=4, temperature=0, n=3)
    assert len({choice.text for choice in same.choices}) == 1 and len(same.choices) == 3
    scored = client.completions.create(model="tiny", prompt="what", max_tokens=0, echo=True, logprobs=0)
    logprobs = scored.choices[0].logprobs
    assert scored.choices[0].text == "what" and logprobs.token_logprobs[0] is None
    row = texts_of(chatty, "--prompt", "what", "--tokens", "1", "--prompt-logprobs")[0]
    assert logprobs.token_logprobs[1:] == pytest.approx(row["prompt_logprobs"], abs=1e-4)


def test_streams_bring_the_same_text(server: Server) -> None:
    client = server.client()
    options: dict[str, Any] = {"model": "tiny", "max_tokens": 12, "temperature": 1.2, "seed": 9, "n": 2}
    whole = client.completions.create(prompt="what", **options)
    parts = ["", ""]
    ended = [None, None]
    usage = None
    for event in client.completions.create(
        prompt="what", stream=True, stream_options={"include_usage": True}, **options
    ):
        for choice in event.choices:
            parts[choice.index] += choice.text
            ended[choice.index] = choice.finish_reason or ended[choice.index]
        usage = event.usage or usage
    assert parts == [choice.text for choice in whole.choices]
    assert ended == [choice.finish_reason for choice in whole.choices]
    assert usage.completion_tokens == whole.usage.completion_tokens


def test_conversations(server: Server) -> None:
    """By the template of the tokenizer; the answer ends where the template ends it."""
    client = server.client()
    messages: list[Any] = [{"role": "user", "content": "what?"}]
    options: dict[str, Any] = {"model": "tiny", "temperature": 0, "max_completion_tokens": 20}
    answer = client.chat.completions.create(messages=messages, logprobs=True, top_logprobs=3, **options)
    (choice,) = answer.choices
    assert (choice.message.content, choice.message.role, choice.finish_reason) == ("fox", "assistant", "stop")
    assert len(choice.logprobs.content) == answer.usage.completion_tokens
    assert [len(entry.top_logprobs) for entry in choice.logprobs.content] == [3] * len(
        choice.logprobs.content
    )
    parts = [{"type": "text", "text": "wh"}, {"type": "text", "text": "at?"}]
    again = client.chat.completions.create(messages=[{"role": "user", "content": parts}], **options)
    assert again.choices[0].message.content == "fox"
    stream = client.chat.completions.create(messages=messages, stream=True, **options)
    deltas = [event.choices[0] for event in stream]
    assert "".join(delta.delta.content or "" for delta in deltas) == "fox"
    assert deltas[0].delta.role == "assistant" and deltas[-1].finish_reason == "stop"
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}
    form = {
        "type": "json_schema",
        "json_schema": {"name": "x", "schema": {**schema, "additionalProperties": False}},
    }
    written = client.chat.completions.create(messages=messages, response_format=form, **options)
    assert json.loads(written.choices[0].message.content)["a"] in (1, 2)


def test_models_health_metrics_and_page(server: Server) -> None:
    models = server.client().models.list().data
    assert [model.id for model in models] == ["tiny"] and models[0].max_model_len == 48
    assert server.client().models.retrieve("tiny").id == "tiny"
    assert httpx.get(f"{server.address}/health").json() == {"status": "ok"}
    before = server.metric("hexad_generated_tokens_total")
    server.client().completions.create(model="tiny", prompt="a", max_tokens=3, temperature=0)
    assert server.metric("hexad_generated_tokens_total") > before
    page = httpx.get(server.address)
    assert page.status_code == 200 and "<title>Hexad</title>" in page.text
    assert 'src="http' not in page.text and 'href="http' not in page.text  # nothing of others is loaded


COMPLETION: dict[str, Any] = {"model": "tiny", "prompt": "a", "max_tokens": 2}
ENDLESS = {str(token): -100 for token in range(3)}
"""Biases with which no text ends before its last token: of special tokens."""
CHAT: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "a"}], "max_tokens": 2}
WRONG: list[tuple[str, dict[str, Any], str | None, str]] = [
    ("completions", {"prompt": None}, "prompt", "prompt"),
    ("completions", {"prompt": ""}, "prompt", "prompt: prompt 1: found no tokens"),
    ("completions", {"prompt": []}, "prompt", "prompt: found an empty list"),
    ("completions", {"prompt": [[]]}, "prompt", "found no tokens"),
    ("completions", {"prompt": [1.5]}, "prompt", "prompt"),
    ("completions", {"prompt": [10**6]}, "prompt", "prompt 1: found token id 1000000"),
    ("completions", {"prompt": [-1]}, "prompt", "prompt 1: found token id -1"),
    ("completions", {"prompt": {"a": 1}}, "prompt", "prompt"),
    ("completions", {"prompt": "\ud800"}, "prompt", "is not Unicode text"),
    ("completions", {"prompt": "a" * 100}, "prompt", "100 tokens of the prompt exceed the model's 48"),
    ("completions", {"model": "other"}, "model", "The model 'other' does not exist"),
    ("completions", {"model": "\udfff"}, "model", "The model '\\udfff' does not exist"),
    ("completions", {"\ud800": 1}, "\\ud800", "is not a field of this request"),
    ("completions", {"model": None}, "model", "model"),
    ("completions", {"model": 3}, "model", "model: found 3; "),
    ("completions", {"max_tokens": -1}, "max_tokens", "max_tokens: found -1"),
    ("completions", {"max_tokens": "9"}, "max_tokens", "max_tokens: found '9'"),
    ("completions", {"max_tokens": 1.5}, "max_tokens", "max_tokens: found 1.5"),
    ("completions", {"max_tokens": 10**9}, "max_tokens", "exceed the model's 48"),
    ("completions", {"max_tokens": True}, "max_tokens", "max_tokens: found True"),
    (
        "chat/completions",
        {"max_tokens": 3, "max_completion_tokens": 4},
        "max_tokens",
        "max_tokens: found 3 bes",
    ),
    ("completions", {"temperature": -1}, "temperature", "temperature: found -1"),
    ("completions", {"temperature": "hot"}, "temperature", "temperature"),
    ("completions", {"temperature": [1]}, "temperature", "temperature"),
    ("completions", {"top_p": 0}, "top_p", "top_p: found 0"),
    ("completions", {"top_p": 1.5}, "top_p", "top_p: found 1.5"),
    ("completions", {"top_k": -2}, "top_k", "top_k: found -2"),
    ("completions", {"min_p": 2}, "min_p", "min_p: found 2"),
    ("completions", {"presence_penalty": 3}, "presence_penalty", "presence_penalty: found 3"),
    ("completions", {"frequency_penalty": -3}, "frequency_penalty", "frequency_penalty: found -3"),
    ("completions", {"repetition_penalty": 0}, "repetition_penalty", "repetition_penalty: found 0"),
    ("completions", {"logit_bias": {"a": 1}}, "logit_bias", "expected numbers by token id"),
    ("completions", {"logit_bias": {"5": 101}}, "logit_bias", "logit_bias: found 5: 101"),
    ("completions", {"logit_bias": {"9999": 1}}, "logit_bias", "logit_bias: found token 9999"),
    ("completions", {"logit_bias": {"5": 10**400}}, "logit_bias", "expected numbers by token id"),
    ("completions", {"n": 100, "prompt": ["a"] * 100}, "n", "found 10,000 texts in one request"),
    ("completions", {"stream": True, "prompt_logprobs": 1}, "prompt_logprobs", "found with stream: true"),
    ("completions", {"stop": ["x"] * 65}, "stop", "stop: found 65 texts, expected at most 64"),
    ("completions", {"logit_bias": [1]}, "logit_bias", "logit_bias"),
    ("completions", {"n": 0}, "n", "n: found 0"),
    ("completions", {"n": 10**6}, "n", "n: found 1000000"),
    ("completions", {"n": 3, "best_of": 2}, "best_of", "best_of: found 2, expected at least n, 3"),
    ("completions", {"best_of": 3, "stream": True}, "best_of", "best_of: found with stream: true"),
    ("completions", {"seed": "x"}, "seed", "seed: found 'x'"),
    ("completions", {"stop": ""}, "stop", "stop: found an empty text"),
    ("completions", {"stop": [1]}, "stop", "stop"),
    ("completions", {"logprobs": 21}, "logprobs", "logprobs: found 21"),
    ("completions", {"logprobs": True}, "logprobs", "logprobs: found True"),
    ("completions", {"stream": "yes"}, "stream", "stream: found 'yes'"),
    (
        "completions",
        {"stream_options": {"include_usage": True}},
        "stream_options",
        "found without stream: true",
    ),
    ("completions", {"stream": True, "stream_options": {"x": 1}}, "stream_options.x", "stream_options.x"),
    ("completions", {"suffix": "b"}, "suffix", "suffix: is not supported"),
    ("completions", {"temprature": 1}, "temprature", "temprature: is not a field of this request"),
    ("chat/completions", {"messages": []}, "messages", "messages: found []"),
    ("chat/completions", {"messages": [3]}, "messages", "messages"),
    ("chat/completions", {"messages": [{"role": "user"}]}, "messages", "messages[0]: its content is null"),
    (
        "chat/completions",
        {"messages": [{"role": "judge", "content": "a"}]},
        "messages",
        "messages[0]: role 'judge' is unknown",
    ),
    (
        "chat/completions",
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        "messages",
        "no text",
    ),
    ("chat/completions", {"top_logprobs": 2}, "top_logprobs", "found without logprobs"),
    ("chat/completions", {"tools": [{}]}, "tools", "tools: found {}, expected {'type': 'function'"),
    ("chat/completions", {"response_format": {"type": "xml"}}, "response_format", "found type 'xml'"),
    (
        "chat/completions",
        {"response_format": {"type": "json_schema"}},
        "response_format",
        "json_schema.schema",
    ),
    (
        "chat/completions",
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "objekt"}}}},
        "response_format",
        "response_format: found one that cannot be used",
    ),
]


@pytest.mark.parametrize("answered", [False, True])
def test_a_body_that_is_no_http_ends_its_connection_only(server: Server, answered: bool) -> None:
    """A chunk without a length, which arrives before the request is answered, or after it was refused."""
    before = server.errors
    lines = ["POST /v1/completions HTTP/1.1", "Host: 127.0.0.1", f"Authorization: Bearer {KEY}"]
    head, chunk = "\r\n".join([*lines, "Transfer-Encoding: chunked", "", ""]).encode(), b"none\r\n"
    port = int(server.address.rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port), timeout=LONGEST) as connection:
        connection.sendall(head if answered else head + chunk)
        received = connection.recv(65536)
        with suppress(ConnectionError):  # it may have been closed
            connection.sendall(chunk)
            connection.recv(65536)
    assert received.startswith(b"HTTP/1.1 411" if answered else b"HTTP/1.1 400"), received
    assert server.post("/v1/completions", COMPLETION).status_code == 200
    said = server.errors.removeprefix(before)
    assert said in ("", "a client: Invalid HTTP request received.\n"), said


def test_wrong_requests_are_refused(server: Server) -> None:
    """In OpenAI's form, naming the field; the server continues."""
    for path, fields, param, text in WRONG:
        body = {**(CHAT if path.startswith("chat") else COMPLETION), **fields}
        answer = server.post(
            f"/v1/{path}", {name: value for name, value in body.items() if value is not None}
        )
        assert answer.status_code == (404 if isinstance(fields.get("model"), str) else 400), (
            fields,
            answer.text,
        )
        error = answer.json()["error"]
        assert text in error["message"] and "--" not in error["message"], (fields, error)
        assert error["type"] == "invalid_request_error" and error["param"] == param, (fields, error)
    for content in (b"", b"{", b"[1]", b"nope", b"\xff\xfe", b"[" * 10_000, b'{"model": NaN'):
        answer = server.post("/v1/completions", content=content)
        assert answer.status_code == 400 and answer.json()["error"]["message"], content
    parts = httpx.post(
        f"{server.address}/v1/completions", content=iter([b"{}"]), headers={"Authorization": f"Bearer {KEY}"}
    )
    assert parts.status_code == 411
    large = server.post("/v1/completions", content=b" " * (33 * 2**20))
    assert large.status_code == 413
    assert (
        httpx.get(f"{server.address}/v1/nothing", headers={"Authorization": f"Bearer {KEY}"}).status_code
        == 404
    )
    assert (
        httpx.get(f"{server.address}/v1/completions", headers={"Authorization": f"Bearer {KEY}"}).status_code
        == 405
    )
    with pytest.raises(openai.BadRequestError, match="temperature: found -1"):
        server.client().completions.create(model="tiny", prompt="a", temperature=-1)
    assert server.client().completions.create(**COMPLETION).choices
    assert "Traceback" not in server.errors


def test_keys(server: Server) -> None:
    assert server.client("other").models.list().data
    for key in ("wrong", KEY[:-1], KEY + "x", "é"):
        with pytest.raises((openai.AuthenticationError, UnicodeEncodeError)):
            server.client(key).models.list()
    for header in ({}, {"Authorization": KEY[1:]}, {"Authorization": "Basic x"}):
        answer = httpx.post(f"{server.address}/v1/completions", json=COMPLETION, headers=header)
        assert answer.status_code == 401 and answer.json()["error"]["code"] == "invalid_api_key"
    assert httpx.get(f"{server.address}/health").status_code == 200


def unfinished(server: Server, count: int = 0) -> None:
    """Wait until so many requests are left."""
    end = time.monotonic() + LONGEST
    while server.metric("hexad_requests_unfinished") > count:
        assert time.monotonic() < end
        time.sleep(0.05)


def test_a_client_that_leaves_ends_its_requests(server: Server) -> None:
    """In the middle of a stream, or while it waits for an answer."""
    body = {**COMPLETION, "max_tokens": 40, "n": 20, "logit_bias": ENDLESS}
    headers = {"Authorization": f"Bearer {KEY}"}
    with httpx.stream(
        "POST", f"{server.address}/v1/completions", json={**body, "stream": True}, headers=headers
    ) as s:
        next(s.iter_lines())
    unfinished(server)
    with pytest.raises(httpx.TimeoutException):
        httpx.post(f"{server.address}/v1/completions", json={**body, "n": 60}, headers=headers, timeout=0.05)
    unfinished(server)


def test_many_streams_at_once_are_not_mixed(server: Server, chatty: RunFile) -> None:
    """More than run at once: each has the text of its own prompt and seed, and usage of its own."""
    prompts = ["what", "is it", "fox", "a", "what is"]
    expected = {
        (prompt, seed): texts_of(
            chatty, "--prompt", prompt, "--tokens", "12", "--temperature", "1", "--seed", str(seed)
        )[0]["text"]
        for prompt in prompts
        for seed in range(2)
    }

    async def one(client: openai.AsyncOpenAI, number: int) -> bool:
        prompt, seed = prompts[number % 5], number % 2
        stream = await client.completions.create(
            model="tiny", prompt=prompt, max_tokens=12, temperature=1, seed=seed, stream=True
        )
        text = ""
        async for event in stream:
            text += event.choices[0].text
        return text == expected[prompt, seed]

    async def many() -> list[bool]:
        async with openai.AsyncOpenAI(base_url=f"{server.address}/v1", api_key=KEY, max_retries=0) as client:
            return await asyncio.gather(*(one(client, number) for number in range(60)))

    assert asyncio.run(many()) == [True] * 60


def test_a_full_queue_refuses(chatty: RunFile, tmp_path: Path) -> None:
    """And running requests end in the time they have, when the server is asked to stop."""
    server = Server(chatty, tmp_path, "inference.sequences=1", "inference.queue=2", "inference.grace=20")
    try:
        body = {**COMPLETION, "max_tokens": 46, "logit_bias": ENDLESS}
        answers: list[httpx.Response] = []
        while 429 not in {answer.status_code for answer in answers}:  # until some come at once
            with ThreadPoolExecutor(12) as threads:
                answers += threads.map(lambda _: server.post("/v1/completions", {**body, "n": 3}), range(12))
        assert {answer.status_code for answer in answers} == {200, 429}
        (refused, *_) = [answer for answer in answers if answer.status_code == 429]
        assert refused.headers["retry-after"] == "1" and refused.json()["error"]["type"] == "rate_limit_error"
        with ThreadPoolExecutor(1) as threads:
            running = threads.submit(server.post, "/v1/completions", body)
            while not server.metric("hexad_requests_unfinished") and not running.done():
                time.sleep(0.001)
            result = server.stop()
            assert running.result().status_code in (200, 503)
        assert result.status == 0 and "Traceback" not in result.err, result.err
    finally:
        server.process.end()


def test_streams_that_outlast_the_grace_end_with_an_error(chatty: RunFile, tmp_path: Path) -> None:
    server = Server(chatty, tmp_path, "inference.sequences=1", "inference.grace=0.3")
    try:
        body = {**COMPLETION, "max_tokens": 46, "n": 128, "stream": True, "logit_bias": ENDLESS}
        with httpx.stream("POST", f"{server.address}/v1/completions", json=body, timeout=LONGEST) as stream:
            lines = stream.iter_lines()
            next(lines)
            server.process.popen.send_signal(signal.SIGTERM)
            *_, last = (line for line in lines if line)
        error = json.loads(last.removeprefix("data: "))["error"]
        assert error["message"] == "the server is stopping" and error["type"] == "server_error"
        result = server.process.wait()
        assert result.status == 0 and "Traceback" not in result.err, result.err
    finally:
        server.process.end()


@pytest.mark.parametrize("layout", [("parallel.tensor=2",), ("parallel.data=2",)], ids=str)
def test_a_rank_that_dies_ends_the_server(chatty: RunFile, tmp_path: Path, layout: tuple[str, ...]) -> None:
    server = Server(chatty, tmp_path, "--nproc", "2", *layout, "inference.sequences=4")
    try:
        assert server.client().completions.create(**COMPLETION).choices
        body = {**COMPLETION, "max_tokens": 40, "n": 100, "stream": True, "logit_bias": ENDLESS}
        ranks = server.process.ranks()
        with httpx.stream("POST", f"{server.address}/v1/completions", json=body, timeout=LONGEST) as stream:
            lines = stream.iter_lines()
            next(lines)
            os.kill(ranks[1], signal.SIGKILL)
            try:
                rest = "".join(lines)
            except httpx.HTTPError:
                rest = ""
            assert "[DONE]" not in rest
        result = server.process.wait()
        assert result.status not in (0, None)
        assert "rank 1" in result.error and "log-rank" not in result.error, result.err
        wait_until_gone(ranks.values())
    finally:
        server.process.end()


def test_it_stops_on_all_ranks(chatty: RunFile, tmp_path: Path) -> None:
    server = Server(
        chatty, tmp_path, "--nproc", "4", "parallel.data=2", "parallel.pipeline=2", "parallel.tensor=1"
    )
    try:
        assert server.client().completions.create(**COMPLETION).choices
        ranks = server.process.ranks()
        heard = listening([server.process.popen.pid, *ranks.values()])
        assert heard["tcp"] | heard["tcp6"] <= LOOPBACK and heard["tcp"]
        result = server.stop(signal.SIGINT)
        assert result.status == 0 and "Traceback" not in result.err, result.err
        wait_until_gone(ranks.values())
    finally:
        server.process.end()


def test_what_clients_send_is_answered(tmp_path: Path) -> None:
    """Tools, forms of answers, and the fields of other servers, with OpenAI's client. The model's weights are
    random: what it writes follows from grammars."""
    source = tool_model(tmp_path / "model", TEMPLATES["hermes"], "<|im_end|>")
    server = Server(source, tmp_path)
    try:
        client = server.client()
        messages: list[Any] = [{"role": "user", "content": "what?"}]
        common: dict[str, Any] = {"model": "tiny", "messages": messages, "seed": 3, "max_tokens": 120}
        tool = openai.pydantic_function_tool(Weather)
        required: dict[str, Any] = {**common, "tools": [tool], "tool_choice": "required"}
        required["parallel_tool_calls"] = False
        answer = client.chat.completions.parse(**required).choices[0]
        (call,) = answer.message.tool_calls
        assert answer.finish_reason == "tool_calls" and answer.message.content is None
        assert isinstance(call.function.parsed_arguments, Weather) and len(call.id) == 9
        with client.chat.completions.stream(**required) as stream:
            stream.until_done()
            streamed = stream.get_final_completion().choices[0]
        assert streamed.finish_reason == "tool_calls"
        assert isinstance(streamed.message.tool_calls[0].function.parsed_arguments, Weather)
        history = [*messages, {"role": "assistant", "content": None, "tool_calls": [call.model_dump()]}]
        history.append({"role": "tool", "tool_call_id": call.id, "content": "21"})
        assert (
            client.chat.completions.create(**{**required, "messages": history}).choices[0].message.tool_calls
        )
        parsed = client.chat.completions.parse(**common, response_format=Weather).choices[0].message.parsed
        assert isinstance(parsed, Weather)
        for fields, pattern in OTHERS:
            text = client.chat.completions.create(**common, extra_body=fields).choices[0].message.content
            assert re.fullmatch(pattern, text, re.DOTALL), (fields, text)
        with pytest.raises(openai.BadRequestError, match="exceed the model's 2,048") as exceeded:
            client.chat.completions.create(**{**common, "max_tokens": 10**6})
        assert exceeded.value.code == "context_length_exceeded" and exceeded.value.param == "max_tokens"
        text: dict[str, Any] = {"model": "tiny", "prompt": "hello", "max_tokens": 5, "seed": 1}
        whole = client.completions.create(**text, echo=True, logprobs=1).choices[0]
        parts = [
            event.choices[0]
            for event in client.completions.create(**text, echo=True, logprobs=1, stream=True)
        ]
        assert "".join(part.text for part in parts) == whole.text and whole.text.startswith("hello")
        for name in ("tokens", "token_logprobs", "text_offset"):
            joined = [value for part in parts if part.logprobs for value in getattr(part.logprobs, name)]
            assert joined == getattr(whole.logprobs, name)
        several = client.completions.create(**text, n=6, logprobs=0).choices
        best = client.completions.create(**text, n=2, best_of=6).choices
        mean = {choice.text: sum(choice.logprobs.token_logprobs) for choice in several}
        assert [choice.text for choice in best] == sorted(mean, key=mean.__getitem__, reverse=True)[:2]
        assert server.client().chat.completions.create(**common, extra_body={"frobnicate": 1}).choices
        assert server.client().chat.completions.create(**common, extra_body={"frobnicate": 2}).choices
        assert server.errors.count("frobnicate") == 1 and "Traceback" not in server.errors
    finally:
        server.process.end()


class Weather(pydantic.BaseModel):
    """The weather of a city."""

    city: Literal["Rome", "Oslo"]
    hot: bool


OTHERS: list[tuple[dict[str, Any], str]] = [
    ({"guided_regex": "[a-c]{3}"}, "[a-c]{3}"),
    ({"guided_choice": ["yes", "no"]}, "yes|no"),
    ({"guided_grammar": 'start: "a" | "b"'}, "a|b"),
    ({"guided_json": {"enum": ["x", 3]}}, '"x"|3'),
    ({"structured_outputs": {"regex": "[0-9]{4}/x"}}, "[0-9]{4}/x"),
    ({"structured_outputs": {"choice": ["yes", "no"]}}, "yes|no"),
    ({"top_k": -1, "min_tokens": 30, "max_tokens": 30, "stop": ["a", "b", "c"]}, ".{10,}"),
    ({"ignore_eos": True, "chat_template_kwargs": {"enable_thinking": True}}, ".+"),
    ({"stop_token_ids": [*range(250)], "min_tokens": 2, "reasoning_effort": "low"}, ".*"),
    ({"logit_bias": {"260": 100}, "max_tokens": 2, "skip_special_tokens": False}, r"(<\|im_start\|>){2}"),
    ({"logit_bias": {"260": 100}, "max_tokens": 2}, ""),
]
"""Fields that OpenAI's interface lacks, and what they make of the answer."""


def test_errors(chatty: RunFile, server: Server) -> None:
    run = str(chatty.directory)
    port = server.address.rpartition(":")[2]
    assert call("serve", run, "--port", port).error.startswith(
        f"--host 127.0.0.1 --port {port}: cannot be used: "
    )
    assert call("serve", run, "--host", "256.1.1.1").error.startswith(
        "--host 256.1.1.1 --port 8000: cannot be used"
    )
    assert call("serve", run, "--api-key", "a b").error.startswith("--api-key: found one with spaces")
    assert call("serve", "nowhere").error.startswith("nowhere: ")
    assert call("serve", run, "inference.queue=-1").error.startswith("inference.queue: found -1")
