"""The microbatch that ``hexad show context`` shows, from the command line."""

from __future__ import annotations

from itertools import accumulate

from hexad.config import Config, ConfigError, HexadError
from hexad.model.configuration import load_config
from hexad.planning import Resolved, planned_layout, resolve
from hexad.show.context import Division
from hexad.show.memory import memory_title

from .options import split_settings

_MOST = 256
"""Context ranks: what each receives of each is computed, a few seconds' work."""


def divided(settings: tuple[str, ...], lengths: str | None, microbatch: int | None) -> Division:
    """A microbatch of a configuration file with overrides, divided among its context ranks.

    Args:
        settings: the command's arguments.
        lengths: of the documents, as given; None: those of the run's data.
        microbatch: of the data, from the run's beginning; None: the first.

    Raises:
        HexadError: the settings are refused, there is one context rank, or documents are not known.
    """
    path, overrides = split_settings("show context", settings)
    if path is None:
        raise HexadError("show context: found no configuration file; give one")
    config = load_config(path, overrides)
    resolved = resolve(config, planned_layout(config))
    config = resolved.config
    if config.parallel.context == 1:
        raise ConfigError(
            "parallel.context", "found 1, one rank holds all tokens; expected 2 or more: parallel.context=4"
        )
    if config.parallel.context > _MOST:
        raise ConfigError(
            "parallel.context",
            f"found {config.parallel.context}, but show context draws at most {_MOST} ranks",
        )
    documents, source = _documents(resolved, lengths, microbatch)
    return Division.of(resolved, memory_title(resolved), documents, source)


def _documents(
    resolved: Resolved, lengths: str | None, microbatch: int | None
) -> tuple[tuple[int, ...] | None, str]:
    """(Where documents begin, and the total, or None where they are joined; where this is from)."""
    config = resolved.config
    if config.data.documents == "join":
        for option, found in (("--lengths", lengths), ("--microbatch", microbatch)):
            if found is not None:
                raise HexadError(
                    f"{option}: found {found} with data.documents join, where attention crosses documents; "
                    "leave it out, or set data.documents=isolate"
                )
        return None, ""
    if lengths is not None:
        if microbatch is not None:
            raise HexadError(f"--microbatch: found {microbatch} beside --lengths; give one of them")
        return _from_lengths(lengths, config.batch.micro, config.data.sequence), "--lengths"
    if config.data.train is None:
        raise HexadError(
            "data.train: found null with data.documents isolate; set it, or give the lengths of documents: "
            "--lengths 300,1200,700"
        )
    return _from_data(config, microbatch or 0), f"microbatch {microbatch or 0:,} of data.train"


def _from_lengths(text: str, sequences: int, length: int) -> tuple[int, ...]:
    """Documents one after the other, cut where a sequence ends; the last one fills the rest."""
    total = sequences * length
    try:
        sizes = [int(part) for part in text.split(",")]
    except ValueError:
        sizes = []
    if not sizes or min(sizes) < 1:
        raise HexadError(f"--lengths: found '{text}', expected numbers of tokens from 1 such as 300,1200,700")
    if sum(sizes) > total:
        raise HexadError(
            f"--lengths: found {sum(sizes):,} tokens, but a microbatch has {total:,} (batch.micro x "
            "data.sequence); give fewer, or change these"
        )
    return tuple(sorted({*range(0, total + 1, length), *accumulate(sizes)}))


def _from_data(config: Config, microbatch: int) -> tuple[int, ...]:
    """The documents of a microbatch of data rank 0.

    Steps of one microbatch hold the same samples as larger ones, so that no more than needed is read.
    """
    from hexad.dataset.load.loader import loader_from_config  # torch
    from hexad.dataset.text.tokenizer import load_tokenizer

    samples = config.batch.micro * int(config.parallel.data)
    config = config.model_copy(update={"batch": config.batch.model_copy(update={"global_": samples})})
    tokenizer = load_tokenizer(config.data.tokenizer)
    with loader_from_config(config, 0, int(config.parallel.data), tokenizer) as loader:
        (found,) = loader.step(microbatch * samples)
    assert found.documents is not None
    return found.documents
