"""Tables of other systems' names: the format of their files, and that every row is complete."""

from pathlib import Path

import pytest

from hexad.compat.facade.absent import UnknownArgument
from hexad.compat.facade.foreign_names import (
    ForeignName,
    Meaning,
    check_arguments,
    notes_without_effect,
    read_foreign_names,
)
from hexad.compat.megatron import tables as of_megatron
from hexad.compat.nemo import tables as of_nemo
from hexad.config import HexadError, setting_names

TABLE = """\
# A comment.
size:int=4  model.size  in units,
      one of 2, 4
with --size, --kind big:
  !no-fast  -
none: nothing to do
  quiet/q
[Others]
?a-b@ab beta:float*=0.5  later:model.b  not yet
any=[1,"x"]  refused
refused:
  other=null
"""


@pytest.fixture
def names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, ForeignName]:
    """The rows of the table by name."""
    monkeypatch.setattr("hexad.compat.facade.foreign_names.files", lambda _: tmp_path)
    (tmp_path / "table.txt").write_text(TABLE, encoding="utf-8")
    groups = read_foreign_names("a.package", "table.txt", "--")
    assert {title: len(rows) for title, rows in groups.items()} == {"": 3, "Others": 4}
    return {row.name: row for rows in groups.values() for row in rows}


def test_format(names: dict[str, ForeignName]) -> None:
    size, fast, quiet = names["--size"], names["--no-fast"], names["--quiet"]
    assert (size.kind, size.default, size.target, size.effect) == (int, 4, "model.size", "becomes")
    assert (size.note, list(size.choices), size.attribute) == ("in units,", ["2", "4"], "size")
    assert (fast.kind, fast.default, fast.target, fast.attribute) == (bool, True, "", "fast")
    assert (fast.aliases, fast.needs) == (("--disable-fast",), ("--size", "--kind big"))
    assert (quiet.effect, quiet.note, quiet.aliases[0]) == ("none", "nothing to do", "-q")
    pair, several = names["--a-b"], names["--beta"]
    assert (pair.attribute, pair.aliases) == ("ab", ("--no-a-b",))
    assert (several.several, several.default, several.effect, several.target) == (
        True,
        (0.5,),
        "refused",
        "model.b",
    )
    assert (names["--any"].kind, names["--any"].default) == (object, [1, "x"])
    assert names["--other"] == ForeignName(name="--other", kind=object, effect="refused")


@pytest.mark.parametrize(
    ("meaning", "summary", "problem"),
    [
        (Meaning(target="model.layers"), "model.layers", ""),
        (Meaning(effect="none", note="always on"), "no effect: always on", ""),
        (
            Meaning(effect="refused", note="it is gone"),
            "refused: it is gone",
            "found 3, but it is gone; leave it out",
        ),
        (Meaning(effect="refused", fix="use 1"), "refused: use 1", "found 3; it is not supported: use 1"),
    ],
)
def test_words(meaning: Meaning, summary: str, problem: str) -> None:
    assert meaning.summary == summary
    if problem:
        assert meaning.problem("3") == problem


def test_names_with_the_same_reason_are_one_note() -> None:
    reasons = [("a", ": why"), ("b", " without c"), ("d", ": why")]
    assert notes_without_effect(reasons) == ("a, d: no effect: why", "b: no effect without c")


def test_arguments() -> None:
    """The default and None are accepted, and any value of one without effect."""
    known = (
        ForeignName(name="scale", kind=object, default=1.0, effect="refused"),
        ForeignName(name="group", kind=object, effect="none", note="of the mesh"),
    )
    check_arguments("train", {"scale": 1.0, "group": object()}, known)
    check_arguments("train", {"scale": None}, known)
    with pytest.raises(HexadError, match=r"train: found scale 2\.0; it is not supported: leave it out"):
        check_arguments("train", {"scale": 2.0}, known)
    with pytest.raises(UnknownArgument, match=r"unexpected argument 'scales' \(did you mean 'scale'\?\)"):
        check_arguments("train", {"scales": 2.0}, known)


@pytest.mark.parametrize("table", [of_megatron.ARGUMENTS, of_nemo.ARGUMENTS])
def test_arguments_without_effect_have_a_reason(table: dict[str, tuple[ForeignName, ...]]) -> None:
    for function, rows in table.items():
        assert len({row.name for row in rows}) == len(rows), function
        assert all(row.effect == "refused" or (row.effect == "none" and row.note) for row in rows), function


@pytest.mark.parametrize("table", [of_megatron.SETTINGS, of_nemo.SETTINGS])
def test_settings_are_those_of_flags_or_have_a_reason(table: dict[str, ForeignName]) -> None:
    """A target that looks like a flag is one; only those that need code of their own name a setting of
    Hexad."""
    for setting in table.values():
        meaning = of_megatron.meaning_of(setting)
        if setting.target.startswith("--"):
            assert meaning is of_megatron.FLAGS[setting.target], setting
        elif setting.effect == "becomes":
            assert setting.target in setting_names(), setting
        assert setting.effect != "none" or setting.note, setting
