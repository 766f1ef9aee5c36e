"""Turn a record of a file into a document: its text, and which part of the text is trained."""

from dataclasses import dataclass
from typing import Any, NamedTuple

from hexad.config.errors import HexadError, did_you_mean

from ..text.chat import ChatTemplate
from .sources import Place, Record, kind_of

TextSpan = tuple[int, int]

_KEYS = (
    "messages", "prompt", "completion", "text", "conversations", "system", "instruction", "input", "output",
    "history",
)  # fmt: skip
_SPEAKERS = {"human": "user", "gpt": "assistant"}
"""ShareGPT's names of roles that others have other names for."""
_WEIGHTS = ("weight", "train", "loss")
"""Keys of answers that say whether they are trained, of several tools."""


class Document(NamedTuple):
    """A text to tokenize.

    Attributes:
        text: all of it.
        trained: the characters whose tokens have a loss, as (start, stop); None: all, and the tokens around
            the text too.
        framed: whether the tokens that begin and end a document are put around it; a chat template writes its
            own.
    """

    text: str
    trained: tuple[TextSpan, ...] | None = None
    framed: bool = True


@dataclass(frozen=True)
class Reading:
    """Settings with which records are read.

    Attributes:
        key: that of the text or conversation; None: by the keys that a record has.
        template: of conversations; None where the tokenizer has none.
        no_template: the message for a conversation then.
    """

    key: str | None = None
    template: ChatTemplate | None = None
    no_template: str = "conversations need a chat template (``chat_template`` FILE)"

    @property
    def columns(self) -> list[str]:
        """Columns that are read of a .parquet file, which must have one of them."""
        return list(_KEYS) if self.key is None else [self.key]

    def document(self, record: Record) -> Document:
        """The document of a record; its text may be empty.

        Raises:
            HexadError: the record holds no document; names file and line.
        """
        content, place = record
        if isinstance(content, str):
            return Document(content)
        document = self._of_object(content, place)
        if not document.text.isascii():
            try:
                document.text.encode()
            except UnicodeEncodeError as error:
                bad = ord(document.text[error.start])
                raise HexadError(f"{place}: \\u{bad:04x} is a lone surrogate, not a character") from None
        return document

    def _of_object(self, content: dict[str, Any], place: Place) -> Document:
        if place.kind == "row" and (self.key not in content if self.key is not None else not content):
            return Document("")  # a missing value of a table
        if self.key is not None:
            if self.key not in content:
                raise HexadError(f"{place}: no key '{self.key}' (``json_key``); {_keys(content)}")
            value = content[self.key]
            if isinstance(value, list):
                return self._conversation(self.key, content, place)
            return Document(_text(self.key, content, place))
        known = ("messages", "conversations", "completion", "text", "instruction")
        kinds = [kind for kind in known if kind in content and (kind != "instruction" or "output" in content)]
        if len(kinds) > 1:
            # Of the others --json-key would read a part only.
            single = [repr(kind) for kind in kinds if kind in ("messages", "conversations", "text")]
            choose = f"choose {' or '.join(single)} with ``json_key``, or " if single else ""
            raise HexadError(f"{place}: has {' and '.join(map(repr, kinds))}; {choose}remove one")
        for key in ("messages", "conversations"):
            if key in content:
                return self._conversation(key, content, place)
        if "completion" in content:
            return self._completion(content, place)
        if "instruction" in kinds:
            return self._answered({**content, "messages": _instructed(content, place)}, "messages", 0, place)
        if "text" in content:
            return Document(_text("text", content, place))
        if "prompt" in content:
            raise HexadError(f"{place}: a 'prompt' without 'completion'; {_keys(content)}")
        raise HexadError(
            f"{place}: none of 'text', 'messages', 'conversations', 'prompt' and 'completion', or "
            f"'instruction' and 'output'; {_keys(content)}; choose one with ``json_key``"
        )

    def _conversation(self, key: str, content: dict[str, Any], place: Place) -> Document:
        messages = content[key]
        if isinstance(messages, list):
            messages = [_named_as_here(message) for message in messages]
            if key == "conversations" and content.get("system"):
                messages = [{"role": "system", "content": _text("system", content, place)}, *messages]
        return self._answered({**content, key: messages}, key, 0, place)

    def _completion(self, content: dict[str, Any], place: Place) -> Document:
        if "prompt" not in content:
            raise HexadError(f"{place}: a 'completion' without 'prompt'; {_keys(content)}")
        prompt, completion = content["prompt"], content["completion"]
        if isinstance(prompt, list) and isinstance(completion, list):
            for key in ("prompt", "completion"):
                check_messages(key, content[key], place, self.template)
            both = {**content, "completion": [*prompt, *completion]}
            return self._answered(both, "completion", len(prompt), place)
        prompt, completion = _text("prompt", content, place), _text("completion", content, place)
        if not completion:
            raise HexadError(f"{place}: 'completion' is empty: nothing to train on")
        return Document(prompt + completion, ((len(prompt), len(prompt) + len(completion)),))

    def _answered(self, content: dict[str, Any], key: str, first: int, place: Place) -> Document:
        """The document of a conversation, of which answers from message ``first`` on are trained."""
        messages = content[key]
        check_messages(key, messages, place, self.template)
        answers = [
            number for number, message in enumerate(messages[first:], first) if message["role"] == "assistant"
        ]
        if not answers:
            raise HexadError(f"{place}: '{key}' has no message with role 'assistant': nothing to train on")
        for number in answers:
            if not any(value for name, value in messages[number].items() if name != "role"):
                raise HexadError(f"{place}: {key}[{number}]: the answer is empty: nothing to train on")
            for name in _WEIGHTS:
                if (weight := messages[number].get(name)) not in (None, 1):
                    raise HexadError(
                        f"{place}: {key}[{number}]: its '{name}' is {weight!r}, but every answer is trained "
                        "with weight 1; remove the key, or end the conversation before this answer"
                    )
        if self.template is None:
            raise HexadError(f"{place}: {self.no_template}")
        tools = content.get("tools")
        if tools is not None and not isinstance(tools, list):
            raise HexadError(f"{place}: 'tools' is {kind_of(tools)}, expected a list of function schemas")
        try:
            text, spans = self.template.conversation(messages, tools, first)
        except HexadError as error:
            raise HexadError(f"{place}: {error}") from None
        return Document(text, spans, framed=False)


def _named_as_here(message: Any) -> Any:
    """A message of ShareGPT's form, ``{"from": ..., "value": ...}`` and perhaps other keys, with the usual
    names; others as they are."""
    if not isinstance(message, dict) or not {"from", "value"} <= set(message) or "role" in message:
        return message
    others = {name: value for name, value in message.items() if name not in ("from", "value")}
    speaker = message["from"]
    role = _SPEAKERS.get(speaker, speaker) if isinstance(speaker, str) else speaker
    return {"role": role, "content": message["value"], **others}


def _instructed(content: dict[str, Any], place: Place) -> list[dict[str, Any]]:
    """The messages of a record of Alpaca's form: ``instruction``, ``output``, and perhaps ``input``,
    ``system`` and ``history`` (a list of questions with their answers)."""

    def text(key: str) -> str:
        return _text(key, content, place) if content.get(key) is not None else ""

    history = content.get("history") or []
    if not isinstance(history, list) or not all(
        isinstance(turn, list) and len(turn) == 2 for turn in history
    ):
        raise HexadError(f"{place}: 'history' is not a list of [question, answer]")
    question = "\n".join(part for part in (_text("instruction", content, place), text("input")) if part)
    messages = [{"role": "system", "content": text("system")}] if text("system") else []
    for asked, answer in [*history, [question, text("output")]]:
        messages += [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]
    return messages


def _text(key: str, content: dict[str, Any], place: Place) -> str:
    value = content[key]
    if isinstance(value, str):
        return value
    raise HexadError(f"{place}: '{key}' is {kind_of(value)}, expected text")


def check_messages(key: str, messages: Any, place: Place | str, template: ChatTemplate | None) -> None:
    """Refuse messages that no template can render; ``template`` may name more roles than the usual ones.

    Raises:
        HexadError: naming place, ``key`` and message.
    """
    if not isinstance(messages, list):
        raise HexadError(f"{place}: '{key}' is {kind_of(messages)}, expected a list of messages")
    if not messages:
        raise HexadError(f"{place}: '{key}' is empty: a conversation has at least one message")
    for number, message in enumerate(messages):
        # The place is formatted only for an error: that counts the lines of the file.
        problem = _message_problem(message, template)
        if problem is not None:
            raise HexadError(f"{place}: {key}[{number}]{problem}")


def _message_problem(message: Any, template: ChatTemplate | None) -> str | None:
    """The problem of a message that no template can render, if there is one."""
    if not isinstance(message, dict):
        return f" is {kind_of(message)}, expected {{'role': ..., 'content': ...}}"
    role = message.get("role")
    if not isinstance(role, str):
        problem = "no 'role'" if role is None else f"role {role!r}"
        return f" has {problem}, expected 'role' and 'content'; {_keys(message)}"
    roles = ChatTemplate.ROLES
    if role not in roles and not (template is not None and template.mentions(role)):
        return f": role '{role}' is unknown" + (did_you_mean(role, roles) or f"; known: {', '.join(roles)}")
    content = message.get("content")
    if content is None and not message.get("tool_calls"):
        return (
            ": its content is null, expected text"
            if "content" in message
            else (f" has no 'content'; {_keys(message)}")
        )
    if isinstance(content, list):
        for part in content:
            if not isinstance(part, dict) or part.get("type") != "text":
                kind = part.get("type") if isinstance(part, dict) else kind_of(part)
                return f": its content has a part of type {kind!r}, expected 'text'"
    elif content is not None and not isinstance(content, str):
        return f": its content is {kind_of(content)}, expected text"
    return None


def _keys(content: dict[str, Any]) -> str:
    return "keys found: " + (", ".join(f"'{key}'" for key in list(content)[:8]) or "none")
