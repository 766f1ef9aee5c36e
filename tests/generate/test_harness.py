"""The adapter for EleutherAI's harness, against the harness's own for transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lm_eval")

from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM

from hexad.harness import HexadLM

from ..checkpoint import hugging_face as theirs
from ..checkpoint.test_hugging_face import convert, small_run


def requests(kind: Any, *arguments: tuple[Any, ...]) -> list[Instance]:
    return [Instance(kind, {}, each, 0) for each in arguments]


def test_it_gives_what_the_harness_computes_with_transformers(tmp_path: Path) -> None:
    run = small_run(tmp_path, "llama")
    assert run.train().status == 0
    convert("export", run.directory, tmp_path / "hf")
    with theirs.exact_norms():
        reference = HFLM(str(tmp_path / "hf"), device="cpu", dtype="float64", max_length=16)
        pairs = [("line 7:", " 49"), ("line", " 8"), ("a b ", "c"), ("x" * 40, "yz")]
        scored = reference.loglikelihood(requests("loglikelihood", *pairs), disable_tqdm=True)
        texts = [("line 9: 81 " * 6,), ("short",)]
        rolled = reference.loglikelihood_rolling(requests("loglikelihood_rolling", *texts), disable_tqdm=True)
        until = {"until": ["9"], "max_gen_toks": 7}
        written = reference.generate_until(
            requests("generate_until", ("line", until), ("1: 1", until)), disable_tqdm=True
        )
    with HexadLM(run.directory) as model:
        found = model.loglikelihood(requests("loglikelihood", *pairs))
        assert [each[0] for each in found] == pytest.approx([each[0] for each in scored], rel=1e-6)
        assert [each[1] for each in found] == [each[1] for each in scored]
        assert model.loglikelihood_rolling(requests("loglikelihood_rolling", *texts)) == pytest.approx(
            rolled, rel=1e-6
        )
        assert model.generate_until(requests("generate_until", ("line", until), ("1: 1", until))) == written
