"""Records: further keys of messages are accepted, or named."""

from pathlib import Path
from typing import Any

import pytest

from hexad.config import HexadError
from hexad.dataset.build.records import Reading
from hexad.dataset.build.sources import Place, Record
from hexad.dataset.text.chat import ChatTemplate

HUMAN, BOT = {"from": "human", "value": "x"}, {"from": "gpt", "value": "y"}
SHAREGPT: list[tuple[dict[str, Any], str]] = [
    ({"conversations": [HUMAN, BOT], "id": "1", "source": "s"}, ""),
    ({"conversations": [HUMAN, {**BOT, "markdown": None}]}, ""),
    ({"conversations": [{**HUMAN, "lang": "en"}, BOT]}, ""),
    ({"conversations": [{**HUMAN, "a": 1, "b": [2]}, {**BOT, "id": 3}]}, ""),
    ({"conversations": [HUMAN, {**BOT, "weight": 1, "train": True}]}, ""),
    ({"messages": [{"role": "user", "content": "x", "id": 4}, {"role": "assistant", "content": "y"}]}, ""),
    ({"conversations": [HUMAN, {**BOT, "weight": 0}]}, r"conversations\[1\]: its 'weight' is 0"),
    ({"conversations": [HUMAN, {**BOT, "train": False}]}, r"conversations\[1\]: its 'train' is False"),
    ({"conversations": [HUMAN, {**BOT, "loss": False}]}, r"conversations\[1\]: its 'loss' is False"),
    ({"conversations": [HUMAN, {"from": "gpt", "text": "y"}]}, r"conversations\[1\] has no 'role'.*'text'"),
    (
        {"conversations": [HUMAN, {**BOT, "role": "assistant"}]},
        r"conversations\[1\] has no 'content'.*'from'",
    ),
]


@pytest.mark.parametrize(("record", "problem"), SHAREGPT)
def test_further_keys_of_a_message_are_accepted_or_named(
    tmp_path: Path, record: dict[str, Any], problem: str
) -> None:
    source = (
        "{% for m in messages %}{{ m.role }}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    )
    reading = Reading(template=ChatTemplate(source, "template"))
    place = Place(tmp_path / "a.jsonl", "line", 1)
    if problem:
        with pytest.raises(HexadError, match=rf"a\.jsonl:1: {problem}"):
            reading.document(Record(record, place))
    else:
        plain = reading.document(Record({"conversations": [HUMAN, BOT]}, place))
        assert reading.document(Record(record, place)) == plain
