"""Files that are not what was written: at the start of a run, and by ``hexad data verify``."""

import json
import shutil
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest

from hexad.cli.main import run
from hexad.config import HexadError
from hexad.dataset.built import check_same_data, identities, open_built, verify
from hexad.dataset.indexed import IndexedDataset, IndexedWriter
from hexad.dataset.sidecar import bin_path, idx_path, read_sidecar, sidecar_path, write_sidecar

ENDINGS = ".bin", ".idx", ".mask", ".hexad.json"


def write(prefix: Path, masked: bool = True, tokens: int = 20) -> str:
    """Five documents; with a mask, every third token is not trained."""
    with IndexedWriter(prefix, np.uint16) as writer:
        for number in range(5):
            ids = np.arange(tokens) * (number + 1) % 250
            writer.add_document(ids, None, ids % 3 != 0 if masked else None)
    return str(prefix)


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_flipped_bit_is_noticed(tmp_path: Path, ending: str) -> None:
    prefix = write(tmp_path / "d")
    path = Path(f"{prefix}{ending}")
    content = path.read_bytes()
    open_built(prefix, None, None, None)
    for place in range(0, len(content), 3 if ending == ".hexad.json" else 1):
        damaged = bytearray(content)
        damaged[place] ^= 1 << place % 8
        path.write_bytes(damaged)
        with pytest.raises(HexadError, match=r"d\.(bin|idx|mask|hexad\.json)") as error:
            open_built(prefix, None, None, None)
        problems = verify(prefix).problems
        assert problems and path.name in problems[0], (place, problems)
        assert not any("\n" in line for line in [str(error.value), *problems])
    path.write_bytes(content)
    assert verify(prefix).problems == []


@pytest.mark.parametrize("place", [70_000, 1_000_001, 3_999_999])
def test_verify_reads_what_is_not_sampled(
    tmp_path: Path, place: int, capsys: pytest.CaptureFixture[str]
) -> None:
    prefix = write(tmp_path / "d", masked=False, tokens=400_000)
    with bin_path(prefix).open("r+b") as stream:
        stream.seek(place)
        byte = stream.read(1)
        stream.seek(place)
        stream.write(bytes([byte[0] ^ 1]))
    assert run(["data", "verify", prefix, "--json"]) == 2
    streams = capsys.readouterr()
    assert f"{prefix}.bin: damaged or replaced" in streams.err
    facts = json.loads(streams.out)
    assert facts["damaged"] and facts["results"][prefix]["checksums"]


def _without(*endings: str) -> Callable[[str], None]:
    def remove(prefix: str) -> None:
        for ending in endings:
            Path(f"{prefix}{ending}").unlink()

    return remove


def _truncated(prefix: str) -> None:
    bin_path(prefix).write_bytes(bin_path(prefix).read_bytes()[:-2])


def _others(*endings: str) -> Callable[[str], None]:
    def replace_files(prefix: str) -> None:
        other = write(Path(f"{prefix}-other"), tokens=21)
        for ending in endings:
            shutil.copy(f"{other}{ending}", f"{prefix}{ending}")

    return replace_files


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_without(".bin"), r"d\.bin"),
        (_without(".idx"), r"d\.idx"),
        (_without(".mask"), r"d\.mask"),
        (_truncated, r"d\.bin"),
        (_others(".bin", ".idx", ".mask"), r"d\.(bin|idx)"),
        (_others(".hexad.json"), r"d\.(bin|idx)"),
    ],
    ids=["no bin", "no idx", "no mask", "truncated", "other data", "another sidecar"],
)
def test_files_that_do_not_belong_together(
    tmp_path: Path, change: Callable[[str], None], message: str
) -> None:
    prefix = write(tmp_path / "d")
    change(prefix)
    assert verify(prefix).problems
    with pytest.raises(HexadError, match=message):
        open_built(prefix, None, None, None)


def test_data_without_checksums(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Those of Megatron, and of earlier versions of Hexad, whose sidecar had a sampled fingerprint only."""
    prefix = write(tmp_path / "d", masked=False)
    sidecar = read_sidecar(prefix)
    assert sidecar is not None
    earlier = {name: value for name, value in asdict(sidecar).items() if name != "checksums"}
    sidecar_path(prefix).write_text(json.dumps(earlier, indent=2) + "\n")
    for left in range(2):
        assert len(open_built(prefix, 250, None, None).tokens) == 100
        assert run(["data", "verify", prefix]) == 0
        assert "consistent, but there are no checksums" in capsys.readouterr().out
        assert not verify(prefix).checksums
        if not left:
            sidecar_path(prefix).unlink()
    write_sidecar(prefix, replace(sidecar, checksums=None, max_token=7))
    assert "largest id" in verify(prefix).problems[0]
    _truncated(prefix)
    assert run(["data", "verify", prefix]) == 2
    assert "d.bin: truncated" in capsys.readouterr().err


def test_verify_of_what_is_no_data_set(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prefix = write(tmp_path / "d")
    for name, message in ((f"{prefix}.bin", "leave out the '.bin'"), (f"{prefix}x", "no such file")):
        assert run(["data", "verify", name]) == 2
        assert message in capsys.readouterr().err


def test_the_same_data_under_another_name_or_without_a_sidecar_are_the_same(tmp_path: Path) -> None:
    prefix = write(tmp_path / "d")
    before = identities([prefix])
    (tmp_path / "moved").mkdir()
    for ending in ENDINGS:
        shutil.copy(f"{prefix}{ending}", tmp_path / "moved" / f"d{ending}")
    assert [*identities([str(tmp_path / "moved" / "d")]).values()] == [*before.values()]
    sidecar_path(prefix).unlink()
    check_same_data(before, identities([prefix]), "a checkpoint")
    write(tmp_path / "d")
    check_same_data(before, identities([prefix]), "a checkpoint")
    for change in ({"tokens": 21}, {"masked": False}):
        write(tmp_path / "d", **change)  # type: ignore[arg-type]
        with pytest.raises(HexadError, match="d, which was rebuilt or replaced since a checkpoint was saved"):
            check_same_data(before, identities([prefix]), "a checkpoint")


def test_one_process_writes_a_data_set(tmp_path: Path) -> None:
    prefix = tmp_path / "d"
    with IndexedWriter(prefix, np.uint16) as writer:
        with pytest.raises(HexadError, match=r"d\.bin: process \d+ on \S+ is writing it; wait"):
            IndexedWriter(prefix, np.uint16)
        writer.add_document([1])
    with IndexedWriter(prefix, np.uint16) as writer:
        writer.add_document([2])
    assert IndexedDataset(prefix).tokens.tolist() == [2] and idx_path(prefix).exists()
    assert not list(tmp_path.glob(".*"))
