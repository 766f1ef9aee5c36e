"""Arguments and settings that look like others: paths with ``=``, sizes without a unit, a colon without a
blank, ``pathlib.Path``, numbers of YAML."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

import hexad
from hexad.checkpoint.hugging_face.files import parse_size
from hexad.cli.evaluate import _Evaluate, _named
from hexad.cli.options import is_override
from hexad.config import HexadError, dump_config
from hexad.dataset.indexed import IndexedWriter

from ..training.command import call, write_run


def write(prefix: Path) -> None:
    with IndexedWriter(prefix, np.uint16) as writer:
        for number in range(20):
            writer.add_document((np.arange(40) * 3 + number) % 250)


DATA = ("d/lr=1/x", "lr=1/x", "d/run.seed=1/x", "data.train=3/x", "a=b", "plain/x")


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for prefix in DATA:
        write(Path(prefix))
    return tmp_path


@pytest.mark.parametrize(
    ("values", "sets"),
    [
        *((prefix, {Path(prefix).name: prefix}) for prefix in DATA),
        ("./lr=1/x", {"x": "./lr=1/x"}),
        ("no/such=1/x", {"x": "no/such=1/x"}),
        ("n=plain/x", {"n": "plain/x"}),
        ("web.v2=plain/x", {"web.v2": "plain/x"}),
        ("n=d/lr=1/x", {"n": "d/lr=1/x"}),
        ("n=a=b", {"n": "a=b"}),
        ("d/lr=1/x m=plain/x", {"x": "d/lr=1/x", "m": "plain/x"}),
        ("d/lr=1/x lr=1/x", {"d/lr=1/x": "d/lr=1/x", "lr=1/x": "lr=1/x"}),
    ],
)
def test_a_path_with_an_equals_sign_is_data(place: Path, values: str, sets: dict[str, str]) -> None:
    command = _Evaluate("evaluate")
    assert all(command.takes(value) for value in values.split())
    assert _named(tuple(values.split())) == sets


@pytest.mark.parametrize("value", ["data.sequence=8", "parallel.tensor=2", "run.dir=a/b", "data.sequence="])
def test_a_setting_is_none(place: Path, value: str) -> None:
    assert not _Evaluate("evaluate").takes(value) and is_override(value)


def test_commands_with_such_paths(place: Path) -> None:
    run = write_run(place / "lr=2", "d/lr=1/x", run={"steps": 1})
    assert run.train().status == 0
    arguments = (
        "evaluate",
        str(run.directory),
        "--data",
        "d/lr=1/x",
        "n=a=b",
        "data.sequence=8",
        "--batches",
        "1",
    )
    result = call(*arguments, "--json")
    assert result.status == 0 and list(json.loads(result.out)["results"]) == ["x", "n"]
    assert list(hexad.evaluate(run.directory, Path("d/lr=1/x"), batches=1)) == ["x"]
    assert list(hexad.evaluate(run.directory, {"n": Path("a=b")}, batches=1)) == ["n"]
    for path in ("lr=2/run.yaml", str(run.path)):
        assert call("show", "layout", path, "parallel.data=2").status == 0
        assert call("show", "memory", path).status == 0


@pytest.mark.parametrize("text", ["5", "1", "0", "999", "5.5", "999999", "-5", "", "GB"])
def test_a_size_needs_its_unit(text: str) -> None:
    with pytest.raises(
        HexadError, match=r"^--shard-size: found .*, expected a size such as 5GB, 200MB or 4GiB"
    ):
        parse_size(text, "--shard-size")


@pytest.mark.parametrize(
    ("text", "size"),
    [("5GB", 5 * 10**9), ("5 gb", 5 * 10**9), ("60KB", 60_000), ("4GiB", 2**32), ("1.5M", 1_500_000),
     ("1000000", 10**6), ("5000000000", 5 * 10**9), ("512B", 512)],
)  # fmt: skip
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text, "--shard-size") == size


@pytest.mark.parametrize(
    ("setting", "fix"),
    [
        ("model.lora={rank:4}", "'rank:4' has no blank after its colon; write 'rank: 4'"),
        ("model.lora={rank:4,alpha:8}", "write 'rank: 4'"),
        ("model.lora={rank: 4, alpha:8}", "write 'alpha: 8'"),
        ("model.lora={rank:4, targets: all}", "write 'rank: 4'"),
        ("model.moe={experts:8,top_k:2}", "write 'experts: 8'"),
        ("model.rope_scaling={type:yarn}", "write 'type: yarn'"),
        ("run={steps:5}", "override run, line 1, column 2: not valid YAML: 'steps:5' has no blank"),
        ("model={lora: {rank:4}}", "write 'rank: 4'"),
        ("batch=micro:1", "batch: found 'micro:1', expected settings such as micro"),
    ],
)
def test_a_missing_blank_is_named(setting: str, fix: str) -> None:
    with pytest.raises(HexadError, match="blank after ") as error:
        hexad.load_config(None, [setting])
    assert fix in str(error.value)


@pytest.mark.parametrize(
    "text", ["run:{steps: 4}", "run:\n  steps:4", "run: {steps:4}", "run:\n  {steps:4, seed: 1}"]
)
def test_a_missing_blank_in_a_file(tmp_path: Path, text: str) -> None:
    (tmp_path / "run.yaml").write_text(text)
    with pytest.raises(HexadError, match="blank after "):
        hexad.load_config(tmp_path / "run.yaml")


@pytest.mark.parametrize("setting", ["run={'steps':4}", 'run={"steps":4}', "run={steps: 4}", "run.steps='4'"])
def test_other_forms_of_the_same(setting: str) -> None:
    """Quoted keys need no blank, as in JSON; a quoted number is one where a number is expected."""
    assert hexad.load_config(None, [setting]).run.steps == 4
    sets = hexad.load_config(None, ["data.validation={web:en: a, 'b:c':d/e}"]).data.validation
    assert sets == {"web:en": "a", "b:c": "d/e"}


@pytest.mark.parametrize(
    "tree",
    [
        {"run": {"dir": Path("a")}},
        {"data": {"train": Path("a")}},
        {"data": {"train": [[1.0, Path("a")], [2.0, "b"]]}},
        {"data": {"validation": {"a": Path("a")}}},
        {"data": {"tokenizer": Path("a")}},
        {"checkpoint": {"load": Path("a")}},
    ],
)
def test_paths_of_python_are_names(tree: dict[str, Any]) -> None:
    config = hexad.load_config(tree)
    text = json.loads(json.dumps(tree, default=str))
    assert config == hexad.load_config(text)
    assert hexad.load_config(yaml.safe_load(dump_config(config))) == config
    with pytest.raises(HexadError, match="a name without '~'"):
        hexad.load_config(json.loads(json.dumps(tree, default=lambda _: "~/a")))
