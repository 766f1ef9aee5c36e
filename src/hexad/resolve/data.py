"""A run's tokenizer and data, opened before any process is started. No torch."""

from __future__ import annotations

from hexad.checkpoint.kept_tokenizer import tokenizer_of_run
from hexad.config import Config, ConfigError, blaming
from hexad.dataset.sidecar import open_built
from hexad.dataset.tokenizer import bos_ids, load_tokenizer
from hexad.dataset.whole_samples import check_samples


def check_data(config: Config) -> int:
    """Open what a run reads, as its ranks will, without reading tokens; returns the tokenizer's vocabulary
    size.

    Raises:
        ConfigError: the tokenizer or a data set cannot be used, or they do not fit together.
    """
    settings, model = config.data, config.model
    with blaming("data.tokenizer"):
        tokenizer = load_tokenizer(tokenizer_of_run(config))
    if settings.train is None:
        raise ConfigError("data.train", "found null, expected a .bin/.idx prefix or [[weight, prefix], ...]")
    wanted = {"data.train": settings.train}
    if config.validate_.every:
        sets, several = settings.validation_sets, isinstance(settings.validation, dict)
        wanted |= {f"data.validation.{name}" if several else "data.validation": sets[name] for name in sets}
    # A model.vocab below the tokenizer's is refused by resolve, which says so.
    vocab = tokenizer.vocab_size if model.vocab == "auto" else max(model.vocab, tokenizer.vocab_size)
    bos = bos_ids(tokenizer, settings.bos)
    for field, data in wanted.items():
        for _, prefix in [(1.0, data)] if isinstance(data, str) else data:
            with blaming(field):
                opened = open_built(prefix, vocab, tokenizer.eod, bos)
                check_samples(opened, settings.packing, settings.sequence, settings.too_long)
    return tokenizer.vocab_size
