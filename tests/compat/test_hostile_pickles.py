"""Pickles that claim more than they hold are refused in one line, before memory is taken for the claim."""

import pickle
import random
import resource
import struct
import zipfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from hexad.compat.facade.inert import load_inert, unpickle_inert
from hexad.config import HexadError

BEGIN = b"\x80\x04"


@pytest.fixture(autouse=True)
def _little_memory() -> Iterator[None]:
    """What a test may take beyond what the process has: a claim that is believed fails at once."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 30), before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


def eight(count: int) -> bytes:
    return struct.pack("<Q", count)


def four(count: int) -> bytes:
    return struct.pack("<i", count)


def number(value: int) -> bytes:
    return b"\x8a\x09" + value.to_bytes(9, "little", signed=True)


def doubled(make: bytes, times: int = 60) -> bytes:
    """A container of two containers of two ..., each of which the pickle holds once."""
    steps = (make.replace(b"@", bytes([n])) + b"q" + bytes([n + 1]) for n in range(times))
    return BEGIN + b"]q\x00" + b"".join(steps)


REFUSED = {
    "a text of 34 GB": (BEGIN + b"\x8d" + eight(34 << 30), "a value of 36,507,222,016 bytes, more"),
    "bytes of 34 GB": (BEGIN + b"\x8e" + eight(34 << 30), "a value of 36,507,222,016 bytes, more"),
    "a bytearray of 34 GB": (BEGIN + b"\x96" + eight(34 << 30), "a value of 36,507,222,016 bytes, more than"),
    "an integer of 2 GB": (BEGIN + b"\x8b" + four(2**31 - 1), "a value of 2,147,483,647 bytes, more than"),
    "a negative length": (BEGIN + b"\x8b" + four(-5), "a value of -5 bytes, more than the file has"),
    "an integer of 2000 bytes": (BEGIN + b"\x8b" + four(2000) + b"\1" * 2000, "an integer of 2,000 bytes"),
    "digits": (BEGIN + b"L" + b"9" * 200_000 + b"L\n.", "Exceeds the limit (4300 digits)"),
    "lists in lists": (BEGIN + b"]" * 5000 + b"a" * 4999 + b".", "containers in one another, more than 200"),
    "tuples in tuples": (BEGIN + b"N" + b"\x85" * 5000 + b".", "containers in one another, more than 200"),
    "a list in itself": (BEGIN + b"]q\x00h\x00a.", "or in themselves"),
    "two of two of two": (doubled(b"](h@h@e") + b".", "its containers stand for more than 1,0"),
    "tuples as keys": (b"".join((doubled(b"h@h@\x86")[:-2], b"q\xf0}h\x3cNs.")), "tuples in one another"),
    "nothing": (b"", "cannot be read: EOFError"),
    "an end": (BEGIN + b".", "cannot be read"),
}  # fmt: skip


def archive(path: Path, content: bytes, entries: Iterable[tuple[str, bytes]] = (), kind: int = 0) -> Path:
    with zipfile.ZipFile(path, "w", kind) as file:
        for name, entry in (("data.pkl", content), ("byteorder", b"little"), ("version", b"3\n"), *entries):
            file.writestr(f"archive/{name}", entry)
    return path


@pytest.mark.parametrize("name", REFUSED)
def test_refused(tmp_path: Path, name: str) -> None:
    content, says = REFUSED[name]
    (tmp_path / ".metadata").write_bytes(content)
    with pytest.raises(HexadError) as refused:
        unpickle_inert(tmp_path / ".metadata", ())
    assert says in str(refused.value) and f"{tmp_path}/.metadata: " in str(refused.value)
    with pytest.raises(HexadError, match=r"a\.pt: "):
        load_inert(archive(tmp_path / "a.pt", content), ())


def test_a_large_index_of_the_memo_takes_no_memory(tmp_path: Path) -> None:
    (tmp_path / "p").write_bytes(BEGIN + b"Nr" + struct.pack("<I", 2**32 - 1) + b".")
    assert unpickle_inert(tmp_path / "p", ()) is None


def test_a_bytearray_of_zeros(tmp_path: Path) -> None:
    content = BEGIN + b"c__builtin__\nbytearray\nJ" + four(2**31 - 1) + b"\x85R."
    with pytest.raises(HexadError, match="a bytearray of 2,147,483,647 bytes, more than the file has"):
        load_inert(archive(tmp_path / "a.pt", content), ())


def test_methods_of_dictionaries_stay(tmp_path: Path) -> None:
    content = BEGIN + b"ccollections\nOrderedDict\n)R}X\x05\x00\x00\x00itemsNsb."
    assert list(load_inert(archive(tmp_path / "a.pt", content), ()).items()) == []


def tensor(size: tuple[int, ...], stride: tuple[int, ...], offset: int = 0, count: int = 4) -> bytes:
    """A tensor of a storage of so many floats, as torch.save pickles it."""
    sizes, strides = (b"(" + b"".join(map(number, values)) + b"t" for values in (size, stride))
    storage = b"(X\x07\x00\x00\x00storagectorch\nFloatStorage\nX\x01\x00\x00\x000X\x03\x00\x00\x00cpu"
    return (
        BEGIN + b"ctorch._utils\n_rebuild_tensor_v2\n(" + storage + number(count) + b"tQ" + number(offset)
        + sizes + strides + b"\x89ccollections\nOrderedDict\n)RtR."
    )  # fmt: skip


@pytest.mark.parametrize(
    ("size", "stride", "offset", "count"),
    [
        ((10**6, 10**6), (10**6, 1), 0, 4),
        ((10**12,), (0,), 0, 4),
        ((1000, 1000), (0, 0), 0, 4),
        ((2,), (1,), 10**15, 4),
        ((-1,), (1,), 0, 4),
        ((10**12,), (1,), 0, 10**12),
        ((2**62, 4), (1, 1), 0, 4),
    ],
)
@pytest.mark.parametrize("part", [False, True])
def test_tensors_beyond_their_file(
    tmp_path: Path, size: tuple[int, ...], stride: tuple[int, ...], offset: int, count: int, part: bool
) -> None:
    path = archive(tmp_path / "a.pt", tensor(size, stride, offset, count), [("data/0", b"\0" * 16)])
    with pytest.raises(HexadError, match=r"a\.pt: "):
        load_inert(path, (), path.read_bytes() if part else None)
    good = archive(tmp_path / "a.pt", tensor((2, 2), (2, 1)), [("data/0", b"\0" * 16)])
    assert load_inert(good, ()).tolist() == [[0, 0], [0, 0]]


def test_entries(tmp_path: Path) -> None:
    """Compressed entries, which torch would map as they are, overlapping ones, and two of one name."""
    path, packed = tmp_path / "a.pt", tmp_path / "b.pt"
    torch.save({"a": torch.arange(1000.0)}, path)
    with zipfile.ZipFile(path) as file:
        entries = [(entry.filename, file.read(entry)) for entry in file.infolist()]
    for kind in (zipfile.ZIP_DEFLATED, zipfile.ZIP_LZMA):
        with zipfile.ZipFile(packed, "w", kind) as file:
            for name, content in entries:
                file.writestr(name, content)
        with pytest.raises(HexadError, match=r"b\.pt: its entries are compressed, not written by"):
            load_inert(packed, ())
    with zipfile.ZipFile(packed, "w") as file, pytest.warns(UserWarning, match="Duplicate name"):
        for name, content in (*entries, entries[0]):
            file.writestr(name, content)
    with pytest.raises(HexadError, match="its entries overlap, or two have one name"):
        load_inert(packed, ())


def sweep(directory: Path, seed: int, count: int) -> None:
    """Damaged files load, or are refused; of a file of torch.save and of a plain pickle."""
    rng, path = random.Random(seed), directory / "a.pt"
    value = {"a": torch.arange(100.0), "b": [(1, "x"), {2.5: None}], "c": 2**100, "d": {"e": b"bytes" * 9}}
    torch.save(value, path)
    plain = pickle.dumps([value["b"], value["c"], value["d"]] * 3, protocol=4)
    loads: tuple[tuple[bytes, Callable[[Path, Any], Any]], ...] = (
        (path.read_bytes(), load_inert), (plain, unpickle_inert),
    )  # fmt: skip
    refused = 0
    for _ in range(count):
        content, load = rng.choice(loads)
        damaged = bytearray(content)
        for _ in range(rng.choice((1, 2, 8))):
            damaged[rng.randrange(len(damaged))] = rng.randrange(256)
        path.write_bytes(damaged[: rng.randrange(len(damaged))] if rng.random() < 0.1 else damaged)
        try:
            load(path, ())
        except HexadError as error:
            assert str(path) in str(error) and "\n" not in str(error) and len(str(error)) < 1000, seed
            refused += 1
    assert count // 4 < refused < count, (seed, refused)


def test_random_damage(tmp_path: Path) -> None:
    seed = random.randrange(10**6)
    print("seed", seed)
    sweep(tmp_path, seed, 150)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_much_random_damage(tmp_path: Path, seed: int) -> None:
    sweep(tmp_path, seed, 4000)
