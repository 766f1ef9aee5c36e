"""``hexad tokenizer``: train a tokenizer, and show what one does."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import click

from hexad.config import HexadError

from .data import ManyValues, input_options
from .options import answer, json_option, progress_bar


@click.group("tokenizer")
def tokenizer() -> None:
    """Train and show tokenizers."""


@tokenizer.command("train", cls=ManyValues)
@input_options
@click.option("--vocab", type=click.IntRange(1, 2**24), required=True, help="Ids to learn, such as 32000.")
@click.option("--output", metavar="DIR", required=True, help="The tokenizer's directory; it must not exist.")
@click.option(
    "--special-token",
    "special",
    metavar="TOKEN...",
    multiple=True,
    help="Further special tokens beside <|endoftext|>, as in --special-token '<|im_start|>' '<|im_end|>'.",
)
@click.option(
    "--min-frequency",
    type=click.IntRange(0, 2**32),
    default=2,
    show_default=True,
    help="How often a pair must occur to become a token.",
)
@click.option("--chat-template", metavar="FILE", help="A Jinja2 template to store with the tokenizer.")
@json_option
def train_command(
    inputs: tuple[str, ...],
    include: tuple[str, ...],
    exclude: tuple[str, ...],
    json_key: str | None,
    vocab: int,
    output: str,
    special: tuple[str, ...],
    min_frequency: int,
    chat_template: str | None,
    as_json: bool,
) -> None:
    """Train a byte-level BPE tokenizer and save it as Hugging Face's.

    It reads what 'hexad data build' reads: text, .jsonl and .parquet, of conversations the messages.
    """
    from hexad.checkpoint.hugging_face.files import appearing
    from hexad.dataset.text.chat import load_chat_template
    from hexad.dataset.text.tokenizer import load_tokenizer
    from hexad.dataset.text.tokenizer_training import train_bpe, training_texts

    template = load_chat_template("byte", chat_template)
    documents = size = 0

    def counted(texts: Iterable[str]) -> Iterator[str]:
        nonlocal documents
        for text in texts:
            documents += bool(text)
            yield text

    source = "" if template is None else template.source
    with progress_bar() as bar:
        task = bar.add_task("reading", total=None)

        def report(done: int, total: int) -> None:
            nonlocal size
            size = total
            bar.update(task, completed=done, total=total)
            if done == total:
                bar.update(task, description=f"learning {vocab:,} tokens")

        with appearing(Path(output), "output") as directory:
            texts = training_texts(
                inputs, json_key=json_key, include=include, exclude=exclude, progress=report
            )
            train_bpe(
                counted(texts),
                vocab,
                directory,
                special_tokens=special,
                min_frequency=min_frequency,
                chat_template=source or None,
            )
    trained = load_tokenizer(output)
    notes = _notes(trained.vocab_size, vocab, source, trained.specials)
    facts = {"path": trained.name, "vocab": trained.vocab_size, "documents": documents}
    text = f"{output}: vocabulary {trained.vocab_size:,}, from {documents:,} documents"
    answer(
        as_json,
        {**facts, "bytes_read": size, "special_tokens": trained.specials, "notes": notes},
        f"{text} ({size:,} bytes)",
        *(f"note: {note}" for note in notes),
    )


def _notes(learned: int, wanted: int, template: str, special: dict[str, int]) -> list[str]:
    import re

    notes = []
    if learned < wanted:
        notes.append(f"{learned:,} instead of {wanted:,} ids: no further pair occurs often enough")
    written = dict.fromkeys(re.findall(r"<\|[^|<>\s]+\|>", template))
    missing = [token for token in written if token not in special]
    if missing:
        notes.append(
            f"the chat template writes {', '.join(missing)}, which are several tokens each; make them "
            f"special: --special-token {' '.join(map(repr, missing))}"
        )
    return notes


@tokenizer.command("show")
@click.argument("spec", metavar="byte|PATH")
@click.option("--text", help="Show the tokens of this text.")
@json_option
def show_command(spec: str, text: str | None, as_json: bool) -> None:
    """Show a tokenizer's vocabulary, special tokens and chat template, and the tokens of a text."""
    from hexad.dataset.text.chat import load_chat_template
    from hexad.dataset.text.tokenizer import load_tokenizer

    loaded = load_tokenizer(spec)
    template = load_chat_template(loaded.name)
    facts: dict[str, Any] = {
        "tokenizer": loaded.name,
        "kind": loaded.kind,
        "vocab": loaded.vocab_size,
        "eod": loaded.eod,
        "bos": list(loaded.bos),
        "special_tokens": loaded.specials,
        "chat_template": template.name if template is not None else None,
    }
    if text is not None:
        try:
            text.encode()
        except UnicodeEncodeError:
            raise HexadError("--text: found bytes that are not UTF-8") from None
        (tokens,) = loaded.encode_offsets([text])
        facts["tokens"] = [{"id": int(token), "text": text[begin:end]} for token, begin, end in zip(*tokens)]
    names = ", ".join(f"{name} {number}" for name, number in loaded.specials.items())
    shown = {**facts, "special_tokens": names or "none", "bos": ", ".join(map(str, loaded.bos)) or "none"}
    if text is not None:
        shown["tokens"] = f"{len(facts['tokens'])} of {len(text.encode())} bytes"
    lines = []
    for name, value in shown.items():
        value = "none" if value is None else f"{value:,}" if name == "vocab" else value
        lines.append(f"{name.replace('_', ' '):<16}{value}")
    lines += [f"{token['id']:>8}  {token['text']!r}" for token in facts.get("tokens", ())]
    answer(as_json, facts, *lines)
