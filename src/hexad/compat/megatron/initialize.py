"""Megatron-LM's start of a script: arguments, process groups, random seeds, tokenizer."""

import json
import random
import sys
from argparse import Namespace
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from math import lcm
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from hexad.comm import agreed, identical
from hexad.config import Config, HexadError, blaming, one_line
from hexad.dataset.text import tokenizer as tokenizers
from hexad.launching.environment import Environment, environment
from hexad.model.configuration import load_config
from hexad.model.transformer import factored_mesh

from ..facade import world
from ..facade.foreign_names import check_arguments
from . import ignored_flags, parallel_state
from .arguments import ExtraArguments, Line, derive, naming_flags, parse, values_of_flags
from .tables import ARGUMENTS, add_earlier
from .translate import Translation, translated


class MegatronTokenizer:
    """A tokenizer with Megatron-LM's names.

    Args:
        backend: Hexad's.
        vocab_size: of the model, without padding.
    """

    def __init__(self, backend: tokenizers.Tokenizer, vocab_size: int) -> None:
        self.backend, self.vocab_size = backend, vocab_size

    @property
    def eod(self) -> int | None:
        """The id of the end of a document; None if there is none."""
        return self.backend.eod

    eos = eod

    @property
    def bos(self) -> int | None:
        """The id that begins a text; None if there is none."""
        return self.backend.bos[0] if self.backend.bos else None

    def tokenize(self, text: str) -> list[int]:
        """The ids of a text, without special ones."""
        return self.backend.encode(text)

    def detokenize(self, token_ids: Iterable[int]) -> str:
        """The text of some ids."""
        return self.backend.decode(token_ids)

    @property
    def unique_identifiers(self) -> dict[str, str]:
        """What tells it from other tokenizers."""
        return {"class": type(self.backend).__qualname__, "vocab_size": str(self.vocab_size)}

    @staticmethod
    def from_pretrained(
        tokenizer_path: str | None = None,
        metadata_path: str | Mapping[str, Any] | None = None,
        **options: Any,
    ) -> "MegatronTokenizer":
        """The tokenizer of a library, as Megatron-Core's class of this name returns it.

        Args:
            tokenizer_path: its directory or file.
            metadata_path: a dictionary with ``library``, or a file with it; by default
                ``tokenizer_metadata.json`` beside the tokenizer.
            options: ``vocab_size`` of a tokenizer of numbers; others have no effect.

        Raises:
            HexadError: no file, or another library.
        """
        library = _library(tokenizer_path, metadata_path)
        size = options.get("vocab_size")
        if library in _NUMBERS:
            if not isinstance(size, int) or size < 1:
                raise HexadError(f"MegatronTokenizer: found vocab_size {size} with {library}; pass a number")
            return null_tokenizer(size + (library == "null"))
        if library not in _LIBRARIES:
            known = ", ".join((*_LIBRARIES, *_NUMBERS))
            raise HexadError(f"MegatronTokenizer: found the library {library!r}; use one of {known}")
        with blaming("tokenizer_path"):
            backend = tokenizers.load_tokenizer("byte" if library == "byte-level" else str(tokenizer_path))
        return MegatronTokenizer(backend, backend.vocab_size)


_NUMBERS = ("null-text", "null")
"""Names of the tokenizer of numbers: since core_v0.18 ``vocab_size`` includes the end of a document."""
_LIBRARIES = ("huggingface", "sentencepiece", "tiktoken", "megatron", "byte-level")


def _library(path: str | None, metadata: str | Mapping[str, Any] | None) -> Any:
    """The name of a tokenizer's library."""
    if isinstance(metadata, Mapping):
        return metadata.get("library")
    place = Path(path or ".")
    file = Path(metadata) if metadata else (place.parent if place.is_file() else place) / _METADATA
    try:
        return json.loads(file.read_text(encoding="utf-8")).get("library")
    except (OSError, ValueError, AttributeError) as error:
        raise HexadError(f"MegatronTokenizer: {file}: {one_line(error)}; pass metadata_path") from None


_METADATA = "tokenizer_metadata.json"


class _Null(tokenizers.ByteTokenizer):
    """Megatron-LM's NullTokenizer: numbers, separated by spaces; the last id is the end of a document."""

    def __init__(self, vocab: int) -> None:
        self.vocab_size, self.eod = vocab, vocab - 1

    def encode(self, text: str) -> list[int]:
        return [int(word) for word in text.split()]

    def decode(self, ids: Iterable[int]) -> str:
        return " ".join(map(str, ids))


def null_tokenizer(vocab_size: int) -> MegatronTokenizer:
    """The tokenizer of numbers below ``vocab_size``, of which the last ends a document."""
    return MegatronTokenizer(_Null(vocab_size), vocab_size)


def _NullTokenizer(vocab_size: int) -> MegatronTokenizer:  # Megatron-LM's name
    """The tokenizer of numbers below ``vocab_size``, and of the end of a document after these."""
    return null_tokenizer(int(vocab_size) + 1)


def _tokenizer_of(translation: Translation, arguments: Namespace) -> MegatronTokenizer | None:
    """The tokenizer that the flags name; sets ``padded_vocab_size``. None where they name none.

    Raises:
        ConfigError: it cannot be loaded.
    """
    name, vocab = translation.tree["data"].get("tokenizer"), translation.tree["model"].get("vocab")
    tokenizer = None
    if name is not None:
        translation.write_files("tokenizer")
        with blaming("--tokenizer-type"):
            backend: tokenizers.Tokenizer = (
                _Null(vocab) if vocab is not None else tokenizers.load_tokenizer(name)
            )
        vocab = vocab or backend.vocab_size
        tokenizer = MegatronTokenizer(backend, vocab)
    # Hexad's own padding, so that there is no other.
    multiple = lcm(arguments.make_vocab_size_divisible_by, 64) * arguments.tensor_model_parallel_size
    arguments.padded_vocab_size = None if vocab is None else -(-vocab // multiple) * multiple
    return tokenizer


@dataclass(frozen=True)
class _Started:
    """The state between ``initialize_megatron`` and ``destroy_megatron``."""

    arguments: Namespace
    translation: Translation
    tokenizer: MegatronTokenizer | None
    settings: tuple[str, ...]


_started: _Started | None = None


@dataclass
class _Parsed:
    """What ``parse_args`` has read, until ``initialize_megatron`` uses it."""

    line: Line
    complete: bool = False  # by validate_args


_parsed: _Parsed | None = None


def parse_args(
    extra_args_provider: ExtraArguments | None = None, ignore_unknown_args: bool = False
) -> Namespace:
    """Read ``sys.argv``; ``validate_args`` completes the arguments, and ``initialize_megatron`` uses them.

    Raises:
        ConfigError: flags that are not known, malformed, or that Hexad cannot honour.
    """
    global _parsed
    flags = ignored_flags()
    _parsed = _Parsed(parse(sys.argv[1:], None, extra_args_provider, ignore_unknown_args, ignore=flags))
    arguments, here = _parsed.line.arguments, _here()
    arguments.rank, arguments.local_rank, arguments.world_size = here.rank, here.local_rank, here.world
    return arguments


def validate_args(args: Namespace, defaults: Mapping[str, Any] | None = None) -> Namespace:
    """Complete the arguments of :func:`parse_args`; ``defaults`` are values of those without one.

    Raises:
        ConfigError: flags that do not fit.
        HexadError: others than those of :func:`parse_args`.
    """
    if _parsed is None or args is not _parsed.line.arguments:
        raise HexadError("validate_args: found other arguments than those of parse_args(); pass these")
    for name, value in (defaults or {}).items():
        if getattr(args, name, None) is None:
            setattr(args, name, value)
    derive(args, _here().world)
    _complete(args)
    _parsed.complete = True
    return args


def parse_and_validate_args(
    extra_args_provider: ExtraArguments | None = None,
    args_defaults: Mapping[str, Any] | None = None,
    ignore_unknown_args: bool = False,
) -> Namespace:
    """:func:`parse_args` and :func:`validate_args`."""
    return validate_args(parse_args(extra_args_provider, ignore_unknown_args), args_defaults)


def _complete(arguments: Namespace) -> None:
    """Set the format of parameters, counters, and what only earlier releases have."""
    add_earlier(arguments)
    half = torch.bfloat16 if arguments.bf16 else torch.float32
    arguments.params_dtype = torch.half if arguments.fp16 else half
    arguments.iteration = arguments.consumed_train_samples = arguments.consumed_valid_samples = 0


def _line_of(arguments: Namespace) -> Line:
    """The launch line that :func:`parse_args` has read these arguments from."""
    if _parsed is None or arguments is not _parsed.line.arguments:
        raise HexadError("parsed_args: found others than those of parse_args(); pass these")
    return _parsed.line


def _print_once(notes: Iterable[str], rank: int) -> None:
    for note in notes if rank == 0 else ():
        print(f"hexad: {note}", file=sys.stderr)


def initialize_megatron(
    extra_args_provider: ExtraArguments | None = None,
    args_defaults: Mapping[str, Any] | None = None,
    ignore_unknown_args: bool = False,
    allow_no_cuda: bool = True,
    skip_mpu_initialization: bool = False,
    settings: Iterable[str] = (),
    ignore: Iterable[str] = (),
    parsed_args: Namespace | None = None,
    **others: Any,
) -> None:
    """Read ``sys.argv``, join the world, create the groups, and seed the random number generators.

    The world is that of ``torch.distributed`` if the script has called ``init_process_group``, else that of
    torchrun or SLURM, else this process. All its ranks call this together.

    Args:
        extra_args_provider: adds the script's own flags to an ``argparse`` parser.
        args_defaults: values of arguments that have no default in Megatron-LM and that the line does not set.
        ignore_unknown_args: ignore unknown flags; each is reported.
        allow_no_cuda: has no effect: everything runs on CPUs too.
        skip_mpu_initialization: neither join a world nor create groups.
        settings: Hexad's own beyond the flags, as ``parallel.schedule=zb_v``.
        ignore: flags to ignore with their values, known or not, beside those of ``install(ignore=...)``.
        parsed_args: what :func:`parse_args` has returned, which is used in place of ``sys.argv``.
        others: Megatron-LM's, without effect.

    Raises:
        AgreedError: ranks have other flags or ``settings`` than the first, or some of them fail; on all.
        ConfigError: flags that are not known, malformed, do not fit the world, or that Hexad cannot honour.
        HexadError: it has been called before.
    """
    global _parsed, _started
    check_arguments("initialize_megatron", others, ARGUMENTS["initialize_megatron"])
    if _started is not None:
        raise HexadError("initialize_megatron: has been called before; call destroy_megatron first")
    settings = tuple(settings)
    here = _here()

    def read() -> tuple[Line, Translation, dict[str, Any]]:
        if parsed_args is None:
            flags = (*ignored_flags(), *ignore)
            line = parse(sys.argv[1:], args_defaults, extra_args_provider, ignore_unknown_args, ignore=flags)
        else:
            line = _line_of(parsed_args)
        common = {**values_of_flags(line.arguments), "settings": settings}
        if parsed_args is None or _parsed is None or not _parsed.complete:
            derive(line.arguments, here.world)
        return line, translated(line, script=True), common

    joined = dist.is_initialized() and not skip_mpu_initialization
    line, translation, common = agreed(read, world.mesh_of(world.join()).world) if joined else read()
    arguments = line.arguments
    arguments.rank, arguments.local_rank = here.rank, here.local_rank
    _complete(arguments)
    _print_once(translation.notes, here.rank)
    if not skip_mpu_initialization:
        _start(arguments, common)
        with naming_flags():
            divide_heads(load_config(translation.tree, settings))

    def prepare() -> MegatronTokenizer | None:
        translation.write_files("data")
        return _tokenizer_of(translation, arguments)

    # Hosts may not share a file system.
    tokenizer = prepare() if skip_mpu_initialization else agreed(prepare, parallel_state.get_mesh().world)
    _started = _Started(arguments, translation, tokenizer, settings)
    _parsed = None


def set_jit_fusion_options() -> None:
    """No-op: kernels are Hexad's."""


def destroy_megatron() -> None:
    """Discard arguments, mesh and tokenizer; torch's process groups remain."""
    global _parsed, _started
    _parsed = _started = None
    parallel_state.destroy_model_parallel()


def _here() -> Environment:
    """This process's rank: in the world that exists, or in the one that a launcher describes."""
    here = environment()
    if not dist.is_initialized():
        return here
    known = (here.local_rank, here.local_world) if here.joined else (0, 1)
    return Environment(dist.get_rank(), dist.get_world_size(), *known, here.launcher)


def _start(arguments: Namespace, common: dict[str, Any]) -> None:
    """World, mesh and seeds, if all ranks have the same ``common`` values."""
    timeout = timedelta(minutes=arguments.distributed_timeout_minutes)
    device = world.join(timeout, "gloo" if arguments.distributed_backend == "gloo" else None)
    # Ranks that create other groups would wait for each other.
    identical("settings", common, world.mesh_of(device).world)
    parallel_state.initialize_model_parallel(
        arguments.tensor_model_parallel_size,
        arguments.pipeline_model_parallel_size,
        arguments.virtual_pipeline_model_parallel_size,
        context_parallel_size=arguments.context_parallel_size,
        order="tp-cp-ep-pp-dp" if arguments.use_tp_pp_dp_mapping else "tp-cp-ep-dp-pp",
        distributed_timeout_minutes=arguments.distributed_timeout_minutes,
        device=device,
    )
    seed_generators(arguments.seed)


def seed_generators(seed: int) -> None:
    """Seed random number generators by Megatron-LM's rule: pipeline ranks have other weights, all others the
    same."""
    seed += 100 * parallel_state.get_pipeline_model_parallel_rank()
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def divide_heads(config: Config) -> None:
    """Use a mesh with the groups of tensor ranks that hold the same key/value head, if any do."""
    mesh = parallel_state.get_mesh()
    factored = mesh if mesh.context.size > 1 else factored_mesh(config.model, config.parallel, mesh)
    if factored is not mesh:
        parallel_state.use_mesh(factored, parallel_state.get_virtual_pipeline_model_parallel_world_size())


def started() -> bool:
    """Whether there are arguments: whether the script has flags."""
    return _started is not None


def _current() -> _Started:
    if _started is None:
        raise HexadError("there are no arguments yet: call initialize_megatron")
    return _started


def get_args() -> Namespace:
    """The arguments, with Megatron-LM's names.

    Raises:
        HexadError: before :func:`initialize_megatron`, or :func:`validate_args`.
    """
    if _started is None and _parsed is not None and _parsed.complete:
        return _parsed.line.arguments
    return _current().arguments


def get_tokenizer() -> MegatronTokenizer:
    """The tokenizer that the flags name.

    Raises:
        HexadError: before :func:`initialize_megatron`, or without ``--tokenizer-type``.
    """
    tokenizer = _current().tokenizer
    if tokenizer is None:
        raise HexadError("--tokenizer-type: is missing; get_tokenizer needs it")
    return tokenizer


def build_tokenizer(args: Namespace, **_: Any) -> MegatronTokenizer:
    """The tokenizer that the flags name; see :func:`get_tokenizer`."""
    return get_tokenizer()


def get_config() -> Config:
    """Hexad's settings, for :class:`hexad.Engine`.

    Raises:
        HexadError: before :func:`initialize_megatron`.
        ConfigError: settings that do not fit each other.
    """
    started = _current()
    with naming_flags():
        return load_config(started.translation.tree, started.settings)
