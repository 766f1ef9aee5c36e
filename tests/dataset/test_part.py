"""``data.split``: the documents that megatron-core takes, and nothing of the others."""

import warnings
from pathlib import Path

import numpy as np
import pytest

from hexad.config import ConfigError, HexadError
from hexad.config.schema import DataSettings
from hexad.dataset.indexed import IndexedDataset, IndexedWriter
from hexad.dataset.load.loader import DataLoader
from hexad.model.configuration import load_config


def write(prefix: Path, documents: int, masked: bool = False) -> IndexedDataset:
    """Document ``n`` consists of ``n % 5 + 1`` tokens ``n``; with a mask, every other token is trained."""
    with IndexedWriter(prefix, np.uint16) as writer:
        for number in range(documents):
            count = number % 5 + 1
            trained = np.arange(count) % 2 == 0 if masked else None
            writer.add_document(np.full(count, number), None, trained)
    return IndexedDataset(prefix)


@pytest.mark.parametrize("split", ["969,30,1", "949,50,1", "99990,8,2", "100,0,0", "1,1,1", "0.7,0.3,0"])
@pytest.mark.parametrize("documents", [97, 1000])
def test_same_documents_as_megatron(tmp_path: Path, split: str, documents: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = pytest.importorskip("megatron.core.datasets.blended_megatron_dataset_config")
    matrix = theirs.convert_split_vector_to_split_matrix(theirs.parse_and_normalize_split(split))
    data = write(tmp_path / "data", documents)
    settings = DataSettings(train="data", split=tuple(float(proportion) for proportion in split.split(",")))
    for training, wanted in zip((True, False), matrix[:2]):
        if wanted is None:
            assert not training and not settings.validation_sets
            continue
        begin, end = (round(edge * float(documents)) for edge in wanted)
        part = settings.part(training)
        assert part is not None
        if begin == end:
            with pytest.raises(HexadError, match=r"data\.split takes 0 of its"):
                data.part(*part)
            continue
        ours = data.part(*part)
        assert ours.documents == end - begin
        assert [int(ours[n][0]) for n in range(ours.documents)] == list(range(begin, end))


def test_part_is_a_dataset(tmp_path: Path) -> None:
    data = write(tmp_path / "data", 50, masked=True)
    part = data.part(0.2, 0.6)
    numbers = np.arange(part.documents)
    assert set(part.tokens.tolist()) == set(range(10, 30))
    assert part.tokens_in(numbers).tolist() == [n % 5 + 1 for n in range(10, 30)]
    assert part.starts(np.array([0, part.documents])).tolist() == [0, len(part.tokens)]
    first = np.concatenate([np.arange(n % 5 + 1) % 2 == 0 for n in range(10, 30)])
    assert part.mask is not None and data.mask is not None
    assert part.mask.at(np.arange(len(part.tokens))).tolist() == first.tolist()
    assert data.mask.at(np.arange(1)).tolist() == [True]  # unchanged
    assert part.identity() != data.part(0.2, 0.5).identity() != data.identity()


def test_loader_reads_its_part_only(tmp_path: Path) -> None:
    write(tmp_path / "data", 100)
    options = {"sequence": 4, "micro": 1, "global_batch": 2, "seed": 1}
    seen = {}
    for part in ((0.0, 0.5), (0.5, 1.0)):
        with DataLoader(str(tmp_path / "data"), part=part, **options) as loader:
            steps = [loader.step(consumed) for consumed in range(0, 2 * loader.samples, 2)]
            seen[part] = {
                int(t) for step in steps for microbatch in step for t in microbatch.tokens.flatten()
            }
    assert seen[0.0, 0.5] <= set(range(50)) and seen[0.5, 1.0] <= set(range(50, 100))
    assert len(seen[0.0, 0.5]) > 40


def test_settings() -> None:
    blend = [(0.5, "a"), (0.5, "b")]
    assert DataSettings(train=blend, split=(9, 1, 0)).validation_sets == {"validation": blend}
    assert DataSettings(train="a", split=(1, 0, 0)).validation_sets == {}
    other = DataSettings(train="a", validation="b", split=(3, 1, 0))
    assert other.part(True) == (0.0, 0.75) and other.part(False) is None
    assert DataSettings(train="a").part(True) is None
    with pytest.raises(ConfigError, match=r"data.split: .*above 0"):
        load_config({"data": {"split": [0, 1, 0]}})
    with pytest.raises(ConfigError, match=r"data.split"):
        load_config({"data": {"split": [1, 0]}})
