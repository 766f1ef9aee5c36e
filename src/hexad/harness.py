"""A run, checkpoint or published model in EleutherAI's evaluation harness (``pip install hexad[lm_eval]``).

    import lm_eval
    from hexad.harness import HexadLM

    with HexadLM("runs/demo") as model:
        results = lm_eval.simple_evaluate(model, tasks=["hellaswag"])

Under torchrun all ranks do this together, tensor-parallel unless overridden; each gets the results.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from math import nextafter
from pathlib import Path
from sys import float_info
from typing import Any, TypeVar

from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from hexad.config import ConfigError
from hexad.dataset.text.chat import load_chat_template
from hexad.generation.generator import Generator
from hexad.generation.prompts import Prompt
from hexad.generation.requests import Request, Sampling
from hexad.generation.texts import Wanted

_NEW_TOKENS = 256
"""Where a task does not say how many."""
_LIMITS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
"""Names of the number of new tokens; the first that is given counts, as in the harness."""
_WITHOUT_EFFECT = {"num_beams": 1}
"""Options that may be given with the value that changes nothing."""
_LARGEST = float_info.max

Number = TypeVar("Number", int, float)


class HexadLM(LM):
    """A saved model as the harness calls it. Used as a context manager, or closed by :meth:`close`.

    Args:
        source: a run, a checkpoint, or ``hf:DIR``.
        overrides: of its settings, as in ``precision.dtype=fp32``.

    Raises:
        HexadError: it cannot be used.
    """

    def __init__(self, source: str | Path, overrides: Iterable[str] = ()) -> None:
        super().__init__()
        self._generator = Generator(source, overrides)
        self._tokenizer, self._config = self._generator.tokenizer, self._generator.saved.config
        self._length = self._generator.saved.positions
        begin = self._tokenizer.bos or ((self._tokenizer.eod,) if self._tokenizer.eod is not None else ())
        self._begin = list(begin)[-1:]

    def loglikelihood(self, requests: list[Instance]) -> list[tuple[float, bool]]:
        """Log probability of each continuation after its context, and whether it is what the model would
        write. Contexts longer than the model was made for lose their beginning."""
        sequences = []
        for context, continuation in (request.args for request in requests):
            stripped = context.rstrip()
            context, continuation = stripped, context[len(stripped) :] + continuation
            ids = self._tokenizer.encode(context + continuation)
            before = self._tokenizer.encode(context) if context else []
            first = len(before) if before else len(self._begin)
            sequences.append(self._fitting(ids if before else [*self._begin, *ids], first))
        return self._scored(sequences)

    def loglikelihood_rolling(self, requests: list[Instance]) -> list[float]:
        """Log probability of each whole text, in windows of the model's length."""
        if not self._begin:
            raise ConfigError("data.tokenizer", "has no token to begin a text with, which this task needs")
        likelihoods = []
        for (text,) in (request.args for request in requests):
            windows = get_rolling_token_windows(
                self._tokenizer.encode(text), self._begin[0], max_seq_len=self._length, context_len=1
            )
            pairs = map(make_disjoint_window, windows)
            sequences = [([*before, *after], len(before)) for before, after in pairs]
            likelihoods.append(sum(likelihood for likelihood, _ in self._scored(sequences)))
        return likelihoods

    def generate_until(self, requests: list[Instance]) -> list[str]:
        """What the model writes after each context, up to one of the texts in ``until``."""
        generator = self._generator

        def texts() -> list[str]:
            entries: list[tuple[int, Prompt, Request]] = []
            for number, (context, options) in enumerate(request.args for request in requests):
                wanted = _wanted(options)
                prompt = {"prompt": self._prompt(context, wanted.tokens)}
                entries += [(number, prompt, one) for _, _, one in generator.requests([prompt], wanted)]
            written = {text.number: text.text for _, text in generator.written(entries)}
            return [written[number] for number in range(len(requests))]

        return generator.shared(texts)

    def _prompt(self, context: str, new: int) -> list[int]:
        """The last ids of a context that leave room for so many new ones."""
        ids = [*self._tokenizer.bos, *self._tokenizer.encode(context)] or self._begin
        return ids[-max(1, self._length - new) :]

    def _fitting(self, ids: list[int], first: int) -> tuple[list[int], int]:
        """Cut a sequence on the left to the model's length, plus the last token, which is only predicted."""
        lost = max(0, min(len(ids) - self._length - 1, first - 1))
        return ids[lost:], first - lost

    def _scored(self, sequences: list[tuple[list[int], int]]) -> list[tuple[float, bool]]:
        """Of each sequence the log-probability of its tokens from a number on, and whether each of these is
        the most likely one."""
        if any(first < 1 for _, first in sequences):
            raise ConfigError("data.tokenizer", "has no token to begin a text with, which this task needs")
        scored = []
        for text, (_, first) in zip(self._generator.score([ids for ids, _ in sequences], top=1), sequences):
            counted = (text.prompt_logprobs or ())[first - 1 :]
            greedy = all(one.top[0][0] == one.token for one in counted)
            scored.append((math.fsum(one.value for one in counted), greedy))
        return scored

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """The text of a conversation."""
        template = load_chat_template(self._config.data.tokenizer)
        if template is None:
            raise ConfigError("data.tokenizer", f"{self._config.data.tokenizer} has no chat template")
        return template.render(chat_history, prompt=add_generation_prompt)

    @property
    def tokenizer_name(self) -> str:
        """A name of the tokenizer, by which the harness caches requests."""
        return self._tokenizer.name.replace("/", "__")

    def close(self) -> None:
        """Leave the world."""
        self._generator.close()

    def __enter__(self) -> HexadLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _wanted(options: Mapping[str, Any]) -> Wanted:
    """A task's ``generation_kwargs``, as the harness's own adapter for ``transformers`` understands them; a
    value of None is an option that is not given. Sampling without a temperature is at 1.0.

    Raises:
        ConfigError: an unknown option, or a value of the wrong type or out of range.
    """
    given = {name: value for name, value in options.items() if value is not None}
    stop = _stop(given.pop("until", ()))
    sampled = given.pop("do_sample", given.get("temperature", 0) != 0)
    if not isinstance(sampled, bool):
        raise _wrong("do_sample", sampled, "true or false")
    temperature = _number(given, "temperature", float(sampled), 0.0, "a number from 0")
    top_k = _number(given, "top_k", 0, 0, "an integer from 0 (all)")
    top_p = _number(given, "top_p", 1.0, nextafter(0.0, 1.0), "a number above 0, at most 1", most=1.0)
    limits = [_number(given, name, 0, 1, "an integer from 1") for name in _LIMITS if name in given]
    unknown = {name: value for name, value in given.items() if _WITHOUT_EFFECT.get(name) != value}
    if unknown:
        listed = ", ".join(f"{name}: {value}" for name, value in unknown.items())
        known = ", ".join(("until", "do_sample", "temperature", "top_k", "top_p", *_LIMITS))
        raise ConfigError(
            "generation_kwargs", f"found {listed}; remove it from the task; expected some of {known}"
        )
    sampling = Sampling(temperature if sampled else 0.0, top_k, top_p)
    return Wanted((*limits, _NEW_TOKENS)[0], sampling, stop=stop)


def _stop(until: Any) -> tuple[str, ...]:
    """The texts of ``until``, a text or a list, without empty ones."""
    texts = [until] if isinstance(until, str) else until
    if not isinstance(texts, list | tuple) or not all(isinstance(text, str) for text in texts):
        raise _wrong("until", until, "a text or a list of texts")
    return tuple(filter(None, texts))


def _number(
    given: dict[str, Any], name: str, default: Number, least: Number, expected: str, most: float = _LARGEST
) -> Number:
    """Remove an option from those given: a number of the default's type, from ``least`` to ``most``."""
    value = given.pop(name, default)
    kinds = (int,) if isinstance(default, int) else (int, float)
    if isinstance(value, bool) or not isinstance(value, kinds) or not least <= value <= most:
        raise _wrong(name, value, expected)
    return type(default)(value)


def _wrong(name: str, value: Any, expected: str) -> ConfigError:
    return ConfigError(f"generation_kwargs.{name}", f"found {value!r}, expected {expected}; change the task")
