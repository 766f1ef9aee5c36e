"""From prompts or conversations to texts: many at once, several samples of each, ended by a text or the end
of a document, in the world this process belongs to."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any, Literal

from hexad.comm import agreed
from hexad.config import ConfigError
from hexad.dataset.text.tokenizer import Tokenizer
from hexad.model.transformer import Transformer
from hexad.planning import Resolved
from hexad.planning.saved_model import Prompt, SavedModel, encoded, ending_ids
from hexad.topology.mesh import Axis, Mesh

from .generator import Sampling, generate_all, load_model


@dataclass(frozen=True)
class Continuation:
    """One text that a model has written.

    Attributes:
        number: of its prompt, among the prompts.
        sample: its number among those of the prompt.
        text: without the prompt, and without what ended it.
        tokens: the new ids, with what ended them.
        ended: by a token that ends a ``document`` or an answer, a ``stop`` text, or the ``length``.
        prompt: the text or the messages that it continues; None where ids were given.
    """

    number: int
    sample: int
    text: str
    tokens: list[int]
    ended: Literal["document", "stop", "length"]
    prompt: Any = None


@dataclass(frozen=True)
class Wanted:
    """The settings of a generation: how much is written, and how.

    Attributes:
        tokens: new ids at most.
        sampling: how they are chosen; every sample of every prompt has random numbers of its own.
        samples: of each prompt.
        stop: texts at which one ends.
        batch: texts written at once.

    Raises:
        ConfigError: a number below 1, several samples that would all be the same, an empty text to
            stop at, or one that is not Unicode.
    """

    tokens: int = 128
    sampling: Sampling = Sampling()  # noqa: RUF009 (frozen)
    samples: int = 1
    stop: tuple[str, ...] = ()
    batch: int = 16

    def __post_init__(self) -> None:
        for name in ("tokens", "samples", "batch"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigError(f"--{name}", f"found {value!r}, expected an integer of at least 1")
        if self.samples > 1 and self.sampling.temperature == 0:
            raise ConfigError(
                "--samples",
                f"found {self.samples} with --temperature 0, where all are the same; set one above 0",
            )
        if "" in self.stop:
            raise ConfigError("--stop", "found an empty text; leave it out")
        for text in self.stop:
            try:
                text.encode()
            except (AttributeError, UnicodeEncodeError):
                raise ConfigError("--stop", f"found {ascii(text)[:60]}, which is not Unicode text") from None


def write(
    model: Transformer,
    tokenizer: Tokenizer,
    prompts: Sequence[list[int]],
    wanted: Wanted,
    pipeline: Axis | None = None,
    ends: Sequence[frozenset[int]] = (),
) -> Iterator[Continuation]:
    """Continue prompts, given by their ids, in their order, each with all its samples; all ranks together.

    ``pipeline`` is the axis of the stages; ``ends`` are, of every prompt, the ids that end a text beside the
    tokenizer's end of a document.

    Raises:
        HexadError: as for :func:`~hexad.generation.generator.generate_all`.
    """
    specials = tokenizer.specials
    stop = tuple(text for text in wanted.stop if text not in specials)
    common = {tokenizer.eod, *(specials[text] for text in wanted.stop if text in specials)}
    ending = [common | (ends[number] if ends else set()) for number in range(len(prompts))]
    tasks = [(number, sample) for number in range(len(prompts)) for sample in range(wanted.samples)]
    for begin in range(0, len(tasks), wanted.batch):
        group = tasks[begin : begin + wanted.batch]

        def ended(row: int, new: list[int], group: list[tuple[int, int]] = group) -> bool:
            return new[-1] in ending[group[row][0]] or _stopped(tokenizer, new, stop)

        numbers = [prompts[number] for number, _ in group]
        seeds = [stream(wanted.sampling.seed, sample, ids) for (_, sample), ids in zip(group, numbers)]
        ids = generate_all(model, numbers, wanted.tokens, wanted.sampling, ended, seeds, pipeline)
        for (number, sample), new in zip(group, ids):
            text = tokenizer.decode(new)
            reason: Literal["document", "stop", "length"]
            reason = "document" if new[-1] in ending[number] else "length"
            if places := [place for place in map(text.find, stop) if place >= 0]:
                text, reason = text[: min(places)], "stop"
            yield Continuation(number, sample, text, new, reason)


def stream(seed: int, sample: int, prompt: Sequence[int]) -> int:
    """The seed of a sample's random numbers, which follows from its prompt's ids, not from other prompts."""
    text = f"{seed} {sample} {' '.join(map(str, prompt))}"
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def _stopped(tokenizer: Tokenizer, new: list[int], stop: Sequence[str]) -> bool:
    """Whether one of the texts is complete with the last id: looked for where it can have ended, as every id
    but those of special tokens stands for at least a byte."""
    if not stop:
        return False
    longest = max(len(text.encode()) for text in stop)
    tail = tokenizer.decode(new[-longest - 8 :])
    return any(text in tail for text in stop)


log = logging.getLogger("hexad")


def generated(
    mesh: Mesh,
    resolved: Resolved,
    saved: SavedModel,
    prompts: Sequence[Prompt],
    wanted: Wanted,
    warn: Callable[[str], object] = log.warning,
) -> Iterator[Continuation]:
    """Continue prompts in their order; all ranks iterate together and get the same.

    Args:
        mesh, resolved: of :func:`hexad.launch` with ``saved.config``.
        saved: from :func:`~hexad.planning.saved_model.generating_model`.
        warn: called on the first rank for positions that the model was not made for.

    Raises:
        HexadError: the model or a prompt cannot be used.
    """
    tokenizer = agreed(saved.tokenizer, mesh.world)
    ids = agreed(lambda: encoded(prompts, saved.config, tokenizer), mesh.world)
    longest = max(map(len, ids), default=0) + wanted.tokens
    if mesh.rank == 0 and longest > saved.positions:
        warn(
            f"prompt and new tokens reach {longest} positions, the model was made for {saved.positions} "
            "(model.max_positions)"
        )
    model = load_model(resolved.config, saved.weights, mesh, resolved.plan.layers)
    ends = agreed(lambda: ending_ids(prompts, saved, tokenizer), mesh.world)
    for text in write(model, tokenizer, ids, wanted, mesh.pipeline, ends):
        entry = prompts[text.number]
        yield replace(text, prompt=entry["prompt"] if "prompt" in entry else entry["messages"])
