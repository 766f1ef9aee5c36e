"""Chat templates as ``transformers`` renders them (Jinja2, sandboxed), and what the assistant writes."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any

from hexad.config.errors import HexadError, one_line
from hexad.config.files import read_bounded, read_json

from ..files import reporting
from .hostile_tokenizer import LARGEST_FILE
from .special_tokens import declared_tokens, token_text, tokenizer_settings

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
_REASONING = ("reasoning_content", "thinking", "reasoning")
"""Names of a message's reasoning; templates read the first."""
_DEFAULT, _TOOLS = "default", "tool_use"
_FILE, _FOLDER = "chat_template.jinja", "additional_chat_templates"
ChatMessage = Mapping[str, Any]
CharacterSpan = tuple[int, int]
LARGEST_TEMPLATE = 256 << 10
"""Characters of a template's source; published ones have at most some 30,000."""
_QUESTION: tuple[ChatMessage, ...] = ({"role": "user", "content": "-"},)


@dataclass(frozen=True)
class ChatTemplate:
    """A template, and the special tokens that it may write.

    Attributes:
        source: in Jinja2's language.
        tool_source: another one for conversations with tools; None: the same.
        name: of the file it is from, for messages.
        special: such as ``eos_token``, as text.
        ends: texts of all special tokens: one that ends a turn is trained, the whitespace after it is not.
    """

    source: str
    name: str
    special: Mapping[str, str] = field(default_factory=dict)
    ends: tuple[str, ...] = ()
    tool_source: str | None = None

    @property
    def named(self) -> dict[str, str]:
        """The sources by the names that they have in a tokenizer's files."""
        return {_DEFAULT: self.source} | ({} if self.tool_source is None else {_TOOLS: self.tool_source})

    ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython")
    """Usual roles; a template may name others."""

    def mentions(self, role: str) -> bool:
        """Whether the template names a role."""
        return f"'{role}'" in self.source or f'"{role}"' in self.source

    def check(self) -> None:
        """Refuse a template that is not Jinja2.

        Raises:
            HexadError: naming the line.
        """
        import jinja2

        try:
            for source in (self.source, self.tool_source):
                _compiled(source or "")
        except jinja2.TemplateSyntaxError as error:
            problem = " ".join((error.message or "").split())
            raise HexadError(f"{self.name}:{error.lineno}: not a chat template: {problem}") from None
        except Exception as error:  # nested too deeply, a number with too many digits, too large
            raise HexadError(f"{self.name}: not a chat template: {one_line(error)}") from None

    def render(
        self,
        messages: Sequence[ChatMessage],
        *,
        prompt: bool = False,
        tools: list[Any] | None = None,
        values: Mapping[str, Any] | None = None,
        continued: bool = False,
    ) -> str:
        """The text of a conversation, as ``apply_chat_template(..., tokenize=False)`` renders it.

        Args:
            messages: of the conversation.
            prompt: the beginning of the assistant's answer follows (``add_generation_prompt``).
            tools: schemas of functions that the assistant may call.
            values: other variables of the template, such as ``enable_thinking``.
            continued: the text ends with the last message's content (``continue_final_message``).

        Raises:
            HexadError: the template refuses the conversation or fails, or has no place for ``tools`` or for
                the message that is continued.
        """
        self._check_tools(tools)
        text = self._rendered(messages, tools, prompt, values)[0]
        if not continued:
            return text
        last = messages[-1].get("content")
        place = text.rfind(last.strip()) if isinstance(last, str) and last.strip() else -1
        if place < 0 or not isinstance(last, str):
            problem = f"the chat template of {self.name} does not render the last message's content"
            raise HexadError(f"{problem}, which is to be continued")
        # A template may remove white space around it.
        kept = last.lstrip()
        return text[: place + len(kept if text.startswith(kept, place) else last.strip())]

    def conversation(
        self, messages: Sequence[ChatMessage], tools: list[Any] | None = None, first: int = 0
    ) -> tuple[str, tuple[CharacterSpan, ...]]:
        """The text of a conversation, and the characters that the assistant writes from message ``first`` on,
        ends of turns included.

        They are the ``{% generation %}`` blocks of a template that has them. Of others, each answer is what
        the text up to it has beyond that of the messages before it, rendered with the beginning of an answer.

        Raises:
            HexadError: as for :meth:`render`, these texts do not continue one another, or the template has no
                place for ``tools``.
        """
        source = self._source(tools)
        self._check_tools(tools)
        text, blocks = self._rendered(messages, tools, False)
        answers = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
        if _GENERATION.search(source):
            if first and len(blocks) != len(answers):
                raise HexadError(
                    f"the chat template of {self.name} marks {len(blocks)} answers of {len(answers)}, so "
                    "that those of the prompt cannot be distinguished"
                )
            blocks = blocks[sum(number < first for number in answers) :] if first else blocks
            return text, tuple(span for span in blocks if span[0] < span[1])
        spans = []
        for number in answers:
            if number < first:
                continue
            before = self._rendered(messages[:number], tools, True)[0]
            last = number + 1 == len(messages)
            until = text if last else self._rendered(messages[: number + 1], tools, False)[0]
            if not until.startswith(before) or not text.startswith(until):
                raise HexadError(
                    f"messages[{number}]: the chat template of {self.name} does not render this answer as a "
                    "continuation of the messages before it, so that its tokens cannot be told apart; give a "
                    "template that marks answers by {% generation %} blocks (``chat_template`` FILE)"
                )
            spans.append((len(before), len(before) + self._length(until[len(before) :])))
        return text, tuple(spans)

    def answer_end(self, specials: Iterable[str], messages: Sequence[ChatMessage] = _QUESTION) -> str | None:
        """The special token with which an answer to some messages ends, if one does."""
        try:
            text, spans = self.conversation([*messages, {"role": "assistant", "content": "-"}])
        except HexadError:  # a template for which answers cannot be told apart
            return None
        answer = text[slice(*spans[-1])] if spans else ""
        return max(filter(answer.endswith, specials), key=len, default=None)

    def _check_tools(self, tools: list[Any] | None) -> None:
        if tools and "tools" not in self._source(tools):
            raise HexadError(
                f"has 'tools', which the chat template of {self.name} does not render; leave them out, or "
                "give another template (``chat_template`` FILE)"
            )

    def _source(self, tools: list[Any] | None) -> str:
        """The template of conversations with these tools."""
        return self.source if tools is None or self.tool_source is None else self.tool_source

    def _length(self, answer: str) -> int:
        """Length of an answer with the token that ends it; the line break after it is the template's."""
        end = answer.rstrip()
        return len(end) if end.endswith(self.ends) else len(answer)

    def _rendered(
        self,
        messages: Sequence[ChatMessage],
        tools: list[Any] | None,
        prompt: bool,
        values: Mapping[str, Any] | None = None,
    ) -> tuple[str, list[CharacterSpan]]:
        """The text, and the ranges of its ``{% generation %}`` blocks."""
        from .chat_extension import MARKS, Marks

        self.check()
        template = _compiled(self._source(tools))
        parts: list[str] = []
        marks = Marks()
        variables = {
            **self.special,
            **(values or {}),
            MARKS: marks,
            "messages": [_plain(message) for message in messages],
            "tools": tools,
            "documents": None,
            "add_generation_prompt": prompt,
        }
        try:
            for part in template.generate(**variables):
                parts.append(part)
                marks.length += len(part)  # blocks are placed after the parts before
        except Exception as error:  # a template may raise anything
            silent = [n for n, message in enumerate(messages) if message.get("content") is None]
            hint = f'; messages[{silent[0]}] has no content: the template may need ""' if silent else ""
            raise HexadError(
                f"the chat template of {self.name} refuses the conversation: {one_line(error)}{hint}"
            ) from None
        return "".join(parts), marks.blocks


def _plain(message: ChatMessage) -> dict[str, Any]:
    """A message as templates expect it: no null values, reasoning under its usual names."""
    values = {key: value for key, value in message.items() if value is not None}
    reasoning = next((values[key] for key in _REASONING if key in values), None)
    if reasoning is None:
        return values
    return {"thinking": reasoning, **values, "reasoning_content": reasoning}


@lru_cache(maxsize=8)
def _compiled(source: str) -> Any:
    """The template compiled in the environment of ``transformers`` (``utils/chat_template_utils.py`` of
    5.23): globals, filters and handling of blocks are part of the format."""
    import jinja2.ext

    from .chat_extension import Generation
    from .chat_sandbox import BoundedSandbox, TemplateLimit

    if len(source) > LARGEST_TEMPLATE:
        raise TemplateLimit(f"found {len(source):,} characters, expected at most {LARGEST_TEMPLATE:,}")

    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(
        value: Any,
        ensure_ascii: bool = False,
        indent: Any = None,
        separators: Any = None,
        sort_keys: bool = False,
    ) -> str:
        # Jinja2's own filter escapes HTML.
        return json.dumps(
            value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
        )

    environment = BoundedSandbox(
        {"tojson": tojson},
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[Generation, jinja2.ext.loopcontrols],
    )
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment.from_string(source)


def load_chat_template(tokenizer: str, file: str | None = None) -> ChatTemplate | None:
    """The chat template of a tokenizer, or of a file; None where the tokenizer has none.

    Args:
        tokenizer: as for :func:`~hexad.dataset.text.tokenizer.load_tokenizer`: ``chat_template.jinja`` or
            ``chat_template`` of ``tokenizer_config.json`` beside it, and its special tokens.
        file: a Jinja2 template instead.

    Raises:
        HexadError: a file cannot be read, or ``file`` is not a template.
    """
    directory = None
    if tokenizer != "byte":
        directory = Path(tokenizer) if Path(tokenizer).is_dir() else Path(tokenizer).parent
    settings = tokenizer_settings(directory) if directory is not None else {}
    texts = {name: token_text(value) for name, value in settings.items() if name.endswith("_token")}
    special = {name: text for name, text in texts.items() if isinstance(text, str)}
    ends = tuple(dict.fromkeys(_special(directory))) if directory is not None else ()
    if file is not None:
        template = ChatTemplate(_read(Path(file)), file, special, ends)
        template.check()
        return template
    if directory is None:
        return None
    name, named = _templates(directory, settings)
    if _DEFAULT not in named:
        return None
    return ChatTemplate(named[_DEFAULT], name, special, ends, named.get(_TOOLS))


def template_files(named: Mapping[str, str]) -> dict[str, bytes]:
    """Templates by name, as :attr:`ChatTemplate.named` has them, as files of a tokenizer's directory."""
    names = {_DEFAULT: _FILE, _TOOLS: f"{_FOLDER}/{_TOOLS}.jinja"}
    return {file: named[name].encode() for name, file in names.items() if name in named}


def _templates(directory: Path, settings: Mapping[str, Any]) -> tuple[str, dict[str, str]]:
    """(the file that has the default one, a tokenizer's templates by name)."""
    beside = directory / _FILE
    more = sorted((directory / _FOLDER).glob("*.jinja"))
    if beside.is_file():
        return str(beside), {_DEFAULT: _read(beside), **{path.stem: _read(path) for path in more}}
    templates = settings.get("chat_template")
    if isinstance(templates, str):
        templates = [{"name": _DEFAULT, "template": templates}]
    entries = [entry for entry in templates if isinstance(entry, dict)] if isinstance(templates, list) else []
    named = {str(entry.get("name")): str(entry.get("template")) for entry in entries}
    return str(directory / "tokenizer_config.json"), named


def _special(directory: Path) -> list[str]:
    """The texts of a tokenizer's special tokens."""
    declared = [token.content for token in declared_tokens(directory) if token.flags.get("special")]
    try:
        tree = read_json(directory / "tokenizer.json", LARGEST_FILE)
        entries = tree.get("added_tokens") or []
    except (OSError, ValueError, AttributeError):
        entries = []  # loading the tokenizer reports that
    listed = (
        (entry for entry in entries if isinstance(entry, dict) and entry.get("special"))
        if isinstance(entries, list)
        else ()
    )
    return [*declared, *(str(entry.get("content")) for entry in listed)]


def _read(path: Path) -> str:
    try:
        with reporting(path):
            return read_bounded(path, 4 * LARGEST_TEMPLATE).decode("utf-8")
    except UnicodeDecodeError:
        raise HexadError(f"{path}: not UTF-8 text; expected a chat template in Jinja2's language") from None
