"""Hundreds of ways to damage a checkpoint: every one is found, by loading and by ``verify``."""

import json
import os
import random
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from hexad.checkpoint import checkpointer
from hexad.checkpoint.manifest import DamagedCheckpoint, read_manifest, verify_files
from hexad.checkpoint.reader import Checkpoint
from hexad.cli.main import run as command

from ..parity.harness import Case
from ..pool import Pool
from .test_layouts import LAYOUTS, save

CASE = replace(LAYOUTS["data 2, zb_v, zero 3"], samples=4)


@pytest.fixture(scope="module")
def two(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two checkpoints of one layout, alike but for their values (the seed)."""
    checkpoints = []
    for seed in (1, 2):
        directory = tmp_path_factory.mktemp(f"seed-{seed}")
        overrides = {"run": {"steps": 10, "seed": seed}}
        case = replace(CASE, variant=replace(CASE.variant, overrides=overrides))
        pool.run(case.world, _save_apart, case, directory)
        checkpoints.append(next(directory.glob("checkpoints/step-*")))
    return checkpoints[0], checkpoints[1]


def _save_apart(case: Case, directory: Path) -> None:
    """As if every rank had a host of its own: files of the same kind and size can be exchanged."""
    real, checkpointer.host_identity = checkpointer.host_identity, lambda: f"host of {os.getpid()}"
    try:
        save(case, directory)
    finally:
        checkpointer.host_identity = real


def load(path: Path) -> None:
    """All of a checkpoint."""
    with Checkpoint(path) as checkpoint:
        for name in checkpoint.manifest.tensors:
            checkpoint.read(name)


def verify(path: Path) -> bool:
    """What ``hexad checkpoint verify`` looks at."""
    try:
        return not verify_files(path, read_manifest(path))
    except DamagedCheckpoint:
        return False


def flip(path: Path, other: Path, draw: random.Random) -> Callable[[], None]:
    """One bit, of any file, by its share of the bytes."""
    files = sorted(path.iterdir())
    file = draw.choices(files, [max(1, file.stat().st_size) for file in files])[0]
    content = bytearray(file.read_bytes())
    whole = bytes(content)
    content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    file.write_bytes(content)
    return lambda: _restore(file, whole)


def truncate(path: Path, other: Path, draw: random.Random) -> Callable[[], None]:
    file = draw.choice(sorted(path.iterdir()))
    whole = file.read_bytes()
    file.write_bytes(whole[: draw.randrange(len(whole))])
    return lambda: _restore(file, whole)


def lengthen(path: Path, other: Path, draw: random.Random) -> Callable[[], None]:
    file = draw.choice(sorted(path.iterdir()))
    whole = file.read_bytes()
    file.write_bytes(whole + draw.randbytes(draw.randrange(1, 9)))
    return lambda: _restore(file, whole)


def delete(path: Path, other: Path, draw: random.Random) -> Callable[[], None]:
    file = draw.choice(sorted(path.iterdir()))
    whole = file.read_bytes()
    file.unlink()
    return lambda: _restore(file, whole)


def swap_within(path: Path, other: Path, draw: random.Random) -> Callable[[], None]:
    one, two = draw.sample(sorted(path.iterdir()), 2)
    first, second = one.read_bytes(), two.read_bytes()
    one.write_bytes(second)
    two.write_bytes(first)

    def undo() -> None:
        _restore(one, first)
        _restore(two, second)

    return undo


def swap_across(path: Path, other: Path, draw: random.Random) -> Callable[[], None]:
    """A file of the other checkpoint, which has the same names, shapes and sizes."""
    file = draw.choice(sorted(path.iterdir()))
    whole = file.read_bytes()
    file.write_bytes((other / file.name).read_bytes())
    assert file.read_bytes() != whole, f"{file.name} is alike in both, so that nothing is damaged"
    return lambda: _restore(file, whole)


def _restore(file: Path, content: bytes) -> None:
    file.write_bytes(content)


DAMAGES = {flip: 250, truncate: 60, lengthen: 30, delete: 40, swap_within: 40, swap_across: 60}


@pytest.mark.parametrize("times", [1, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_all_damage_is_found(
    two: tuple[Path, Path], tmp_path: Path, damage: Callable[..., Callable[[], None]], times: int
) -> None:
    path = Path(shutil.copytree(two[0], tmp_path / two[0].name))
    load(path)
    assert verify(path)
    draw = random.Random(f"{damage.__name__} {times}")
    for number in range(times * DAMAGES[damage]):
        undo = damage(path, two[1], draw)
        with pytest.raises(DamagedCheckpoint):
            load(path)
        assert not verify(path), f"{damage.__name__} number {number}"
        undo()
    load(path)  # it was the damage that was found
    assert verify(path)


def test_a_checkpoint_under_the_name_of_another_step_is_found(two: tuple[Path, Path], tmp_path: Path) -> None:
    path = Path(shutil.copytree(two[0], tmp_path / "step-00000003"))
    with pytest.raises(DamagedCheckpoint, match=r"is that of step 2"):
        load(path)
    load(Path(shutil.copytree(two[0], tmp_path / "best")))  # any other name is the user's choice


def test_any_reader_of_safetensors_reads_the_files(two: tuple[Path, Path]) -> None:
    """An independent reader finds the same values in the same places."""
    with Checkpoint(two[0]) as checkpoint:
        names = list(checkpoint.manifest.files)
        for name, tensor in checkpoint.manifest.tensors.items():
            whole, dims = checkpoint.read(name), len(tensor.shape)
            for number, _, _, *place in checkpoint.manifest.index.rows_of(name).tolist():
                ranges = [slice(first, first + size) for first, size in zip(place[:dims], place[dims:])]
                key = f"{name}[{','.join(f'{r.start}:{r.stop}' for r in ranges)}]"
                with safe_open(two[0] / names[number], "pt") as file:
                    assert torch.equal(file.get_tensor(key), whole[tuple(ranges)])


def test_verify_names_the_file(
    two: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = Path(shutil.copytree(two[0], tmp_path / "checkpoints" / two[0].name))
    assert command(["checkpoint", "verify", str(path)]) == 0
    assert "intact: " in capsys.readouterr().out
    file = path / "rank-00001.safetensors"
    content = bytearray(file.read_bytes())
    content[-5] ^= 4
    file.write_bytes(content)
    assert command(["checkpoint", "verify", str(tmp_path)]) == 2  # a run: all its checkpoints
    out, err = capsys.readouterr()
    assert "rank-00001.safetensors: its checksum does not match its content" in out
    assert err.startswith("hexad: error: checkpoint verify: damaged: ") and str(path) in err


def test_inspect_shows_what_it_holds(two: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert command(["checkpoint", "inspect", str(two[0])]) == 0
    out = capsys.readouterr().out
    assert f"{two[0]}: step 2, 8 samples" in out
    assert "written by 4 ranks (pipeline 2, data 2, zero 3, schedule zb_v, virtual_stages 2)" in out
    assert re.search(r"model\.layers\.0\.ffn\.up\.weight +float64 +28 x 20\n", out)
    assert "schedule: zb_v" in out  # the configuration
    assert command(["checkpoint", "inspect", str(two[0]), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["step"] == 2 and document["layout"]["zero"] == 3 and not document["weights_only"]
    assert document["tensors"]["optimizer.exp_avg.norm.weight"] == {"shape": [20], "dtype": "float64"}
    assert command(["checkpoint", "inspect", str(two[0].parents[2])]) == 2
    assert "neither a checkpoint nor a run directory" in capsys.readouterr().err
