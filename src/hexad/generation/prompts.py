"""Prompts and conversations to ids. No torch."""

import json
from collections.abc import Mapping
from functools import cached_property
from typing import Any

from hexad.checkpoint.kept_tokenizer import ending_ids
from hexad.config import ConfigError, HexadError, shown
from hexad.dataset.build.records import check_messages
from hexad.dataset.text.chat import ChatTemplate, load_chat_template
from hexad.dataset.text.tokenizer import Tokenizer, bos_ids
from hexad.planning.saved_model import SavedModel

Prompt = Mapping[str, Any]
"""``{"prompt": text}``, ``{"prompt": ids}``, or ``{"messages": [...]}``, rendered by the tokenizer's chat
template. Beside a text: ``add_special_tokens`` (true). Beside ``messages``, as for ``apply_chat_template``
of ``transformers``: ``tools``, schemas of functions; ``add_generation_prompt`` (true);
``continue_final_message`` (false): the answer continues the last message; ``chat_template_kwargs``, other
variables of the template."""

_RESERVED = frozenset(("messages", "tools", "add_generation_prompt", "continue_final_message"))
_FORMS: dict[str, Any] = {"prompt": str | list, "messages": list}


def form_of(prompt: object) -> str:
    """Whether an object is a ``prompt`` or has ``messages``.

    Raises:
        HexadError: neither, or both.
    """
    forms = [key for key in _FORMS if isinstance(prompt, Mapping) and key in prompt]
    if len(forms) != 1 or not isinstance(prompt[forms[0]], _FORMS[forms[0]]):  # type: ignore[index]
        expected = 'an object with "prompt", a text or a list of ids, or "messages", a list'
        raise HexadError(f"found {shown(prompt, 100)}, expected {expected}")
    return forms[0]


class PromptEncoder:
    """The ids of prompts for one model, and those that end its answers.

    Args:
        saved: the model.
        tokenizer: its tokenizer.
    """

    def __init__(self, saved: SavedModel, tokenizer: Tokenizer) -> None:
        self._saved, self._tokenizer = saved, tokenizer
        self._begin = bos_ids(tokenizer, saved.config.data.bos)

    @property
    def specials(self) -> Mapping[str, int]:
        """The ids of special tokens by their text."""
        return self._tokenizer.specials

    @cached_property
    def template(self) -> ChatTemplate | None:
        """The tokenizer's chat template, if it has one."""
        return load_chat_template(self._saved.config.data.tokenizer)

    def ids(self, prompt: Prompt, name: str) -> tuple[int, ...]:
        """The ids of a prompt.

        Args:
            prompt: see :data:`Prompt`.
            name: of the prompt in messages, as in ``prompt 3``.

        Raises:
            HexadError: it is malformed, has no tokens or unknown ones, or the model has no chat template.
        """
        try:
            form = form_of(prompt)
        except HexadError as error:
            raise HexadError(f"{name}: {error}") from None
        ids: list[int]
        if form == "prompt" and isinstance(prompt["prompt"], list):
            ids = prompt["prompt"]
            if not all(type(token) is int for token in ids):
                raise HexadError(f"{name}: found {shown(ids)}, expected a text or a list of ids")
        elif form == "prompt":
            begin = self._begin if prompt.get("add_special_tokens", True) else []
            ids = [*begin, *self._encoded(prompt["prompt"], name)]
        else:
            ids = self._encoded(self._rendered(prompt, name), name)  # the template begins the text
        if not ids:
            raise HexadError(f"``prompt``: {name}: found no tokens, expected at least one")
        vocab = int(self._saved.config.model.vocab)
        if not 0 <= min(ids) <= max(ids) < vocab:
            wrong = next(token for token in ids if not 0 <= token < vocab)
            if isinstance(prompt.get("prompt"), list):
                raise HexadError(f"{name}: found token id {wrong}, but the model's vocabulary is {vocab}")
            raise ConfigError(
                "data.tokenizer", f"gives token id {wrong}, but the model's vocabulary is {vocab}"
            )
        return tuple(ids)

    def _rendered(self, prompt: Prompt, name: str) -> str:
        check_messages("messages", prompt["messages"], f"``prompts``: {name}", self.template)
        if self.template is None:
            tokenizer = self._saved.config.data.tokenizer
            problem = f"{tokenizer} has no chat template for the messages of {name}"
            raise ConfigError("data.tokenizer", problem)
        values, tools = prompt.get("chat_template_kwargs") or {}, prompt.get("tools")
        if not isinstance(values, Mapping) or (reserved := sorted(_RESERVED.intersection(values))):
            problem = f"has {reserved[0]!r}, which is not one of them" if isinstance(values, Mapping) else ""
            problem = problem or f"found {shown(values)}, expected variables of the template by name"
            raise ConfigError("chat_template_kwargs", problem)
        continued = bool(prompt.get("continue_final_message"))
        begins = prompt.get("add_generation_prompt", not continued)
        if begins and continued:
            problem = "found true with add_generation_prompt; set one of them"
            raise ConfigError("continue_final_message", problem)
        if tools is not None and not isinstance(tools, list):
            raise ConfigError("tools", f"found {shown(tools)}, expected a list of functions")
        return self.template.render(
            [_with_arguments(message) for message in prompt["messages"]],
            prompt=bool(begins),
            tools=tools or None,
            values=values,
            continued=continued,
        )

    def ends(self, prompt: Prompt) -> frozenset[int]:
        """The ids that end an answer: those of the model (:func:`ending_ids`), and for a conversation the
        token with which the template ends its answer."""
        if "messages" not in prompt or self.template is None:
            return self._ends
        token = self._answer_end
        if token is None:  # a template may need more than a question
            token = self.template.answer_end(self.specials, prompt["messages"])
        return self._ends if token is None else self._ends | {self.specials[token]}

    @cached_property
    def _answer_end(self) -> str | None:
        return None if self.template is None else self.template.answer_end(self.specials)

    @cached_property
    def _ends(self) -> frozenset[int]:
        return frozenset(ending_ids(self._saved.source, self._saved.config.data.tokenizer))

    def _encoded(self, text: str, name: str) -> list[int]:
        try:
            text.encode()
        except (
            UnicodeEncodeError
        ):  # half of a surrogate pair, or bytes on the command line that are not UTF-8
            raise HexadError(f"``prompt``: {name} is not Unicode text: {ascii(text)[:60]}") from None
        return self._tokenizer.encode(text)


def _with_arguments(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """A message whose calls have their arguments as objects, which templates expect; clients send them as
    JSON."""
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return message
    read = []
    for call in calls:
        function: Any = call.get("function") if isinstance(call, Mapping) else None
        arguments = function.get("arguments") if isinstance(function, Mapping) else None
        if isinstance(arguments, str):
            try:
                tree = json.loads(arguments or "{}")
            except (ValueError, RecursionError):
                tree = None
            if isinstance(tree, dict) and isinstance(function, Mapping):
                call = {**call, "function": {**function, "arguments": tree}}
        read.append(call)
    return {**message, "tool_calls": read}
