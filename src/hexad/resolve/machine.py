"""What a run needs of the machine it starts on: packages, tokenizer and data. No torch: checked before any
process is started."""

from __future__ import annotations

from importlib.util import find_spec

from hexad.checkpoint.kept_tokenizer import tokenizer_of_run, training_templates
from hexad.config import Config, ConfigError, blaming
from hexad.dataset.sidecar import open_built, prefixes
from hexad.dataset.tokenizer import bos_ids, load_tokenizer
from hexad.dataset.whole_samples import check_samples


def check_machine(config: Config) -> int:
    """As :func:`check_packages`, then :func:`check_data`."""
    check_packages(config)
    return check_data(config)


def check_packages(config: Config) -> None:
    """Refuse what needs a package that is not installed; wanted on the rank that writes.

    Raises:
        ConfigError: naming the setting and how to install it.
    """
    wanted = {"tensorboard": config.log.tensorboard, "wandb": config.log.wandb is not None}
    for package, needed in wanted.items():
        spec = find_spec(package) if needed else None
        # A directory of that name in the working directory is a spec too, without a file.
        if needed and (spec is None or spec.origin is None):
            raise ConfigError(
                f"log.{package}", f"needs a package that is not installed: pip install 'hexad[{package}]'"
            )


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
        for prefix in prefixes(data):
            with blaming(field):
                opened = open_built(prefix, vocab, tokenizer.eod, bos)
                check_samples(opened, settings.packing, settings.sequence, settings.too_long)
    training_templates(config)
    return tokenizer.vocab_size
