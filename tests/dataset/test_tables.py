"""Tables against the ``.jsonl`` of the same records: a table has one schema for all of them, and null where a
record lacks a key."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hexad.config import HexadError
from hexad.dataset.build.builder import build
from hexad.dataset.build.inputs import find_files
from hexad.dataset.build.sources import cut, read
from hexad.dataset.indexed import IndexedDataset

pyarrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")

# Keys are sorted, as a table has another order of them.
TEMPLATE = (
    "{% for tool in tools or [] %}<tool>{{ tool | tojson(sort_keys=True) }}{% endfor %}"
    "{% for m in messages %}{{ m.role }}{% generation %}{{ m | tojson(sort_keys=True) }}{% endgeneration %}"
    "{% endfor %}"
)
Records = list[dict[str, Any]]


def user(text: Any = "question", **more: Any) -> dict[str, Any]:
    return {"role": "user", "content": text, **more}


def answer(text: Any = "answer", **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


def calls(*functions: tuple[str, Any]) -> dict[str, Any]:
    listed = [{"type": "function", "function": {"name": n, "arguments": a}} for n, a in functions]
    return answer("", tool_calls=listed)


def parts(text: str, **more: Any) -> Records:
    return [{"type": "text", "text": text, **more}]


def conversation(*messages: Any, **more: Any) -> dict[str, Any]:
    return {"messages": [user(), *messages], **more}


def function(name: str, **properties: Any) -> dict[str, Any]:
    schema = {"type": "object", "properties": properties, "required": [*properties]}
    return {"type": "function", "function": {"name": name, "parameters": schema}}


TEXT, NUMBER = {"type": "string", "description": "a text"}, {"type": "integer", "minimum": 1}
RECORDS: dict[str, Records] = {
    "calls of different functions": [
        conversation(calls(("weather", {"city": "Oslo"})), {"role": "tool", "content": "5"}, answer()),
        conversation(calls(("time", {"zone": "CET", "format": "24h"}))),
    ],
    "two calls of an answer": [conversation(calls(("f", {"a": "x"}), ("g", {"b": 1, "c": True})))],
    "deep arguments": [
        conversation(calls(("f", {"a": {"b": {"c": 1}}}))),
        conversation(calls(("f", {"a": {"b": {"d": [{"e": 1}, {"f": 2, "e": 3}]}}}))),
    ],
    "no arguments": [conversation(calls(("f", {"a": 1}))), conversation(calls(("g", {})))],
    "empty lists": [conversation(calls(("f", {"a": []}))), conversation(calls(("g", {"a": ["x"]})))],
    "null in a list": [conversation(calls(("f", {"a": ["x", None]}))), conversation(calls(("g", {"b": 1})))],
    "tools": [conversation(answer(), tools=[function("f", city=TEXT), function("g", n=NUMBER, city=TEXT)])],
    "tools of some": [conversation(answer(), tools=[function("f", n=NUMBER)]), conversation(answer())],
    "names": [conversation(answer(name="bot")), conversation(answer(reasoning_content="hm"))],
    "parts": [{"messages": [user(parts("x")), answer(parts("y", cache={"ttl": 1}))]},
              {"messages": [user(parts("x", extra="z")), answer(parts("y"))]}],
    "text and conversations": [{"text": "plain"}, conversation(answer())],
    "text and completions": [{"text": "plain"}, {"prompt": "p", "completion": "c"}],
    "instructions and conversations": [{"instruction": "i", "output": "o"}, conversation(answer())],
    "instructions": [{"instruction": "i", "output": "o"},
                     {"instruction": "i", "input": "in", "output": "o", "history": [["q", "a"]]}],
    "ShareGPT": [{"conversations": [{"from": "human", "value": "x"}, {"from": "gpt", "value": "y"}]},
                 {"conversations": [{"from": "gpt", "value": "y"}], "system": "s"}],
}  # fmt: skip


def table(records: Records) -> Any:
    """What Arrow makes of records: columns of all keys."""
    names = dict.fromkeys(name for record in records for name in record)
    return pyarrow.table({name: [record.get(name) for record in records] for name in names})


def built(path: Path, **options: Any) -> tuple[list[int], list[int], list[bool] | None]:
    """Ids, lengths of documents, and which tokens are trained."""
    (path.parent / "template.jinja").write_text(TEMPLATE)
    prefix = path.with_name(f"{path.name}.data")
    build([path], prefix, "byte", workers=1, chat_template=str(path.parent / "template.jinja"), **options)
    data = IndexedDataset(prefix)
    mask = None if data.mask is None else data.mask.at(np.arange(len(data.tokens))).tolist()
    return data.tokens.tolist(), data.lengths.tolist(), mask


def both(directory: Path, records: Records, rows: Any = None) -> tuple[Path, Path]:
    """The same records as lines and as a table."""
    lines, rows_file = directory / "a.jsonl", directory / "a.parquet"
    lines.write_text("".join(json.dumps(record) + "\n" for record in records))
    parquet.write_table(table(records) if rows is None else rows, rows_file, row_group_size=2)
    return lines, rows_file


@pytest.mark.parametrize("name", RECORDS)
def test_a_table_gives_the_tokens_of_its_records(tmp_path: Path, name: str) -> None:
    lines, rows = both(tmp_path, RECORDS[name])
    assert built(lines) == built(rows)


def test_a_conversation_that_is_chosen_has_its_companions(tmp_path: Path) -> None:
    lines, rows = both(tmp_path, RECORDS["ShareGPT"])
    assert built(lines, json_key="conversations") == built(rows, json_key="conversations")


PAIR = pyarrow.struct({"x": pyarrow.int8(), "y": pyarrow.int8()})
MESSAGE = {"role": pyarrow.string(), "content": pyarrow.string()}


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (pyarrow.map_(pyarrow.string(), pyarrow.int64()), {"a": 1, "b": None}),
        (pyarrow.map_(pyarrow.string(), pyarrow.int64()), {}),
        (pyarrow.map_(pyarrow.string(), PAIR), {"a": {"x": 1}}),
        (pyarrow.large_list(PAIR), [{"x": 1}, {"y": 2}]),
        (pyarrow.list_(PAIR, 2), [{"x": 1}, {"y": 2}]),
        (pyarrow.dictionary(pyarrow.int8(), pyarrow.string()), "text"),
        (pyarrow.large_string(), "text"),
        (pyarrow.struct({"x": pyarrow.list_(pyarrow.struct({"y": pyarrow.int8()}))}), {"x": [{}, {"y": 1}]}),
        (pyarrow.null(), None),
    ],
    ids=str,
)  # fmt: skip
def test_other_types(tmp_path: Path, kind: Any, value: Any) -> None:
    """Maps list their own keys: a null in one is a value."""
    of_arrow = [*value.items()] if pyarrow.types.is_map(kind) else value
    types = {"messages": pyarrow.list_(pyarrow.struct({**MESSAGE, "more": kind}))}
    rows = pyarrow.table({"messages": pyarrow.array([[user(more=of_arrow), answer()]], types["messages"])})
    record = {"messages": [user(**({} if value is None else {"more": value})), answer()]}
    lines, rows_file = both(tmp_path, [record], rows)
    assert built(lines) == built(rows_file)


def test_nulls_of_lines_stay(tmp_path: Path) -> None:
    lines, rows = both(tmp_path, [conversation(calls(("f", {"a": None, "b": 1})))])
    assert b'"a": null' in bytes(token for token in built(lines)[0] if token < 256)
    assert b'"a"' not in bytes(token for token in built(rows)[0] if token < 256)


@pytest.mark.parametrize(
    ("rows", "options", "documents"),
    [
        ({"text": ["a", None, "b"]}, {}, 2),
        ({"body": ["a", None, "b"], "text": ["x", "y", "z"]}, {"json_key": "body"}, 2),
        ({"text": ["a", None], "messages": [None, None]}, {}, 1),
        ({"text": ["a", None], "other": ["x", "y"]}, {}, 1),
    ],
)
def test_rows_without_a_text_are_skipped_and_counted(
    tmp_path: Path, rows: dict[str, Any], options: dict[str, Any], documents: int
) -> None:
    parquet.write_table(pyarrow.table(rows), tmp_path / "a.parquet")
    summary = build([tmp_path / "a.parquet"], tmp_path / "d", "byte", workers=1, **options)
    assert (summary.documents, summary.skipped_kinds) == (documents, {"empty": 1})


@pytest.mark.parametrize("missing", ["prompt", "completion"])
def test_half_of_a_pair_is_refused_as_in_lines(tmp_path: Path, missing: str) -> None:
    pair = {"prompt": "p", "completion": "c"}
    other = {name: text for name, text in pair.items() if name != missing}
    for path, place in zip(both(tmp_path, [pair, other]), ("a.jsonl:2", "a.parquet: row 2")):
        with pytest.raises(HexadError, match=f"{place}: a '.*' without '{missing}'"):
            built(path)


# The key determines the kind of a value, as in the columns of a table.
LEAF = {"n": st.integers(-5, 5), "s": st.text("ab", max_size=3)}
OBJECTS = st.recursive(
    st.fixed_dictionaries({}, optional=LEAF),
    lambda inner: st.fixed_dictionaries(
        {"k": st.booleans()}, optional={**LEAF, "o": inner, "l": st.lists(inner, max_size=3)}
    ),
    max_leaves=8,
)


@settings(max_examples=60, deadline=None)
@given(st.lists(OBJECTS, min_size=1, max_size=4))
def test_any_objects(tmp_path_factory: pytest.TempPathFactory, values: Records) -> None:
    records = [{"text": "t", "value": value} for value in values]
    try:
        _, rows = both(tmp_path_factory.mktemp("objects"), records)
    except (pyarrow.ArrowInvalid, pyarrow.ArrowNotImplementedError):
        return  # no column has objects without any key
    pieces = cut(find_files([rows]).files)
    assert [record.content for piece in pieces for record in read(piece)] == records
