"""Megatron-LM's data sets of GPT over Hexad's loader: what a script names is what the flags name."""

from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import default_collate

from hexad.config import HexadError
from hexad.dataset.load.microbatch import Microbatch
from hexad.engine.evaluation import Score
from hexad.parallel.tensor.loss import IGNORED
from hexad.topology.mesh import Mesh

from ..facade.foreign_names import check_arguments
from .arguments import batch_settings
from .initialize import get_args, started
from .masks import ltor_mask, masks_and_positions, positions_from
from .samples import (  # noqa: F401
    BlendedDataset,
    GPTDataset,
    GPTDatasetConfig,
    MockGPTDataset,
    Split,
    build_datasets,
)
from .tables import ARGUMENTS
from .transformer import check_agrees

Batch = dict[str, Tensor]
"""``tokens``, ``labels``, ``loss_mask``, ``position_ids`` ``[b, s]``, perhaps ``attention_mask``."""


@dataclass(frozen=True)
class FlagsData:
    """The data of the flags, which Hexad's loader reads for ``pretrain``: a script asked for ``samples``;
    ``as_text``: in the form of Megatron-DeepSpeed."""

    samples: int | None
    as_text: bool = False

    def __len__(self) -> int:
        return self.samples or 0


class BlendedMegatronDatasetBuilder:
    """Returns the data of the flags; without flags map-style data sets, in Megatron-Core's order.

    Args:
        cls: :class:`GPTDataset`, or :class:`MockGPTDataset` with ``--mock-data``.
        sizes: samples for training, validation and testing.
        is_built_on_rank: whether this rank has them; with flags without effect: every rank reads what it
            needs.
        config: which with flags has to agree with these.

    Raises:
        HexadError: another class, or settings that are not those of the flags.
    """

    def __init__(
        self, cls: Any, sizes: Sequence[int | None], is_built_on_rank: Callable[[], bool], config: Any
    ) -> None:
        self._sizes = sizes
        self._build: Callable[[], list[Any]] = self._of_flags
        if not started():
            self._build = partial(build_datasets, cls, sizes, is_built_on_rank, config)
            return
        args = get_args()
        wanted = MockGPTDataset if args.mock_data else GPTDataset
        if cls is not wanted:
            raise HexadError(
                f"BlendedMegatronDatasetBuilder: found {getattr(cls, '__name__', cls)!r}; with these flags "
                f"pass {wanted.__name__}, or return data sets of torch.utils.data to pretrain"
            )
        names = ("split", "reset_position_ids", "reset_attention_mask", "eod_mask_loss")
        known = {"sequence_length": args.seq_length, "random_seed": args.seed}
        known |= {name: getattr(args, name) for name in names}
        known |= dict(zip(("blend", "blend_per_split"), get_blend_and_blend_per_split(args)))
        settings = {name: getattr(config, name, None) for name in known}
        if settings["blend_per_split"] is not None and not any(settings["blend_per_split"]):
            settings["blend_per_split"] = None  # earlier releases list those that are missing
        check_agrees("GPTDatasetConfig", settings, known)

    def build(self) -> list[Any]:
        """The data for training, validation and testing."""
        return self._build()

    def _of_flags(self) -> list[FlagsData]:
        return [FlagsData(size) for size in self._sizes]


def build_train_valid_test_datasets(
    data_prefix: Sequence[str] | None,
    data_impl: str,
    splits_string: str,
    train_valid_test_num_samples: Sequence[int | None],
    seq_length: int,
    seed: int,
    skip_warmup: bool,
    train_data_prefix: Any = None,
    valid_data_prefix: Any = None,
    test_data_prefix: Any = None,
    return_doc_ids: bool = False,
    *,
    data_cache_path: str | None = None,
) -> list[FlagsData]:
    """Megatron-DeepSpeed's function: the data of the flags for training, validation and testing.

    Raises:
        HexadError: settings that are not those of the flags.
    """
    args = get_args()
    known = {"data_prefix": args.data_path, "splits_string": args.split, "seq_length": args.seq_length}
    arguments = {"data_prefix": data_prefix, "splits_string": splits_string, "seq_length": seq_length}
    check_agrees("build_train_valid_test_datasets", {**arguments, "seed": seed}, {**known, "seed": args.seed})
    return [FlagsData(size, as_text=True) for size in train_valid_test_num_samples]


def text_of(batch: Any) -> Any:
    """A batch in the form of Megatron-DeepSpeed: ``text``, tokens and the one after them."""
    if not isinstance(batch, dict) or "labels" not in batch:
        return batch
    return {"text": torch.cat([batch["tokens"], batch["labels"][:, -1:]], dim=1)}


def get_blend_from_list(blend: Sequence[str] | None) -> tuple[list[str], list[float] | None] | None:
    """Prefixes and weights of ``WEIGHT PREFIX WEIGHT PREFIX ...``, or of prefixes alone."""
    if blend is None:
        return None
    words = list(blend)
    try:
        weights = [float(word) for word in words[::2]]
    except ValueError:
        return words, None
    return words[1::2], weights


def get_blend_and_blend_per_split(args: Namespace) -> tuple[Any, Any]:
    """The blend of ``--data-path``, and those of ``--train-data-path`` and ``--valid-data-path``."""
    separate = [
        get_blend_from_list(getattr(args, f"{part}_data_path")) for part in ("train", "valid", "test")
    ]
    return get_blend_from_list(args.data_path), separate if any(separate) else None


def batch_of(microbatch: Microbatch) -> Batch:
    """A microbatch of Hexad's loader under Megatron-LM's names."""
    args, tokens = get_args(), microbatch.tokens
    mask = microbatch.labels != IGNORED
    starts = torch.zeros(tokens.shape, dtype=torch.bool)
    if microbatch.documents is not None:
        starts.view(-1)[list(microbatch.documents[:-1])] = True
    batch = {
        "tokens": tokens,
        "labels": microbatch.labels.masked_fill(~mask, 0),
        "loss_mask": mask.float(),
        "position_ids": positions_from(starts),
    }
    if args.create_attention_mask_in_dataloader:
        batch["attention_mask"] = ltor_mask(starts, documents=microbatch.documents is not None)
    return batch


def get_ltor_masks_and_position_ids(
    data: Tensor,
    eod_token: int | None,
    reset_position_ids: bool,
    reset_attention_mask: bool,
    eod_mask_loss: bool,
    pad_token: int | None = None,
    pad_mask_loss: bool = False,
    **others: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """Masks and positions of tokens ``[b, s]``: the attention mask ``[b or 1, 1, s, s]``, true where masked,
    the loss mask ``[b, s]`` and the position ids ``[b, s]``. A document ends with ``eod_token``.
    ``others`` are Megatron-DeepSpeed's, with their defaults."""
    name = "get_ltor_masks_and_position_ids"
    check_arguments(name, others, ARGUMENTS[name])
    masks = masks_and_positions(data, eod_token, reset_position_ids, reset_attention_mask, eod_mask_loss)
    if pad_mask_loss and pad_token is not None:
        masks[1][data == pad_token] = 0.0
    return masks


class ScriptData:
    """Microbatches of a script's own data set, in its order: sample ``i`` of a step belongs to data rank
    ``i // micro % ranks``, as in Megatron-LM. It begins again when it is exhausted.

    Args:
        dataset: map-style; samples are dictionaries of tensors.
    """

    def __init__(self, dataset: Any, mesh: Mesh) -> None:
        if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__") or not len(dataset):
            kind = type(dataset).__name__
            raise HexadError(f"pretrain: found a {kind} as data set, expected one with a length and samples")
        self._dataset, self._data, self._args = dataset, mesh.data, get_args()

    def step(self, samples: int) -> list[Batch]:
        """This data rank's microbatches of the step after some samples."""
        return self._batches(samples, batch_settings(self._args).size(samples))

    def _batches(self, samples: int, count: int) -> list[Batch]:
        micro = self._args.micro_batch_size
        firsts = range(samples + self._data.rank * micro, samples + count, self._data.size * micro)
        return [self._batch(range(first, first + micro)) for first in firsts]

    def _batch(self, numbers: range) -> Batch:
        batch: Batch = default_collate([self._dataset[number % len(self._dataset)] for number in numbers])
        return batch

    def prepare(self, samples: int = 0) -> None:
        """No-op: there are no indexes."""

    def close(self) -> None:
        """No-op: nothing is read ahead."""


class ScriptValidation(ScriptData):
    """A script's own data set for validation."""

    def __init__(self, dataset: Any, mesh: Mesh) -> None:
        super().__init__(dataset, mesh)
        self._mesh = mesh

    def scores(self, engine: Any, batches: int) -> dict[str, Score]:
        """The loss over the first steps' samples, all ranks together."""
        total = torch.zeros(2, dtype=torch.float64)
        size = self._args.global_batch_size
        for number in range(batches):
            total += torch.tensor(engine.evaluate(self._batches(number * size, size)))
        return {"": Score(float(total[0]), int(total[1]), None)}


def iterators_of(batches: Sequence[Any], stages: Sequence[int]) -> dict[int, Iterator[Batch]]:
    """For each of this rank's stages an iterator over the microbatches of a step."""
    made = [batch_of(batch) if isinstance(batch, Microbatch) else batch for batch in batches]
    return {stage: iter(made) for stage in stages}
