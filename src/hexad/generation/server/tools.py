"""Calls of functions in answers: how a model's chat template writes them is found by rendering one.

Most templates write a call as a name and its arguments in JSON, between texts of their own: Qwen and Hermes
``<tool_call>{"name": ..., "arguments": ...}</tool_call>``, Llama 3 ``{"name": ..., "parameters": ...}``,
Mistral ``[TOOL_CALLS] [{...}]``. These texts, and the spelling of the JSON, are all that is needed to read
answers, and to constrain them. No torch.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, NamedTuple

from hexad.config import HexadError
from hexad.dataset.text.chat import ChatTemplate

from ..grammars import formed, literal, of_lark

# What templates are tried with. Mistral's demand identifiers of nine letters and digits.
_NAMES, _ID, _TEXT, _KEY = ("first_probe", "second_probe"), "hexad000", "Written.", "probe"
_VALUE = {_KEY: "value"}
_JSON = json.JSONDecoder()
_NAME = re.compile(r"[a-zA-Z0-9_.\-]{1,256}")


class FunctionCall(NamedTuple):
    """A call of a function.

    Attributes:
        name: of the function.
        arguments: JSON, as the model has written it.
    """

    name: str
    arguments: str


@dataclass(frozen=True)
class ToolFormat:
    """How a template writes calls: ``begin``, then for each call ``before``, its name, ``middle``, its
    arguments and ``after``, with ``between`` after all but the last, and ``end``.

    Attributes:
        marker: the text in which calls begin; "" where an answer is nothing but calls, which are objects.
        keys: of the name and of the arguments, where a call is an object.
        several: whether an answer may have more than one call.
        spaced: JSON has a space behind ``:`` and ``,``.
    """

    begin: str
    before: str
    middle: str
    after: str
    between: str
    end: str
    keys: tuple[str, str] | None
    several: bool
    spaced: bool

    @property
    def marker(self) -> str:
        """The text with which calls begin."""
        return self.begin.strip()

    @classmethod
    def of(cls, template: ChatTemplate) -> ToolFormat | None:
        """The format of a template; None where it renders no tools, or calls of another form."""
        try:
            one_call = _answer(template, 1)
        except HexadError:
            return None
        try:
            two_calls: str | None = _answer(template, 2)
        except HexadError:  # a template may allow one call only
            two_calls = None
        return _format(one_call, two_calls)

    def specials(self, specials: Mapping[str, int]) -> list[int]:
        """The ids of the special tokens that calls are written with, of those by their text."""
        text = " ".join((self.begin, self.before, self.middle, self.after, self.between, self.end))
        return [number for token, number in specials.items() if token in text]

    def calls(self, text: str) -> tuple[str, list[FunctionCall]]:
        """The text of an answer beside its calls, and the calls. Where they begin with nothing, an answer is
        either text or calls."""
        place = text.find(self.marker)
        if place < 0 or (not self.marker and not text.lstrip().startswith("{")):
            return text, []
        content, place = text[:place], place + len(self.marker)
        calls: list[FunctionCall] = []
        while (read := self._call(text, _next(text, place))) is not None:
            call, place = read
            calls.append(call)
            place = self._passed(text, place)
        rest = text[place:].strip()
        if not calls or (rest and not self.marker):
            return text, []
        return "\n".join(filter(None, (content.rstrip(), rest))), calls

    def _passed(self, text: str, place: int) -> int:
        """The place behind what stands between calls, or behind the last."""
        pieces = [self.between, self.end, self.begin, "," if self.keys else "", "" if self.marker else ";"]
        pieces = [piece.strip() for piece in pieces if piece.strip()]
        while (
            piece := next(
                (candidate for candidate in pieces if text.startswith(candidate, _next(text, place))), ""
            )
        ) != "":
            place = _next(text, place) + len(piece)
        return place

    def _call(self, text: str, start: int) -> tuple[FunctionCall, int] | None:
        """The call at a place, and where it ends."""
        if self.keys is not None:
            return _object(text, start, self.keys)
        name = _NAME.match(text, start)
        middle = self.middle.strip()
        if name is None or not text.startswith(middle, _next(text, name.end())):
            return None
        start = _next(text, _next(text, name.end()) + len(middle))
        end = _end_of_json(text, start)
        return None if end is None else (FunctionCall(name[0], text[start:end]), end)

    def grammar(
        self,
        functions: Sequence[Mapping[str, Any]],
        specials: Mapping[str, int],
        *,
        forced: bool,
        several: bool,
        answer: Mapping[str, Any] | None = None,
    ) -> str:
        """The grammar of answers.

        Args:
            functions: with ``name`` and ``parameters``, a JSON schema; the latter is not enforced where a
                function is not ``strict`` and calls are not forced.
            specials: the ids of tokens that the grammar has to name, by their text.
            forced: the answer is nothing but calls.
            several: there may be more than one.
            answer: the schema of an answer without calls; None for any text.
        """
        form = {"key_separator": ": ", "item_separator": ", "} if self.spaced else {}

        def written(text: str) -> str:
            return _with_specials(text, specials)

        rules = []
        for number, function in enumerate(functions):
            strict = forced or function.get("strict")
            schema = function.get("parameters") if strict else None
            schema = formed(schema if isinstance(schema, dict) else {"type": "object"}, **form)
            parts = written(self.before + str(function["name"]) + self.middle), f"arguments_{number}"
            rules.append(f"call_{number}: {' '.join(parts)} {written(self.after)}")
            rules.append(f"arguments_{number}: %json {json.dumps(schema)}")
        rules.append("call: " + " | ".join(f"call_{number}" for number in range(len(functions))))
        more = f" ({written(self.between)} call)*" if several and self.several else ""
        calls, end = f"call{more}", written(self.end)
        begin, marker = self.begin.lstrip(), self.marker
        if forced:
            rules.append(f"start: {written(begin)} {calls} {end}")
        elif answer is not None:
            rules.append(f"start: {written(begin)} {calls} {end} | answer")
            rules.append(f"answer: %json {json.dumps(answer)}")
        elif not marker:
            rules += [f"start: {calls} | TEXT", r"TEXT: /[^{](.|\n)*/"]
        else:
            lazy = "" if any(map(marker.__contains__, specials)) else "[lazy]"
            rules.append(f"begin{lazy}: TEXT {written(marker)}")
            rest = written(begin[len(marker) :])
            rules += [f"start: (begin {rest} {calls} {end})* TEXT", r"TEXT: /(.|\n)*/"]
        return of_lark("%llguidance {}\n" + "\n".join(rules) + "\n")


def _answer(template: ChatTemplate, calls: int) -> str:
    """The template's text for an answer of calls, from where it differs from an answer of text."""
    parameters = {"type": "object", "properties": {_KEY: {"type": "string", "description": "-"}}}
    described = {"description": "-", "parameters": {**parameters, "required": [_KEY]}}
    tools = [{"type": "function", "function": {"name": name, **described}} for name in _NAMES]
    listed = [
        {"type": "function", "id": f"{_ID}{n}", "function": {"name": _NAMES[n], "arguments": _VALUE}}
        for n in range(calls)
    ]
    answers: list[dict[str, Any]] = [{"content": _TEXT}, {"content": "", "tool_calls": listed}]
    question = {"role": "user", "content": "-"}
    plain, text = (
        template.render([question, {"role": "assistant", **answer}], tools=tools) for answer in answers
    )
    same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(plain, text)))
    end = plain[same:].removeprefix(_TEXT)
    text = text[same:]
    if not text.endswith(end):
        end = next(filter(text.rstrip().endswith, template.ends), "")
        text = text.rstrip()
    return text.removesuffix(end)


def _format(one_call: str, two_calls: str | None) -> ToolFormat | None:
    """The format of the answers with one call and with two."""
    first = _Spelled.of(one_call, _NAMES[0])
    if first is None:
        return None
    keys = _keys(one_call, first.start, _NAMES[0]) if one_call[first.start] == "{" else None
    after = re.sub(rf',\s*"[^"]*":\s*"{_ID}\d"', "", one_call[first.arguments[1] : first.stop])
    between, end, several = "", one_call[first.stop :], False
    if two_calls is not None:
        spelled = [_Spelled.of(two_calls, name) for name in _NAMES]
        if spelled[0] is not None and spelled[1] is not None:
            several, between = True, two_calls[spelled[0].stop : spelled[1].start]
            end = two_calls[spelled[1].stop :]
    before, middle = one_call[first.start : first.name[0]], one_call[first.name[1] : first.arguments[0]]
    if keys is None and not one_call[: first.start].strip():  # calls could not be told from text
        return None
    return ToolFormat(
        one_call[: first.start], before, middle, after, between, end.rstrip(), keys, several, first.spaced
    )


class _Spelled(NamedTuple):
    """The place of a call in a text: of all of it, its name, its arguments."""

    start: int
    stop: int
    name: tuple[int, int]
    arguments: tuple[int, int]
    spaced: bool

    @classmethod
    def of(cls, text: str, name: str) -> _Spelled | None:
        """The call of a function; None if it is not one of JSON arguments behind a name."""
        place = text.find(name)
        for spaced in (True, False):
            value = json.dumps(_VALUE, separators=(", ", ": ") if spaced else (",", ":"))
            behind = text.find(value, place)
            if place < 0 or behind < 0:
                continue
            names, arguments = (place, place + len(name)), (behind, behind + len(value))
            start = text.rfind("{", 0, place)
            stop = _end_of_json(text, start) if start >= 0 else None
            if stop is not None and stop >= arguments[1]:
                return cls(start, stop, names, arguments, spaced)
            return cls(place, arguments[1], names, arguments, spaced)
        return None


def _keys(text: str, start: int, name: str) -> tuple[str, str] | None:
    """The keys of a call's name and arguments."""
    tree, _ = _JSON.raw_decode(text, start)
    by_value = {json.dumps(value): key for key, value in tree.items()}
    keys = by_value.get(json.dumps(name)), by_value.get(json.dumps(_VALUE))
    return keys if None not in keys else None  # type: ignore[return-value]


def _object(text: str, start: int, keys: tuple[str, str]) -> tuple[FunctionCall, int] | None:
    """The call that an object at a place is."""
    if not text.startswith("{", start):
        return None
    try:
        tree, end = _JSON.raw_decode(text, start)
    except (ValueError, RecursionError):
        return None
    # Models confuse the two names of the arguments.
    name = tree.get(keys[0])
    arguments = next((tree[key] for key in (keys[1], "arguments", "parameters") if key in tree), None)
    if not isinstance(name, str) or not isinstance(arguments, dict):
        return None
    return FunctionCall(name, json.dumps(arguments, ensure_ascii=False)), end


def _next(text: str, place: int) -> int:
    """The first place that is not white space."""
    while place < len(text) and text[place].isspace():
        place += 1
    return place


def _end_of_json(text: str, start: int) -> int | None:
    """The index at which the JSON object at a place ends."""
    if not text.startswith("{", start):
        return None
    try:
        return _JSON.raw_decode(text, start)[1]
    except (ValueError, RecursionError):
        return None


def _with_specials(text: str, specials: Mapping[str, int]) -> str:
    """A text as rules of a grammar have it, in which special tokens are tokens."""
    names = sorted(filter(text.__contains__, specials), key=len, reverse=True)
    if not names:
        return literal(text) if text else ""
    parts = re.split("(" + "|".join(map(re.escape, names)) + ")", text)
    return " ".join(f"<[{specials[part]}]>" if part in specials else literal(part) for part in parts if part)


class ToolReader:
    """Reads the calls in one answer while it is written; they are complete at its end.

    Args:
        form: of the template.
    """

    def __init__(self, form: ToolFormat) -> None:
        self._form, self._pending = form, ""
        self._calling = self._text = False

    def add(self, text: str) -> str:
        """Add to the answer; returns the new text that is no part of a call."""
        self._pending += text
        marker, start = self._form.marker, self._pending.lstrip()
        if self._calling or not start:
            return ""
        if marker:
            place = self._pending.find(marker)
            self._calling = place >= 0
            if not self._calling:
                place = len(self._pending) - _overlap(self._pending, marker)
        else:
            self._text = self._text or not start.startswith("{")
            self._calling = not self._text
            place = 0 if self._calling else len(self._pending)
        # White space before calls is no part of the text.
        shown = self._pending[:place].rstrip()
        self._pending = self._pending[len(shown) :]
        return shown

    def end(self) -> tuple[str, list[FunctionCall]]:
        """The rest of the text, and the calls, after the last of the answer."""
        return self._form.calls(self._pending) if self._calling else (self._pending, [])


def _overlap(text: str, marker: str) -> int:
    """Characters at the end of a text with which a marker may begin."""
    most = min(len(text), len(marker) - 1)
    return next((size for size in range(most, 0, -1) if text.endswith(marker[:size])), 0)
