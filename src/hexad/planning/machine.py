"""Checks of the machine that a run starts on: packages, tokenizer and data. No torch: checked before any
process is started."""

from importlib.util import find_spec
from pathlib import Path

from hexad.checkpoint.directory import CheckpointDirectory, check_same_model
from hexad.checkpoint.kept_tokenizer import check_same_tokenizer, tokenizer_of_run, training_templates
from hexad.config import Config, ConfigError, HexadError, blaming
from hexad.config.load import read_yaml
from hexad.config.schema import prefixes
from hexad.dataset.built import check_targets, open_built
from hexad.dataset.load.whole_samples import source_of
from hexad.dataset.text.tokenizer import Tokenizer, bos_ids, load_tokenizer
from hexad.parallel.expert.kinds import check_host
from hexad.topology.devices import gpu_visible


def check_machine(config: Config) -> int:
    """Check packages, data and the start of the run on this machine; returns the vocabulary size."""
    check_packages(config)
    vocab = check_data(config)
    check_start(config)
    return vocab


def check_start(config: Config) -> None:
    """Refuse what a run cannot begin with: a run directory that is none, a checkpoint that is missing, of
    another model or of a tokenizer with other ids.

    What cannot be read is left to whoever loads the checkpoint.

    Raises:
        HexadError: naming the setting.
    """
    directory = Path(config.run.dir)
    there = next((path for path in (directory, *directory.parents) if path.exists()), None)
    for path in (there, directory / "checkpoints"):
        if path is not None and path.exists() and not path.is_dir():
            raise ConfigError("run.dir", f"cannot write to {directory}: {path} is a file")
    try:
        path = CheckpointDirectory(directory).start(config.checkpoint)
    except OSError:
        return
    try:
        tree = path and read_yaml(path / "config.yaml")
    except (OSError, UnicodeDecodeError, HexadError):
        return
    if path is None or not isinstance(tree, dict):
        return
    vocab = tree.get("model", {}).get("vocab") if config.model.vocab == "auto" else config.model.vocab
    model = config.model.model_copy(update={"vocab": vocab})
    check_same_model(path, tree, config.model_copy(update={"model": model}), resuming=True)
    check_same_tokenizer(path, tree, tokenizer_of_run(config))


def check_packages(config: Config) -> None:
    """Refuse what needs a package that is not installed; wanted on the rank that writes.

    Raises:
        ConfigError: naming the setting and how to install it.
    """
    packages = {"tensorboard": config.log.tensorboard, "wandb": config.log.wandb is not None}
    for package, needed in packages.items():
        spec = find_spec(package) if needed else None
        # A directory of that name in the working directory is a spec too, without a file.
        if needed and (spec is None or spec.origin is None):
            raise ConfigError(
                f"log.{package}", f"needs a package that is not installed: pip install 'hexad[{package}]'"
            )


def check_dispatcher(config: Config) -> None:
    """Refuse a dispatcher of rows to experts for which this host lacks a GPU or a package.

    Raises:
        ConfigError: naming what is missing.
    """
    moe, parallel = config.model.moe, config.parallel
    if moe is not None and moe.dispatcher != "auto" and parallel.expert * parallel.expert_tensor > 1:
        check_host(moe.dispatcher, gpu_visible())


def check_data(config: Config) -> int:
    """Open what a run reads, as its ranks will, without reading tokens; returns the tokenizer's vocabulary
    size.

    Raises:
        ConfigError: the tokenizer or a data set cannot be used, or they do not fit together.
    """
    settings, model = config.data, config.model
    tokenizer = _tokenizer(config)
    if settings.train is None:
        raise ConfigError("data.train", "found null, expected a .bin/.idx prefix or [[weight, prefix], ...]")
    data_sets = {"data.train": settings.train}
    if config.validate_.every:
        sets, several = settings.validation_sets, isinstance(settings.validation, dict)
        data_sets |= {
            f"data.validation.{name}" if several else "data.validation": sets[name] for name in sets
        }
    # A model.vocab below the tokenizer's is refused by resolve, which says so.
    vocab = tokenizer.vocab_size if model.vocab == "auto" else max(model.vocab, tokenizer.vocab_size)
    bos = bos_ids(tokenizer, settings.bos)
    for field, data in data_sets.items():
        with blaming(field):
            part = settings.part(field == "data.train")
            opened = [open_built(prefix, vocab, tokenizer.eod, bos, part) for prefix in prefixes(data)]
            check_targets(opened)
            for dataset in opened:
                source_of(dataset, settings.packing, settings.sequence, settings.too_long, seed=0)
    training_templates(config)
    return tokenizer.vocab_size


def check_without_data(config: Config) -> int:
    """Check this machine before data exist (see :func:`check_machine`); returns the tokenizer's vocabulary
    size."""
    check_packages(config)
    check_start(config)
    return _tokenizer(config).vocab_size


def _tokenizer(config: Config) -> Tokenizer:
    with blaming("data.tokenizer"):
        return load_tokenizer(tokenizer_of_run(config))
