"""A server under load: many streams at once from OpenAI's client, each answer compared with what
``hexad generate`` writes for its prompt and seed.

    python benchmarks/serving.py SOURCE [--requests 10000] [--streams 200] [--tokens 16] [--nproc 1]
        [--output FILE.json] [KEY=VALUE ...]

Prints how many answers were lost, refused or others than expected, and the time to the first token and
between tokens (p50, p99; seconds as the client sees them, which shares the processor with the server).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import openai
from facts import facts

PROMPTS = ["what", "is it", "a fox", "the", "quick brown", "w", "line 7", "over"]
SEEDS = 5


def expected(arguments: argparse.Namespace) -> dict[tuple[str, int], str]:
    """The text after each prompt with each seed."""
    texts = {}
    for seed in range(SEEDS):
        command = [sys.executable, "-m", "hexad.cli.main", "generate", arguments.source, "--json"]
        command += ["--temperature", "1", "--seed", str(seed), "--tokens", str(arguments.tokens)]
        for prompt in PROMPTS:
            command += ["--prompt", prompt]
        output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        for result in json.loads(output)["results"]:
            texts[result["prompt"], seed] = result["text"]
    return texts


class Load:
    """What clients see."""

    def __init__(self, client: openai.AsyncOpenAI, texts: dict[tuple[str, int], str], tokens: int) -> None:
        self._client, self._texts, self._tokens = client, texts, tokens
        self.outcomes: Counter[str] = Counter()
        self.first: list[float] = []
        self.between: list[float] = []

    async def one(self, number: int) -> None:
        """One request."""
        prompt, seed = PROMPTS[number % len(PROMPTS)], number // len(PROMPTS) % SEEDS
        begin = before = time.perf_counter()
        text, ended = "", None
        try:
            stream = await self._client.completions.create(
                model="model", prompt=prompt, max_tokens=self._tokens, temperature=1, seed=seed, stream=True
            )
            async for event in stream:
                now = time.perf_counter()
                (self.first if before == begin else self.between).append(now - before)
                before = now
                text += event.choices[0].text
                ended = event.choices[0].finish_reason or ended
        except openai.APIStatusError as error:
            self.outcomes[f"status {error.status_code}"] += 1
        except openai.APIError as error:
            self.outcomes[type(error).__name__] += 1
        else:
            right = text == self._texts[prompt, seed] and ended is not None
            self.outcomes["right" if right else "wrong"] += 1

    async def all(self, requests: int, streams: int) -> float:
        """All requests, so many at once; returns the seconds that they took."""
        numbers = iter(range(requests))

        async def one_after_the_other() -> None:
            for number in numbers:
                await self.one(number)

        begin = time.perf_counter()
        await asyncio.gather(*(one_after_the_other() for _ in range(streams)))
        return time.perf_counter() - begin


def quantiles(values: list[float]) -> dict[str, float]:
    """The median, and what 99 of 100 do not exceed."""
    ordered = sorted(values)
    return {f"p{part}": round(ordered[len(ordered) * part // 100], 4) for part in (50, 99)}


async def loaded(
    address: str, texts: dict[tuple[str, int], str], arguments: argparse.Namespace
) -> dict[str, Any]:
    """The figures of one run."""
    limits = {"max_retries": 0, "timeout": 600.0}
    async with openai.AsyncOpenAI(base_url=f"{address}/v1", api_key="none", **limits) as client:
        load = Load(client, texts, arguments.tokens)
        seconds = await load.all(arguments.requests, arguments.streams)
    return {
        "requests": arguments.requests,
        "streams": arguments.streams,
        "seconds": round(seconds, 1),
        "requests_per_second": round(arguments.requests / seconds, 1),
        "outcomes": dict(load.outcomes),
        "time_to_first_token": quantiles(load.first),
        "time_between_tokens": quantiles(load.between),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source")
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--streams", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--nproc", type=int, default=1)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    texts = expected(arguments)
    command = [
        sys.executable,
        "-m",
        "hexad.cli.main",
        "serve",
        arguments.source,
        "--port",
        "0",
        "--name",
        "model",
    ]
    command += ["--nproc", str(arguments.nproc), *arguments.overrides]
    with tempfile.TemporaryFile("w+") as errors:
        server = subprocess.Popen(command, stderr=errors)
        try:
            address = None
            while address is None:
                time.sleep(0.1)
                errors.seek(0)
                match = re.search(r"serving model at (\S+)", errors.read())
                address = match and match[1]
                if server.poll() is not None:
                    errors.seek(0)
                    sys.exit(errors.read())
            figures = asyncio.run(loaded(address, texts, arguments))
        finally:
            server.send_signal(signal.SIGTERM)
            figures_status = server.wait()
    figures["exit_status"] = figures_status
    print(json.dumps(figures, indent=1))
    if arguments.output:
        document = {"facts": facts("openai"), **figures}
        arguments.output.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
