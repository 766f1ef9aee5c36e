"""``hexad show context``: numbers against pairs of query and key that are counted one by one."""

import re
import shlex
import subprocess
import sys
from itertools import accumulate, chain, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hexad.dataset.load.loader import loader_from_config
from hexad.dataset.text.tokenizer import load_tokenizer
from hexad.model.configuration import load_config
from hexad.planning import planned_layout, resolve

from ..training.command import call
from .common import document_of, error_of, labels_of, png_size, text_of

YAML = """
run: {device: cpu}
model: {layers: 2, hidden: 32, heads: 8, kv_heads: 4, ffn_hidden: 64, vocab: 300}
data: {sequence: 48}
batch: {micro: 2, global: 8}
parallel: {context: 4}
precision: {dtype: fp32}
"""
ISOLATED = ("data.documents=isolate", "--lengths", "3,20,1,40,5")
STARTS = (0, 3, 23, 24, 48, 64, 69)
"""Of :data:`ISOLATED`: one is cut where the second sequence begins, and one more fills the rest."""


@pytest.fixture
def path(tmp_path: Path) -> str:
    (tmp_path / "run.yaml").write_text(YAML)
    return str(tmp_path / "run.yaml")


def visible(starts: tuple[int, ...], window: int | None, tokens: int = 96) -> Any:
    """``[query, key]``: whether it is seen."""
    document = np.searchsorted(starts, np.arange(tokens), side="right")
    query, key = np.arange(tokens)[:, None], np.arange(tokens)[None]
    near = query - key < (window or tokens)
    return (document[:, None] == document[None]) & (key <= query) & near


@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("isolated", [False, True])
@pytest.mark.parametrize("balance", ["none", "zigzag", "work"])
@pytest.mark.parametrize("ulysses", [1, 2])
def test_work_and_messages_of_every_rank(
    path: str, balance: str, isolated: bool, window: int | None, ulysses: int
) -> None:
    arguments = [f"parallel.context_balance={balance}", *(ISOLATED if isolated else ())]
    if window:
        arguments.append(f"model.sliding_window={window}")
    if ulysses > 1:
        arguments += ["parallel.context_method=ulysses_ring", f"parallel.context_ulysses={ulysses}"]
    document = document_of("context", path, *arguments)
    starts = STARTS if isolated else (0, 48)
    assert document["documents"] == [end - begin for begin, end in pairwise((*starts, 96))]
    seen = visible(starts, window)
    held = [[token for run in row["runs"] for token in range(*run)] for row in document["ranks"]]
    assert sorted(token for tokens in held for token in tokens) == list(range(96))
    groups = [[*chain.from_iterable(held[first : first + ulysses])] for first in range(0, 4, ulysses)]
    for row in document["ranks"]:
        rank, group = row["rank"], groups[row["rank"] // ulysses]
        assert row["tokens"] == 24 and row["work"] == seen[group].sum() / ulysses
        received = {other: seen[np.ix_(group, keys)].any(0).sum() for other, keys in enumerate(groups)}
        del received[rank // ulysses]
        place = rank % ulysses
        assert {r["source"]: r["received"] for r in row["rounds"]} == {
            other * ulysses + place: count for other, count in received.items()
        }
        assert row["received"] == sum(received.values())
        for message in row["rounds"]:
            (arrived,) = [
                other["received"]
                for other in document["ranks"][message["target"]]["rounds"]
                if other["source"] == rank
            ]
            assert message["sent"] == arrived
    work = [row["work"] for row in document["ranks"]]
    assert document["slowest_over_mean"] == pytest.approx(max(work) / (sum(work) / 4))
    part = np.mean([row["received"] for row in document["ranks"]]) / (96 - 24 * ulysses)
    assert document["received_over_all_gather"] == pytest.approx(part)
    assert document["balances"][balance]["slowest_over_mean"] == document["slowest_over_mean"]


def test_other_balances_are_those_of_runs_with_them(path: str) -> None:
    runs = {
        name: document_of("context", path, *ISOLATED, f"parallel.context_balance={name}")
        for name in ("none", "work", "zigzag")
    }
    for document in runs.values():
        assert document["balances"] == {
            name: {
                "slowest_over_mean": run["slowest_over_mean"],
                "received": np.mean([rank["received"] for rank in run["ranks"]]),
                "received_over_all_gather": run["received_over_all_gather"],
            }
            for name, run in runs.items()
        }


def test_methods(path: str) -> None:
    document = document_of("context", path, "parallel.context_method=all_gather")
    assert document["received_over_all_gather"] == 1.0
    assert all(rank["received"] == 72 for rank in document["ranks"])
    arguments = ("context", path, "parallel.context_method=ulysses")
    document = document_of(*arguments)
    assert document["slowest_over_mean"] == 1.0 and document["balances"] == {}
    assert all(rank["rounds"] == [] for rank in document["ranks"])
    # 24 tokens x 3/4 of 8 query heads and twice 4 key/value heads, of 4 elements of 4 bytes.
    mib = 24 * 3 / 4 * (8 + 2 * 4) * 4 * 4 / 2**20
    assert f"{mib:.2f} MiB of queries, keys and values" in " ".join(text_of(*arguments).split())
    one_group = (*arguments[:2], "parallel.context_method=ulysses_ring")  # four ranks can share the heads
    assert document_of(*one_group)["ulysses"] == 4 and "no rounds" in text_of(*one_group)


def test_documents_of_the_data_are_those_that_the_run_reads(path: str, tmp_path: Path) -> None:
    lines = [f'{{"text": "{"word " * (1 + number * 7 % 11)}"}}' for number in range(60)]
    (tmp_path / "text.jsonl").write_text("\n".join(lines))
    prefix = str(tmp_path / "data")
    built = call(
        "data", "build", "--input", str(tmp_path / "text.jsonl"), "--output", prefix, "--tokenizer", "byte"
    )
    assert built.status == 0, built.err
    for extra in (
        ("data.documents=isolate", "model.vocab=300"),
        ("data.packing=whole", "data.too_long=truncate", "parallel.data=2"),
    ):
        settings = (f"data.train={prefix}", *extra)
        config = load_config(path, settings)
        resolved = resolve(config, planned_layout(config)).config
        data = int(resolved.parallel.data)
        read = []
        with loader_from_config(resolved, 0, data, load_tokenizer("byte")) as loader:
            for step in (0, 1):
                read += [microbatch.documents for microbatch in loader.step(8 * step)]
        assert len(set(read)) > 1
        for number, documents in enumerate(read):
            document = document_of("context", path, *settings, "--microbatch", str(number))
            assert (0, *accumulate(document["documents"])) == documents
        assert document_of("context", path, *settings) == document_of(
            "context", path, *settings, "--microbatch", "0"
        )
        text = " ".join(text_of("context", path, *settings, "--microbatch", "1").split())
        assert "(microbatch 1 of data.train)" in text


def test_text(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    text = text_of("context", path, "parallel.context_balance=none", "data.sequence=64", "batch.micro=1")
    assert "4 ranks: context 4: ring, balance none" in text and "1 sequence of 64 tokens" in text
    (row,) = [line for line in text.splitlines() if line.startswith("1   ") and "+" not in line]
    assert row.split() == ["1", "16", "1", "0.754", "16", "16-31"]
    assert all(len(line) <= 80 for line in text.splitlines())
    assert "slowest rank: 1.738 times the mean work; keys received: 50.0% of an all-gather's" in text
    assert "none (this run)" in text
    many = text_of("context", path, "parallel.context=48", "batch.micro=1", "data.sequence=96")
    assert "shown: the first 32 of 48 ranks" in many and "the first 16 of 47 rounds" in many
    isolated = text_of("context", path, *ISOLATED)
    assert "7 documents of 1 to 27 tokens (--lengths)" in isolated


def test_the_page_shows_what_is_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.chdir(tmp_path)
    page = (Path(__file__).parents[2] / "docs" / "context.md").read_text(encoding="utf-8")
    block = r"```bash\n(hexad .*)\n(hexad (?:.*\\\n)*.*)\n(?:.*\n)*?```\n(?:.*\n)*?```text\n((?:.*\n)*?)```"
    match = re.search(block, page)
    assert match is not None
    init, show, output = shlex.split(match[1]), shlex.split(match[2].replace("\\\n", "")), match[3]
    assert call(*init[1:]).status == 0
    printed = "\n".join(line.rstrip() for line in text_of(*show[2:]).splitlines())
    assert printed.strip() == output.strip()


def test_pictures(path: str, tmp_path: Path) -> None:
    labels = labels_of("context", path, *ISOLATED, file=tmp_path / "context.svg")
    assert {"rank 3", "token; lines: where a document begins", "keys that a token sees"} <= set(labels)
    document = document_of("context", path, *ISOLATED)
    mean = sum(rank["work"] for rank in document["ranks"]) / 4
    for rank in document["ranks"]:
        assert f"work {rank['work'] / mean:.3f}, received {rank['received']}" in labels
    assert any(
        f"slowest rank: {document['slowest_over_mean']:.3f} times the mean" in label for label in labels
    )
    width, height = png_size("context", path, file=tmp_path / "context.png")
    assert width > 1000 and height > 500
    for number, arguments in enumerate(
        (
            ("parallel.context_method=ulysses",),
            ("parallel.context=48", "batch.micro=1", "data.sequence=96"),
            # Documents of one token each: nothing is sent.
            ("data.documents=isolate", "--lengths", ",".join(["1"] * 96)),
        )
    ):
        labels_of("context", path, *arguments, file=tmp_path / f"{number}.html")


def test_errors_name_the_argument(path: str) -> None:
    def error(*arguments: str) -> str:
        return error_of("context", path, *arguments)

    assert error_of("context").startswith("show context: found no configuration file")
    assert error("parallel.context=1").startswith("parallel.context: found 1, one rank holds all tokens")
    assert error("parallel.context=5").startswith("data.sequence: found 48")
    assert error("data.documents=isolate").startswith("data.train: found null")
    assert "no/such" in error("data.documents=isolate", "data.train=no/such")
    assert error("--lengths", "3").startswith("--lengths: found 3 with data.documents join")
    for text in ("", "a", "3,", "0,4", "-1"):
        message = error("data.documents=isolate", f"--lengths={text}")
        assert message.startswith(f"--lengths: found '{text}', expected"), message
    assert "found 97 tokens, but a microbatch has 96" in error("data.documents=isolate", "--lengths=90,7")
    assert error(*ISOLATED, "--microbatch", "1").startswith("--microbatch: found 1 beside --lengths")
    assert "--microbatch" in error("--microbatch", "-1")


def test_torch_is_imported_for_data_only(path: str) -> None:
    code = (
        "import sys\n"
        "from hexad.cli.show import show\n"
        f"for arguments in ([], {list(ISOLATED)}):\n"
        "    for option in ([], ['--json']):\n"
        f"        show(['context', {path!r}, *arguments, *option], standalone_mode=False)\n"
        "heavy = {'torch', 'matplotlib', 'transformers'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)
