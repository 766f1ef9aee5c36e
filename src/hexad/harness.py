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
from lm_eval.api.model import TemplateLM
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from hexad.config import ConfigError, HexadError
from hexad.dataset.text.chat import load_chat_template
from hexad.dataset.text.tokenizer import bos_ids
from hexad.generation.generator import Generator
from hexad.generation.prompts import Prompt
from hexad.generation.requests import Request
from hexad.generation.sampling import Sampling

_NEW_TOKENS = 256
"""Where a task does not say how many."""
_LIMITS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
"""Names of the number of new tokens; the first that is given counts, as in the harness."""
_WITHOUT_EFFECT = {"num_beams": 1}
"""Options that may be given with the value that changes nothing."""
_LARGEST = float_info.max
_CONTINUED = "<hexad:continued> "
"""Marks the end of a message that is to be continued; a template that trims messages removes its space."""

Number = TypeVar("Number", int, float)


class HexadLM(TemplateLM):
    """A saved model as the harness calls it, whose own code divides contexts from continuations. Used as a
    context manager, or closed by :meth:`close`.

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
        self._bos = bos_ids(self._tokenizer, self._config.data.bos)
        self._prefix = self._tokenizer.eod if self._tokenizer.begin is None else self._tokenizer.begin

    @property
    def eot_token_id(self) -> int | None:
        """The id that ends a document, if the tokenizer has one."""
        return self._tokenizer.eod

    @property
    def prefix_token_id(self) -> int:
        """The id before texts without a context: of a beginning, else of the end of a document.

        Raises:
            ConfigError: the tokenizer has neither.
        """
        if self._prefix is None:
            raise ConfigError("data.tokenizer", "has no token to begin a text with, which this task needs")
        return self._prefix

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **options: Any) -> list[int]:
        """The ids of a text, with those that the tokenizer puts before it, unless the text begins with them;
        ``add_special_tokens``: with them, or without."""
        if add_special_tokens is None:
            add_special_tokens = not self._begins(string, self._prefix)
        return [*(self._bos if add_special_tokens else ()), *self._tokenizer.encode(string)]

    def _begins(self, text: str, token: int | None) -> bool:
        """Whether a text begins with a special token."""
        special = next((name for name, number in self._tokenizer.specials.items() if number == token), None)
        return special is not None and text.startswith(special)

    def _loglikelihood_tokens(
        self, requests: list[tuple[Any, list[int], list[int]]], **options: Any
    ) -> list[tuple[float, bool]]:
        """Log probability of each continuation's ids after its context's, and whether they are what the model
        would write. Contexts longer than the model was made for lose their beginning.

        Raises:
            HexadError: a continuation has no ids of its own.
        """
        for pair, _context, continuation in requests:
            if not continuation:
                problem = "its tokens are also the context's, so that it has no likelihood of its own"
                raise HexadError(f"lm_eval: context and continuation {pair!r:.200}: {problem}")
        sequences = [self._fitting([*before, *after], len(before)) for _, before, after in requests]
        scored = []
        for text, (_, first) in zip(self._generator.score([ids for ids, _ in sequences], top=1), sequences):
            counted = (text.prompt_logprobs or ())[first - 1 :]
            greedy = all(one.top[0][0] == one.token for one in counted)
            scored.append((math.fsum(one.value for one in counted), greedy))
        return scored

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Log probability of each whole text, in windows of the model's length."""
        likelihoods = []
        for (text,) in (request.args for request in requests):
            windows = get_rolling_token_windows(
                self.tok_encode(text), self.prefix_token_id, max_seq_len=self._length, context_len=1
            )
            parts = [(None, *make_disjoint_window(window)) for window in windows]
            likelihoods.append(sum(likelihood for likelihood, _ in self._loglikelihood_tokens(parts)))
        return likelihoods

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """What the model writes after each context, up to one of the texts in ``until``."""
        generator = self._generator

        def texts() -> list[str]:
            entries: list[tuple[int, Prompt, Request]] = []
            for number, (context, options) in enumerate(request.args for request in requests):
                sampling = _sampling(options)
                prompt = {"prompt": self._prompt(context, sampling.tokens)}
                ((_, _, request),) = generator.requests([prompt], sampling)
                entries.append((number, prompt, request))
            written = {text.number: text.text for _, text in generator.written(entries)}
            return [written[number] for number in range(len(requests))]

        return generator.shared(texts)

    def _prompt(self, context: str, new: int) -> list[int]:
        """The last ids of a context that leave room for so many new ones."""
        begins = self._begins(context, self._tokenizer.begin)
        ids = self.tok_encode(context, add_special_tokens=not begins) or [self.prefix_token_id]
        return ids[-max(1, self._length - new) :]

    def _fitting(self, ids: list[int], first: int) -> tuple[list[int], int]:
        """Cut a sequence on the left to the model's length, plus the last token, which is only predicted."""
        lost = max(0, min(len(ids) - self._length - 1, first - 1))
        return ids[lost:], first - lost

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """The text of a conversation; without ``add_generation_prompt`` its last message is to be continued.
        A template that refuses a conversation is tried without its system message."""
        template = load_chat_template(self._config.data.tokenizer)
        if template is None:
            raise ConfigError("data.tokenizer", f"{self._config.data.tokenizer} has no chat template")
        messages = list(chat_history)
        if not add_generation_prompt and messages:
            last = messages.pop()
            messages.append({**last, "content": f"{last['content']}{_CONTINUED}"})
        try:
            text = template.render(messages, prompt=add_generation_prompt)
        except HexadError:
            others = [message for message in messages if message["role"] != "system"]
            if len(others) == len(messages):
                raise
            text = template.render(others, prompt=add_generation_prompt)
        if add_generation_prompt or not messages:
            return text
        begin, mark, rest = text.rpartition(_CONTINUED.strip())
        if not mark:
            raise HexadError(f"{template.name}: does not render the last message, which is to be continued")
        return begin if rest.startswith(" ") else begin.rstrip()

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


def _sampling(options: Mapping[str, Any]) -> Sampling:
    """The settings in a task's ``generation_kwargs``, as the harness's own adapter for ``transformers``
    understands them; a value of None is an option that is not given. ``do_sample`` alone samples at 1.0.

    Raises:
        ConfigError: an unknown option, or a value of the wrong type or out of range.
    """
    values = {name: value for name, value in options.items() if value is not None}
    stop = _stop(values.pop("until", ()))
    sampled = values.pop("do_sample", values.get("temperature", 0) != 0)
    if not isinstance(sampled, bool):
        raise _wrong("do_sample", sampled, "true or false")
    temperature = _number(values, "temperature", float(sampled), 0.0, "a number from 0")
    top_k = _number(values, "top_k", 0, 0, "an integer from 0 (all)")
    top_p = _number(values, "top_p", 1.0, nextafter(0.0, 1.0), "a number above 0, at most 1", most=1.0)
    limits = [_number(values, name, 0, 1, "an integer from 1") for name in _LIMITS if name in values]
    unknown = {name: value for name, value in values.items() if _WITHOUT_EFFECT.get(name) != value}
    if unknown:
        listed = ", ".join(f"{name}: {value}" for name, value in unknown.items())
        known = ", ".join(("until", "do_sample", "temperature", "top_k", "top_p", *_LIMITS))
        raise ConfigError(
            "generation_kwargs", f"found {listed}; remove it from the task; expected some of {known}"
        )
    tokens = (*limits, _NEW_TOKENS)[0]
    return Sampling(temperature if sampled else 0.0, top_k, top_p, tokens=tokens, stop=stop)


def _stop(until: Any) -> tuple[str, ...]:
    """The texts of ``until``, a text or a list, without empty ones."""
    texts = [until] if isinstance(until, str) else until
    if not isinstance(texts, list | tuple) or not all(isinstance(text, str) for text in texts):
        raise _wrong("until", until, "a text or a list of texts")
    return tuple(filter(None, texts))


def _number(
    values: dict[str, Any], name: str, default: Number, least: Number, expected: str, most: float = _LARGEST
) -> Number:
    """Remove an option from those given: a number of the default's type, from ``least`` to ``most``."""
    value = values.pop(name, default)
    kinds = (int,) if isinstance(default, int) else (int, float)
    if isinstance(value, bool) or not isinstance(value, kinds) or not least <= value <= most:
        raise _wrong(name, value, expected)
    return type(default)(value)


def _wrong(name: str, value: Any, expected: str) -> ConfigError:
    return ConfigError(f"generation_kwargs.{name}", f"found {value!r}, expected {expected}; change the task")
