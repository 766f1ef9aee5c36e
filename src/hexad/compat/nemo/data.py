"""NeMo 2's data modules of language models: what their arguments say about a run's data."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import file_digest
from pathlib import Path
from typing import Any, Literal

from lightning.pytorch import LightningDataModule

from hexad.config import HexadError, one_line
from hexad.dataset.build.builder import build
from hexad.dataset.files import written_once
from hexad.dataset.sidecar import idx_path

from .sampler import MegatronDataSampler
from .tokenizers import TokenizerSpec

_NO_EFFECT = ("pad_to_max_length", "return_cu_seqlen")
"""Keys of ``dataset_kwargs``."""
_PATIENCE = 3600.0
"""Seconds to wait for another process that builds the same data."""


class TextDataModule(LightningDataModule):
    """The base class: data that Hexad's loader reads, for ``llm.GPTModel``.

    Attributes:
        seq_length: tokens of a sample.
        tokenizer: None: the model's.
        data_sampler: sizes of steps.
        flags: attributes of Megatron-LM's flags that name the data.
    """

    def __init__(
        self,
        seq_length: int,
        tokenizer: TokenizerSpec | None,
        sampler: MegatronDataSampler,
        flags: Mapping[str, Any],
    ) -> None:
        super().__init__()
        self.seq_length, self.tokenizer, self.data_sampler = seq_length, tokenizer, sampler
        self.flags = dict(flags)
        self.micro_batch_size, self.global_batch_size = sampler.micro_batch_size, sampler.global_batch_size

    def settings(self, directory: str, tokenizer: str) -> dict[str, Any]:
        """Settings of the group ``data`` beyond the flags; ``directory``: of the run."""
        return {}

    def files(self, directory: str, tokenizer: str) -> list[Callable[[], None]]:
        """What must be written before a run starts, in several processes if need be."""
        return []


@dataclass
class PackedSequenceSpecs:
    """Samples are packed in any case; the size is the data module's ``seq_length``.

    Attributes:
        packed_sequence_size: that length; 0 or less: it as well.
        packed_train_data_path, packed_val_data_path, packed_metadata_path, packed_data_path: None.
        tokenizer_model_name, pad_cu_seqlens: accepted without effect.

    Raises:
        HexadError: data that are packed already.
    """

    packed_sequence_size: int = -1
    tokenizer_model_name: str | None = None
    packed_train_data_path: str | None = None
    packed_val_data_path: str | None = None
    packed_metadata_path: str | None = None
    pad_cu_seqlens: bool = False
    packed_data_path: str | None = None

    def __post_init__(self) -> None:
        """Refuse data that are packed already."""
        paths = ("packed_train_data_path", "packed_val_data_path", "packed_metadata_path", "packed_data_path")
        for name in paths:
            if getattr(self, name) is not None:
                raise HexadError(
                    f"PackedSequenceSpecs: found {name}={str(getattr(self, name))!r}; leave it out: "
                    "training.jsonl and validation.jsonl are packed"
                )


class PreTrainingDataModule(TextDataModule):
    """Data in Megatron-LM's ``.bin`` and ``.idx`` files.

    Args:
        paths: a prefix; or weights and prefixes in turn; or such lists by ``train`` and ``validation``
            (``test`` has no effect).
        seq_length: tokens of a sample.
        tokenizer: of the data; None: the model's.
        micro_batch_size, global_batch_size, rampup_batch_size, dataloader_type, init_consumed_samples,
            init_global_step, output_log: of its :class:`MegatronDataSampler`; ``single`` only.
        reset_position_ids, reset_attention_mask, eod_mask_loss: all three, to isolate documents, or none.
        seed: of the order of samples, with ``Trainer``'s.
        split: proportions for training, validation and testing.
        num_workers, pin_memory, persistent_workers, create_attention_mask, index_mapping_dir,
            num_dataset_builder_threads, num_train_samples, num_val_samples, num_test_samples, mmap_bin_files:
            accepted without effect: Hexad's loader reads the data.
        dataset_cls, object_storage_cache_path: None.
    """

    def __init__(
        self,
        paths: Path | str | Sequence[Any] | Mapping[str, Any],
        seq_length: int = 2048,
        tokenizer: TokenizerSpec | None = None,
        micro_batch_size: int = 4,
        global_batch_size: int = 8,
        rampup_batch_size: Sequence[int] | None = None,
        num_workers: int = 8,
        pin_memory: bool = True,
        persistent_workers: bool = False,
        reset_position_ids: bool = False,
        create_attention_mask: bool = False,
        reset_attention_mask: bool = False,
        eod_mask_loss: bool = False,
        seed: int = 1234,
        split: str = "900,50,50",
        index_mapping_dir: str | None = None,
        num_dataset_builder_threads: int = 1,
        num_train_samples: int | None = None,
        num_val_samples: int | None = None,
        num_test_samples: int | None = None,
        dataloader_type: Literal["single"] | None = "single",
        init_consumed_samples: int = 0,
        init_global_step: int = 0,
        output_log: bool = True,
        dataset_cls: Any = None,
        mmap_bin_files: bool = True,
        object_storage_cache_path: str | None = None,
    ) -> None:
        _refuse(
            "PreTrainingDataModule",
            dataset_cls=dataset_cls,
            object_storage_cache_path=object_storage_cache_path,
        )
        _refuse("PreTrainingDataModule", init_consumed_samples=init_consumed_samples or None)
        sampler = MegatronDataSampler(
            seq_length,
            micro_batch_size,
            global_batch_size,
            rampup_batch_size,
            dataloader_type,
            output_log=output_log,
        )
        if isinstance(paths, Mapping):
            wrong = {"train", "validation"} ^ (set(paths) - {"test"})
            if wrong:
                raise HexadError(
                    f"PreTrainingDataModule: found paths of {', '.join(paths)}; name train and validation"
                )
            flags: dict[str, Any] = {
                "train_data_path": _words(paths["train"]),
                "valid_data_path": _words(paths["validation"]),
            }
        else:
            flags = {"data_path": _words(paths), "split": split}
        flags |= {
            "reset_position_ids": reset_position_ids,
            "reset_attention_mask": reset_attention_mask,
            "eod_mask_loss": eod_mask_loss,
            "dataloader_type": dataloader_type,
            "seed": seed,
        }
        super().__init__(seq_length, tokenizer, sampler, flags)


class MockDataModule(TextDataModule):
    """Counting numbers, in place of data.

    Args:
        seq_length: tokens of a sample.
        tokenizer: None: numbers of the model's vocabulary.
        micro_batch_size, global_batch_size, rampup_batch_size: of its :class:`MegatronDataSampler`.
        vocab_file, merges_file: of GPT-2's tokenizer, in place of ``tokenizer``.
        num_train_samples, num_val_samples, num_test_samples, num_workers, pin_memory, persistent_workers,
            create_attention_mask: accepted without effect: Hexad's loader reads the data.
    """

    def __init__(
        self,
        seq_length: int = 2048,
        tokenizer: TokenizerSpec | None = None,
        micro_batch_size: int = 4,
        global_batch_size: int = 8,
        rampup_batch_size: Sequence[int] | None = None,
        num_train_samples: int = 10_000_000,
        num_val_samples: int = 10_000,
        num_test_samples: int = 10_000,
        num_workers: int = 8,
        pin_memory: bool = True,
        persistent_workers: bool = False,
        create_attention_mask: bool = False,
        vocab_file: str | None = None,
        merges_file: str | None = None,
    ) -> None:
        sampler = MegatronDataSampler(seq_length, micro_batch_size, global_batch_size, rampup_batch_size)
        if vocab_file and merges_file:
            names = {
                "tokenizer_type": "GPT2BPETokenizer",
                "vocab_file": vocab_file,
                "merge_file": merges_file,
            }
            tokenizer = TokenizerSpec(names)
        super().__init__(seq_length, tokenizer, sampler, {"mock_data": True, "split": "900,50,50"})


class FineTuningDataModule(TextDataModule):
    """Prompts and answers, ``{"input": ..., "output": ...}`` lines of ``training.jsonl`` and
    ``validation.jsonl``; answers are trained.

    Args:
        dataset_root: the directory of these files.
        seq_length: tokens of a sample, which has as many whole documents as fit.
        tokenizer: of the data; None: the model's.
        micro_batch_size, global_batch_size, rampup_batch_size: of its :class:`MegatronDataSampler`.
        seed: of the order of samples.
        packed_sequence_specs: of the same length; see :class:`PackedSequenceSpecs`.
        memmap_workers, num_workers, pin_memory, persistent_workers: accepted without effect: Hexad's loader
            reads the data.
        pad_to_max_length: accepted without effect: samples are complete.
        dataset_kwargs: ``pad_to_max_length`` and ``return_cu_seqlen``, without effect.
    """

    _keys: tuple[str, ...] = ("input", "output")

    def __init__(
        self,
        dataset_root: str | Path,
        seq_length: int = 2048,
        tokenizer: TokenizerSpec | None = None,
        micro_batch_size: int = 4,
        global_batch_size: int = 8,
        rampup_batch_size: Sequence[int] | None = None,
        seed: int = 1234,
        memmap_workers: int = 1,
        num_workers: int = 8,
        pin_memory: bool = True,
        persistent_workers: bool = False,
        packed_sequence_specs: Any = None,
        dataset_kwargs: Mapping[str, Any] | None = None,
        pad_to_max_length: bool = False,
    ) -> None:
        further = {key: value for key, value in (dataset_kwargs or {}).items() if key not in _NO_EFFECT}
        _refuse(type(self).__name__, dataset_kwargs=further or None)
        packed = getattr(packed_sequence_specs, "packed_sequence_size", -1)
        if packed > 0 and packed != seq_length:
            raise HexadError(
                f"{type(self).__name__}: found packed_sequence_size={packed} with seq_length={seq_length}; "
                "make them equal"
            )
        sampler = MegatronDataSampler(seq_length, micro_batch_size, global_batch_size, rampup_batch_size)
        self.dataset_root = Path(dataset_root)
        if not (self.dataset_root / "training.jsonl").is_file():
            raise HexadError(f"dataset_root: found no training.jsonl in {self.dataset_root}; write it there")
        super().__init__(seq_length, tokenizer, sampler, {"seed": seed})

    def settings(self, directory: str, tokenizer: str) -> dict[str, Any]:
        """The prefixes of the data built, and documents that are too long cut, as NeMo does."""
        settings = {"training": "train", "validation": "validation"}
        prefixes = self._prefixes(directory, tokenizer)
        return {**{settings[name]: prefix for name, prefix in prefixes.items()}, "too_long": "truncate"}

    def files(self, directory: str, tokenizer: str) -> list[Callable[[], None]]:
        """The data, built of the lines."""
        prefixes = self._prefixes(directory, tokenizer)
        return [
            partial(self._build, self._file(name), prefix, tokenizer) for name, prefix in prefixes.items()
        ]

    def _prefixes(self, directory: str, tokenizer: str) -> dict[str, str]:
        """Prefixes of the data built with a tokenizer, by the names of the files of lines that exist."""
        prefixes = {}
        for name in ("training", "validation"):
            if self._file(name).is_file():
                with self._file(name).open("rb") as file:
                    digest = file_digest(file, "sha256")
                digest.update(tokenizer.encode() + (self._template or "").encode())
                prefixes[name] = f"{directory}/data/{name}-{digest.hexdigest()[:12]}"
        return prefixes

    @property
    def _template(self) -> str | None:
        """A chat template in place of the tokenizer's own."""
        return None

    def _file(self, name: str) -> Path:
        return self.dataset_root / f"{name}.jsonl"

    def _build(self, source: Path, prefix: str, tokenizer: str) -> None:
        path = idx_path(prefix)

        def write() -> None:
            path.parent.mkdir(parents=True, exist_ok=True)
            records = path.with_suffix(".jsonl")
            with records.open("w", encoding="utf-8") as file:
                file.writelines(json.dumps(record) + "\n" for record in self._records(source))
            template = None
            if self._template is not None:
                template = path.with_suffix(".jinja")
                template.write_text(self._template, encoding="utf-8")
            named = None if template is None else str(template)
            build([str(records)], prefix, tokenizer, workers=1, chat_template=named)

        written_once(path, lambda: path.is_file() or None, write, _PATIENCE)

    def _records(self, source: Path) -> Iterator[dict[str, Any]]:
        """What is built of the lines of a file."""
        for number, line in enumerate(_lines(source), start=1):
            missing = [key for key in self._keys if key not in line]
            if missing:
                raise HexadError(
                    f"{source}:{number}: found no {missing[0]!r}; each line has {', '.join(self._keys)}"
                )
            yield self._record(line)

    def _record(self, line: Mapping[str, Any]) -> dict[str, Any]:
        return {"prompt": line["input"], "completion": line["output"]}


class ChatDataModule(FineTuningDataModule):
    """Conversations: ``messages`` with ``role`` and ``content``, or ``conversations`` with ``from`` and
    ``value``, of which the assistant's are trained, in the tokenizer's chat template.

    Args:
        use_hf_tokenizer_chat_template: True.
        given, others: as of :class:`FineTuningDataModule`.

    Raises:
        HexadError: NeMo's format of conversations, without the template.
    """

    _keys = ()

    def __init__(self, *given: Any, use_hf_tokenizer_chat_template: bool = True, **others: Any) -> None:
        if not use_hf_tokenizer_chat_template:
            raise HexadError(
                "ChatDataModule: found use_hf_tokenizer_chat_template=False; pass True, and the format as "
                "AutoTokenizer(..., chat_template=...)"
            )
        super().__init__(*given, **others)

    @property
    def _template(self) -> str | None:
        return None if self.tokenizer is None else self.tokenizer.chat_template

    def _record(self, line: Mapping[str, Any]) -> dict[str, Any]:
        if "messages" in line:
            return {"messages": line["messages"]}
        turns = line.get("conversations")
        if not isinstance(turns, list):
            raise HexadError(
                f"dataset_root: found keys {', '.join(line)}; each line has messages or conversations"
            )
        roles = {"User": "user", "human": "user", "Assistant": "assistant", "gpt": "assistant"}
        messages = [
            {"role": roles.get(turn["from"], turn["from"]), "content": turn["value"]} for turn in turns
        ]
        system = [{"role": "system", "content": line["system"]}] if line.get("system") else []
        return {"messages": [*system, *messages]}


def _lines(source: Path) -> Iterable[dict[str, Any]]:
    with source.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                yield json.loads(line)
            except (ValueError, RecursionError) as error:
                raise HexadError(f"{source}:{number}: not valid JSON: {one_line(error)}") from None


def _words(paths: Any) -> list[str]:
    """Weights and prefixes as words of a launch line."""
    return [str(word) for word in paths] if isinstance(paths, list | tuple) else [str(paths)]


def _refuse(name: str, **values: Any) -> None:
    for argument, value in values.items():
        if value is not None:
            raise HexadError(f"{name}: found {argument}={value!r}; it is not supported: leave it out")
