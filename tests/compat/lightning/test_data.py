"""Loaders: resuming within an epoch, in any layout; evaluation counts every sample once; iterable data."""

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from ...pool import Pool, RankError
from .program import launched, recorder, strategy_of, trainer_of

pytest.importorskip("lightning")

TOTAL = 24
"""Samples of a step, over all ranks."""


@given(st.integers(0, 40), st.integers(1, 5), st.integers(1, 6))
def test_even_batches_have_every_sample_once(samples: int, ranks: int, size: int) -> None:
    from hexad.compat.lightning.data import even_batches

    every = [even_batches(samples, ranks, rank, size) for rank in range(ranks)]
    if any(batches is None for batches in every):
        # As many as the longest needs, but for the rank with the fewest samples.
        assert every == [None] * ranks and (samples // ranks) < max(1, -(-samples // ranks // size) + 1)
        return
    given = [batches for batches in every if batches is not None]
    assert len({len(batches) for batches in given}) == 1
    assert all(0 < len(batch) <= size for batches in given for batch in batches)
    assert sorted(index for batches in given for batch in batches for index in batch) == list(range(samples))


class Sharded(IterableDataset[Any]):
    """An iterable data set that shards itself over ranks."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[Tensor]:
        joined = torch.distributed.is_initialized()
        rank, ranks = (torch.distributed.get_rank(), torch.distributed.get_world_size()) if joined else (0, 1)
        for number in range(rank, self.samples, ranks):
            draw = torch.Generator().manual_seed(number)
            yield torch.randn(3, 8, 8, generator=draw), torch.randint(4, (), generator=draw)


def interrupted(
    strategy: str, directory: str, resume: str | None, iterable: bool, workers: int, batch: int | None = None
) -> list[float]:
    """Two epochs of four steps, saved after every step; the losses of all ranks' samples."""
    from lightning.pytorch.callbacks import ModelCheckpoint

    from .modules import Classifier, loader

    with launched() as world:
        torch.manual_seed(5)
        module = Classifier().float()
        for part in module.modules():  # statistics of a rank's samples depend on how many these are
            if isinstance(part, torch.nn.BatchNorm2d):
                part.eval()
                part.train = lambda mode=True, part=part: part  # type: ignore[method-assign]
        record = recorder()
        keeping = ModelCheckpoint(directory, "{step}", save_top_k=-1, every_n_train_steps=1)
        options = {"callbacks": [record, keeping], "enable_checkpointing": True, "max_epochs": 2}
        trainer = trainer_of(strategy_of(strategy), precision="64-true", **options)
        size = batch or TOTAL // world
        data = loader("classifier", 4 * TOTAL, torch.float64, True, size)
        if iterable:
            data = DataLoader(Sharded(4 * TOTAL), batch_size=size)
        elif workers:
            data = DataLoader(data.dataset, batch_size=size, shuffle=True, num_workers=workers)
        trainer.fit(module, data, ckpt_path=resume)
        losses = torch.tensor(record.losses, dtype=torch.float64)
        if world > 1:
            torch.distributed.all_reduce(losses)
        return (losses / world).tolist()


Saved = Callable[[bool], tuple[Path, list[float]]]


@pytest.fixture(scope="module")
def saved(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """Of an iterable data set or another one: where every step is saved, and the losses."""

    @cache
    def of(iterable: bool) -> tuple[Path, list[float]]:
        directory = tmp_path_factory.mktemp("whole")
        return directory, pool.run(2, interrupted, "zero 1", str(directory), None, iterable, 0)[0]

    return of


@pytest.mark.parametrize(
    ("iterable", "step", "ranks", "strategy"),
    [
        (False, 2, 1, "zero 0"),
        (True, 5, 4, "zero 3"),
        (False, 4, 2, "zero 2"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                (False, 5, 4, "zero 3"),
                (False, 7, 2, "zero 1"),
                (True, 2, 1, "zero 0"),
                (True, 4, 2, "zero 2"),
                (True, 7, 2, "zero 1"),
            )
        ),
    ],
)
def test_resumes_within_an_epoch(
    pool: Pool, saved: Saved, tmp_path: Path, iterable: bool, step: int, ranks: int, strategy: str
) -> None:
    """After the same samples, shuffled, with other numbers of ranks; from the end of an epoch too."""
    directory, whole = saved(iterable)
    assert len(whole) == 8
    path = str(directory / f"step={step}.ckpt")
    rest = pool.run(ranks, interrupted, strategy, str(tmp_path), path, iterable, 0)[0]
    torch.testing.assert_close(rest, whole[step:], rtol=1e-9, atol=0)


@pytest.mark.slow
def test_resumes_with_processes_that_load(tmp_path: Path) -> None:
    whole = interrupted("zero 0", str(tmp_path / "whole"), None, False, 1)
    path = str(tmp_path / "whole" / "step=6.ckpt")
    rest = interrupted("zero 0", str(tmp_path / "rest"), path, False, 1)
    torch.testing.assert_close(rest, whole[6:], rtol=1e-9, atol=0)


def test_steps_of_other_sizes_are_refused_within_an_epoch(pool: Pool, saved: Saved, tmp_path: Path) -> None:
    path = str(saved(False)[0] / "step=2.ckpt")
    with pytest.raises(RankError, match="HexadError: train_dataloader: found 16 samples in a step"):
        pool.run(2, interrupted, "zero 1", str(tmp_path), path, False, 0, 8)


def measured(strategy: str, samples: int, batch: int) -> list[float]:
    """Metrics of samples that ranks cannot divide evenly."""
    from .modules import Classifier, loader

    with launched():
        torch.manual_seed(5)
        module = Classifier()
        trainer = trainer_of(strategy_of(strategy), precision="64-true")
        data = loader("classifier", samples, torch.float64, False, batch)
        module.eval()
        found = trainer.validate(module, data, verbose=False)[0]
        found |= trainer.test(module, data, verbose=False)[0]
        predicted = trainer.predict(module, data)
        return [*found.values(), sum(len(batch) for batch in predicted)]


@pytest.mark.parametrize(
    ("samples", "batch"),
    [(11, 2), *(pytest.param(*case, marks=pytest.mark.slow) for case in ((9, 3), (7, 3), (13, 6)))],
)
def test_evaluation_counts_every_sample_once(pool: Pool, samples: int, batch: int) -> None:
    """As one process does, where Lightning's DDPStrategy counts some twice."""
    alone = pool.run(1, measured, "zero 0", samples, batch)[0]
    for strategy in ("zero 0", "zero 3"):
        both = pool.run(2, measured, strategy, samples, batch)
        assert both[0][:-1] == pytest.approx(alone[:-1], rel=1e-6)
        assert sum(result[-1] for result in both) == samples == alone[-1]
    theirs = pool.run(2, measured, "ddp", samples, batch)[0]
    assert theirs[:-1] != pytest.approx(alone[:-1], rel=1e-6)
