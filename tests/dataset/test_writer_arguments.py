"""``IndexedWriter``: what is no document is refused in one line, in the words of Python's caller."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hexad.config import HexadError
from hexad.dataset.indexed import IndexedDataset, IndexedWriter

TOKENS: dict[str, Any] = {
    "floats": [1.0, 2.0],
    "an array of floats": np.array([1.5]),
    "nan": [float("nan")],
    "complex numbers": [1j],
    "lists of lists": [[1, 2], [3, 4]],
    "lists of other lengths": [[1], [2, 3]],
    "two dimensions": np.ones((2, 2), int),
    "a tensor of two dimensions": torch.ones(2, 2, dtype=torch.int64),
    "texts": ["a"],
    "a text": "abc",
    "bytes": b"abc",
    "nothing": None,
    "a number": 5,
    "none among them": [1, None],
    "true": [True, False],
    "an array of bools": np.array([True]),
    "a dictionary": {1: 2},
    "a set": {1, 2},
    "dates": np.array(["2024-01-01"], dtype="datetime64[D]"),
    "a negative id": [-1],
    "an id too large": [1, 65536],
    "an id beyond any integer": [2**70],
}
TRAINED: dict[str, Any] = {
    "numbers": [0, 1],
    "floats": [0.5, 1.0],
    "too few": [True],
    "too many": [True] * 3,
    "two dimensions": [[True, False]],
    "a text": "ab",
    "a bool": True,
}
LENGTHS: dict[str, Any] = {
    "floats": [1.0, 1.0],
    "another sum": [1, 2],
    "a negative one": [3, -1],
    "two dimensions": [[1, 1]],
    "bools": [True, True],
    "a number": 2,
}
CASES: list[tuple[str, str, dict[str, Any]]] = [
    *(("tokens", name, {"tokens": value}) for name, value in TOKENS.items()),
    *(("trained", name, {"tokens": [1, 2], "trained": value}) for name, value in TRAINED.items()),
    *(("lengths", name, {"tokens": [1, 2], "lengths": value}) for name, value in LENGTHS.items()),
]


@pytest.mark.parametrize(("argument", "name", "values"), CASES, ids=[f"{c[0]}: {c[1]}" for c in CASES])
def test_what_is_no_document_is_refused(
    tmp_path: Path, argument: str, name: str, values: dict[str, Any]
) -> None:
    with (
        pytest.raises(HexadError, match=rf"^{argument}: found .*expected") as error,
        IndexedWriter(tmp_path / "d", np.uint16) as writer,
    ):
        writer.add_document(**values)
    assert "\n" not in str(error.value) and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([1, 2], [1, 2]),
        ((1, 2), [1, 2]),
        (range(3), [0, 1, 2]),
        (np.array([1, 2], ">i4"), [1, 2]),
        ([np.int64(1), np.uint8(2)], [1, 2]),
        (torch.tensor([1, 65535]), [1, 65535]),
        ([], []),
    ],
)
def test_integers_of_one_dimension_are_tokens(tmp_path: Path, values: Any, expected: list[int]) -> None:
    for trained in ([True] * len(expected), np.arange(len(expected)) > 0, torch.arange(len(expected)) > 0):
        with IndexedWriter(tmp_path / "d", np.uint16) as writer:
            writer.add_document(values, trained=trained)  # type: ignore[arg-type]
            writer.add_document([9])
        data = IndexedDataset(tmp_path / "d")
        assert data[0].tolist() == expected
        marks = (
            [True] * len(expected) if data.mask is None else data.mask.at(np.arange(len(expected))).tolist()
        )
        assert marks == [bool(mark) for mark in trained]


@pytest.mark.parametrize("dtype", [float, None, "x", np.uint64, bool, [np.uint16]])
def test_another_dtype_is_refused(tmp_path: Path, dtype: Any) -> None:
    with pytest.raises(HexadError, match=r"^dtype: found .*, expected one of uint8, int8, int16, int32"):
        IndexedWriter(tmp_path / "d", dtype)


def closed(use: Callable[[IndexedWriter], object]) -> Callable[[Path], object]:
    def after(prefix: Path) -> object:
        with IndexedWriter(prefix, np.uint16) as writer:
            writer.add_document([1])
        return use(writer)

    return after


@pytest.mark.parametrize(
    "use", [closed(lambda writer: writer.add_document([1])), closed(lambda writer: writer.finish())]
)
def test_a_closed_writer_is_named(tmp_path: Path, use: Callable[[Path], object]) -> None:
    with pytest.raises(HexadError, match=r"d\.bin: the writer is closed; write inside its 'with' block"):
        use(tmp_path / "d")
    assert IndexedDataset(tmp_path / "d").tokens.tolist() == [1]


def test_documents_need_lengths(tmp_path: Path) -> None:
    with (
        pytest.raises(HexadError, match="lengths: found None"),
        IndexedWriter(tmp_path / "d", np.uint16) as w,
    ):
        w.add_documents([1, 2], None)  # type: ignore[arg-type]
