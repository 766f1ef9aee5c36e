"""Prompts and conversations to ids. No torch."""

from collections.abc import Mapping
from functools import cached_property
from typing import Any

from hexad.checkpoint.kept_tokenizer import ending_ids
from hexad.config import ConfigError, HexadError
from hexad.dataset.build.records import check_messages
from hexad.dataset.text.chat import ChatTemplate, load_chat_template
from hexad.dataset.text.tokenizer import Tokenizer, bos_ids
from hexad.planning.saved_model import SavedModel

Prompt = Mapping[str, Any]
"""``{"prompt": text}``, ``{"prompt": ids}``, or ``{"messages": [...]}``, rendered by the tokenizer's chat
template."""

_FORMS: dict[str, Any] = {"prompt": str | list, "messages": list}


def form_of(prompt: object) -> str:
    """Whether an object is a ``prompt`` or has ``messages``.

    Raises:
        HexadError: neither, or both.
    """
    given = [key for key in _FORMS if isinstance(prompt, Mapping) and key in prompt]
    if len(given) != 1 or not isinstance(prompt[given[0]], _FORMS[given[0]]):  # type: ignore[index]
        expected = 'an object with "prompt", a text or a list of ids, or "messages", a list'
        raise HexadError(f"found {prompt!r:.100}, expected {expected}")
    return given[0]


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
            if not all(isinstance(token, int) and not isinstance(token, bool) for token in ids):
                raise HexadError(f"{name}: found {ids!r:.60}, expected a text or a list of ids")
        elif form == "prompt":
            ids = [*self._begin, *self._encoded(prompt["prompt"], name)]
        else:
            check_messages("messages", prompt["messages"], f"--prompts: {name}", self.template)
            if self.template is None:
                tokenizer = self._saved.config.data.tokenizer
                problem = f"{tokenizer} has no chat template for the messages of {name}"
                raise ConfigError("data.tokenizer", problem)
            text = self.template.render(prompt["messages"], prompt=True)  # which begins a text as it should
            ids = self._encoded(text, name)
        if not ids:
            raise HexadError(f"--prompt: {name}: found no tokens, expected at least one")
        vocab = int(self._saved.config.model.vocab)
        if not 0 <= min(ids) <= max(ids) < vocab:
            wrong = next(token for token in ids if not 0 <= token < vocab)
            if isinstance(prompt.get("prompt"), list):
                raise HexadError(f"{name}: found token id {wrong}, but the model's vocabulary is {vocab}")
            raise ConfigError(
                "data.tokenizer", f"gives token id {wrong}, but the model's vocabulary is {vocab}"
            )
        return tuple(ids)

    def ends(self, prompt: Prompt) -> frozenset[int]:
        """The ids that end an answer: those of the model (:func:`ending_ids`), and for a conversation the
        token with which the template ends its answer."""
        if "messages" not in prompt or self.template is None:
            return self._ends
        token = self.template.answer_end(self.specials, prompt["messages"])
        return self._ends if token is None else self._ends | {self.specials[token]}

    @cached_property
    def _ends(self) -> frozenset[int]:
        return frozenset(ending_ids(self._saved.source, self._saved.config.data.tokenizer))

    def _encoded(self, text: str, name: str) -> list[int]:
        try:
            text.encode()
        except (
            UnicodeEncodeError
        ):  # half of a surrogate pair, or bytes on the command line that are not UTF-8
            raise HexadError(f"--prompt: {name} is not Unicode text: {ascii(text)[:60]}") from None
        return self._tokenizer.encode(text)
