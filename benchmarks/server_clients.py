"""What clients that people use ask of a server: which of their requests work.

    python benchmarks/server_clients.py [--families hermes llama mistral "mistral 11"] [--output FILE.json]

OpenAI's client is needed; LangChain (`langchain-openai`) and `instructor` are tried if they are
installed. The models have random weights and the chat templates of `tests/generation/tool_models.py`. What
they write follows from grammars alone: where a schema allows other properties, they fill an answer with them,
which then ends at its number of tokens, without a complete call (`length`, or nothing found).
"""

from __future__ import annotations

import argparse
import json
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import openai
from facts import facts
from pydantic import BaseModel

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.generation.tool_models import TEMPLATES, tool_model

ENDS = {"hermes": "<|im_end|>", "llama": "<|eot_id|>"}
WEATHER = {
    "name": "weather",
    "description": "The weather of a city.",
    "strict": True,
    "parameters": {
        "type": "object",
        "properties": {"city": {"enum": ["Rome", "Oslo"]}, "days": {"enum": [1, 2, 3]}},
        "required": ["city", "days"],
        "additionalProperties": False,
    },
}
NOW = {"name": "now", "parameters": {"type": "object", "properties": {}, "additionalProperties": False}}
TOOLS: list[Any] = [{"type": "function", "function": function} for function in (WEATHER, NOW)]
MESSAGES: list[Any] = [{"role": "user", "content": "what?"}]
FIELDS: dict[str, dict[str, Any]] = {
    "ignore_eos": {"ignore_eos": True},
    "min_tokens": {"min_tokens": 5},
    "stop_token_ids": {"stop_token_ids": [3, 4]},
    "skip_special_tokens": {"skip_special_tokens": False},
    "chat_template_kwargs": {"chat_template_kwargs": {"enable_thinking": False}},
    "add_generation_prompt": {"add_generation_prompt": False},
    "guided_json": {"guided_json": {"enum": ["a", "b"]}},
    "guided_regex": {"guided_regex": "[a-c]{3}"},
    "guided_choice": {"guided_choice": ["yes", "no"]},
    "guided_grammar": {"guided_grammar": 'start: "a" | "b"'},
    "structured_outputs.choice": {"structured_outputs": {"choice": ["yes", "no"]}},
    "structured_outputs.regex": {"structured_outputs": {"regex": "[0-9]{4}"}},
    "structured_outputs.json": {"structured_outputs": {"json": {"enum": [1, 2]}}},
    "top_k -1": {"top_k": -1},
    "reasoning_effort": {"reasoning_effort": "low"},
    "an unknown field": {"frobnicate": 3},
}


class Weather(BaseModel):
    """The weather of a city."""

    city: Literal["Rome", "Oslo"]
    days: Literal[1, 2, 3]


def openai_cases(url: str) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Requests of OpenAI's client, and fields of other servers."""
    client = openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=60)

    def options(**others: Any) -> dict[str, Any]:
        return {"model": "model", "messages": MESSAGES, "seed": 3, "max_tokens": 300, **others}

    def create(**others: Any) -> Any:
        return client.chat.completions.create(**options(**others)).choices[0]

    def called(**others: Any) -> list[Any]:
        calls = create(tools=TOOLS, **others).message.tool_calls
        return [json.loads(call.function.arguments) for call in calls]

    named = {"type": "function", "function": {"name": "weather"}}
    one = {"tool_choice": "required", "parallel_tool_calls": False}
    yield "tools, required", lambda: called(**one)
    yield "tools, named", lambda: called(tool_choice=named, parallel_tool_calls=False)
    yield "tools, auto", lambda: create(tools=TOOLS, max_tokens=20)
    yield "tools, none", lambda: _expect(create(tools=TOOLS, tool_choice="none").message.tool_calls is None)

    def history() -> Any:
        answer = create(tools=TOOLS, **one).message
        results = [{"role": "tool", "tool_call_id": call.id, "content": "21"} for call in answer.tool_calls]
        messages = [*MESSAGES, answer.model_dump(exclude_none=True), *results]
        return create(messages=messages, tools=TOOLS, max_tokens=5)

    yield "tools, results in the conversation", history
    tool: Any = openai.pydantic_function_tool(Weather)
    parse = client.chat.completions.parse
    yield (
        "parse, response_format",
        lambda: _expect(parse(**options(response_format=Weather)).choices[0].message.parsed),
    )
    yield (
        "parse, tools",
        lambda: _expect(
            parse(**options(tools=[tool], **one)).choices[0].message.tool_calls[0].function.parsed_arguments
        ),
    )

    def streamed(**others: Any) -> Any:
        with client.chat.completions.stream(**options(**others)) as stream:
            stream.until_done()
            return stream.get_final_completion().choices[0].message

    yield "stream, tools", lambda: _expect(streamed(tools=[tool], **one).tool_calls)
    yield "stream, response_format", lambda: _expect(streamed(response_format=Weather).parsed)
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": [1, 2]}}}
    yield "response_format beside tools", lambda: create(tools=TOOLS, response_format=schema)
    for name, fields in FIELDS.items():
        yield name, lambda fields=fields: create(max_tokens=12, extra_body=fields)
    partial = [*MESSAGES, {"role": "assistant", "content": "The answer"}]
    going = {"continue_final_message": True, "add_generation_prompt": False}
    yield "continue_final_message", lambda: create(messages=partial, max_tokens=5, extra_body=going)
    text: dict[str, Any] = {"model": "model", "prompt": "hello", "max_tokens": 4}
    yield "best_of", lambda: _expect(len(client.completions.create(**text, n=2, best_of=4).choices) == 2)
    yield "echo in a stream", lambda: [*client.completions.create(**text, echo=True, logprobs=1, stream=True)]
    usage = {"include_usage": True, "include_obfuscation": False}
    yield (
        "stream_options",
        lambda: _expect(
            [*client.chat.completions.create(**options(stream=True, stream_options=usage, max_tokens=3))][
                -1
            ].usage
        ),
    )
    yield "context_length_exceeded", lambda: _exceeded(lambda: create(max_tokens=10**6))


def instructor_cases(url: str) -> Iterator[tuple[str, Callable[[], Any]]]:
    """`instructor`, in its default mode and with schemas."""
    import instructor

    client = openai.OpenAI(base_url=url, api_key="none", max_retries=0)
    options: dict[str, Any] = {"model": "model", "messages": MESSAGES, "seed": 3, "max_tokens": 300}
    options["response_model"] = Weather
    yield "instructor", lambda: instructor.from_openai(client).chat.completions.create(**options)
    mode = instructor.Mode.JSON_SCHEMA
    yield (
        "instructor, JSON schema",
        lambda: instructor.from_openai(client, mode=mode).chat.completions.create(**options),
    )


def langchain_cases(url: str) -> Iterator[tuple[str, Callable[[], Any]]]:
    """LangChain's models."""
    from langchain_openai import ChatOpenAI, OpenAI

    common: dict[str, Any] = {"base_url": url, "api_key": "none", "model": "model", "max_retries": 0}
    chat = ChatOpenAI(**common, max_tokens=300, seed=3)
    yield "LangChain, chat", lambda: chat.invoke("hi", max_tokens=5)
    yield "LangChain, stream", lambda: [*chat.stream("hi", max_tokens=5)]
    yield "LangChain, bind_tools", lambda: chat.bind_tools([Weather]).invoke("hi", max_tokens=5)
    forced = {"tool_choice": "any", "parallel_tool_calls": False}
    yield (
        "LangChain, bind_tools, any",
        lambda: _expect(chat.bind_tools([Weather], **forced).invoke("hi").tool_calls),
    )
    yield (
        "LangChain, bind_tools, strict",
        lambda: _expect(chat.bind_tools([Weather], strict=True, **forced).invoke("hi").tool_calls),
    )
    yield "LangChain, stream of calls", lambda: [*chat.bind_tools([Weather], **forced).stream("hi")]
    for method in ("json_schema", "function_calling"):
        yield (
            f"LangChain, with_structured_output, {method}",
            lambda method=method: _expect(chat.with_structured_output(Weather, method=method).invoke("hi")),
        )
    yield "LangChain, completions", lambda: OpenAI(**common, max_tokens=5).invoke("hi")


def _expect(value: Any) -> Any:
    if not value:
        raise AssertionError(f"found {value!r}")
    return value


def _exceeded(request: Callable[[], Any]) -> str:
    try:
        request()
    except openai.BadRequestError as error:
        return str(_expect(error.code == "context_length_exceeded" and error.param))
    raise AssertionError("was accepted")


@contextmanager
def server(source: str, where: Path) -> Iterator[str]:
    """The address of a server of a model."""
    command = [sys.executable, "-m", "hexad.cli.main", "serve", source, "--port", "0", "--name", "model"]
    log = where / "stderr"
    with log.open("w") as errors:
        process = subprocess.Popen(command, stderr=errors)
    try:
        while (match := re.search(r"serving model at (\S+)", log.read_text())) is None:
            time.sleep(0.1)
            if process.poll() is not None:
                sys.exit(log.read_text())
        yield f"{match[1]}/v1"
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


def outcomes(url: str) -> dict[str, str]:
    """What became of each request."""
    results = {}
    for cases in (openai_cases, instructor_cases, langchain_cases):
        try:
            for name, request in cases(url):
                try:
                    request()
                    results[name] = "works"
                except Exception as error:
                    short = "length" in f"{error} {error!r}".lower()
                    results[name] = "length" if short else f"{type(error).__name__}: {str(error)[:200]}"
        except ImportError as error:
            results[cases.__name__] = f"not installed: {error.name}"
    return results


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--families", nargs="*", default=["hermes", "llama", "mistral", "mistral 11"])
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    rows = {}
    for family in arguments.families:
        with tempfile.TemporaryDirectory() as directory:
            where = Path(directory)
            source = tool_model(where / "model", TEMPLATES[family], ENDS.get(family, "</s>"))
            with server(source, where) as url:
                rows[family] = outcomes(url)
        works = sum(outcome == "works" for outcome in rows[family].values())
        print(f"{family}: {works} of {len(rows[family])} work")
        for name, outcome in rows[family].items():
            if outcome != "works":
                print(f"  {name}: {outcome}")
    if arguments.output:
        document = {"facts": facts("openai"), "rows": rows}
        arguments.output.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
