"""The pages of the axes: their formulas give the predicted bytes, and the numbers that they quote."""

import re
from dataclasses import dataclass
from pathlib import Path

import pytest

from hexad import Layout, load_config
from hexad.planning import resolve
from hexad.planning.traffic import predicted_traffic

PAGES = Path(__file__).parents[2] / "docs" / "parallelism"
GIB = 2**30
TOKENS, HIDDEN, LAYERS, KEYS, PARAMETERS = 8192, 4096, 32, 1024, 8_030_261_248
"""Of llama3-8b, a sequence of 8,192 tokens; Mixtral has the same layers and width."""
ENDS = 2 * 128_256 * HIDDEN
"""Parameters of the embedding and the output head."""
HIDDEN_STATES = TOKENS * HIDDEN * 2
SHARE = 7 / 8  # of a tensor that a collective of 8 ranks sends


@dataclass(frozen=True)
class Case:
    """A number of a page.

    Attributes:
        page: its name.
        axis: whose bytes are counted.
        settings: of the run; 8 sequences of 8,192 tokens on 8 ranks unless they say otherwise.
        formula: bytes by the page's formula.
        quoted: as the page has it, in GiB.
    """

    page: str
    axis: str
    settings: str
    formula: float
    quoted: str
    rank: int = 0
    preset: str = "llama3-8b"


def data(zero: int, microbatches: int, weights: float, gradients: float, quoted: str) -> Case:
    """Of a level of ZeRO: how often weights (2 bytes) and gradients (4 bytes) are sent."""
    settings = f"parallel.data=8 parallel.zero={zero} batch.global={8 * microbatches}"
    return Case("data", "data", settings, (2 * weights + 4 * gradients) * SHARE, quoted)


def mixtral(settings: str, formula: float, quoted: str) -> Case:
    """Of mixtral-8x7b with an expert on each rank."""
    settings = f"parallel.data=8 parallel.expert=8 {settings}"
    return Case("expert", "expert", settings, formula, quoted, preset="mixtral-8x7b")


CASES = (
    data(0, 1, 0, 2 * PARAMETERS, "52.35"),
    data(0, 4, 0, 2 * PARAMETERS, "52.35"),
    data(1, 1, PARAMETERS, PARAMETERS, "39.26"),
    data(1, 4, PARAMETERS, PARAMETERS, "39.26"),
    data(2, 1, PARAMETERS, PARAMETERS, "39.26"),
    data(2, 4, PARAMETERS, 4 * PARAMETERS, "117.79"),
    data(3, 1, 2 * PARAMETERS - ENDS, PARAMETERS, "50.64"),
    data(3, 4, 8 * PARAMETERS - 4 * ENDS, 4 * PARAMETERS, "202.55"),
    Case(
        *("tensor", "tensor", "parallel.tensor=8 batch.global=1"),
        (10 * LAYERS + 4) * HIDDEN_STATES * SHARE,
        "17.72",
    ),
    Case(
        *("tensor", "tensor", "parallel.tensor=8 batch.global=1 parallel.sequence=false"),
        (8 * LAYERS + 4) * HIDDEN_STATES * SHARE,
        "14.22",
    ),
    Case(
        *("context", "context", "parallel.context=8 batch.global=1 parallel.context_method=all_gather"),
        LAYERS * 3 * 2 * KEYS * TOKENS / 8 * 7 * 2,
        "2.62",
    ),
    Case(
        *("context", "context", "parallel.context=8 batch.global=1 parallel.context_method=ulysses"),
        LAYERS * 2 * (2 * HIDDEN + 2 * KEYS) * TOKENS / 8 * SHARE * 2,
        "1.09",
    ),
    Case("context", "context", "parallel.context=8 batch.global=1", 1.75 * GIB, "1.75"),
    Case("context", "context", "parallel.context=8 batch.global=1", 2.1875 * GIB, "2.19", rank=7),
    Case("pipeline", "pipeline", "parallel.pipeline=8", 8 * HIDDEN_STATES, "0.50"),
    Case("pipeline", "pipeline", "parallel.pipeline=8", 2 * 8 * HIDDEN_STATES, "1.00", rank=3),
    Case(
        *("pipeline", "pipeline", "parallel.pipeline=8 parallel.tensor=8"),
        2 * 8 * HIDDEN_STATES / 8,
        "0.125",
        rank=24,
    ),
    mixtral("run.device=cpu", LAYERS * 2 * 2 * 2 * HIDDEN_STATES * SHARE, "14.00"),
    mixtral("", 2 * LAYERS * 2 * 2 * 2 * HIDDEN_STATES * SHARE, "28.01"),
    mixtral("model.moe.dispatcher=all_gather", LAYERS * 2 * 2 * HIDDEN_STATES * 7, "56.05"),
)


def sent(case: Case) -> int:
    """Bytes that the rank sends over the axis in a step, as predicted; runs and dry runs count the same."""
    tree = {
        "run": {"device": "cuda"},
        "model": {"preset": case.preset},
        "data": {"sequence": TOKENS},
        "batch": {"micro": 1, "global": 8},
        "precision": {"dtype": "bf16"},
    }
    config = load_config(tree, case.settings.split())
    degrees = {
        axis: getattr(config.parallel, axis)
        for axis in ("tensor", "context", "pipeline", "expert", "expert_tensor")
    }
    parallel = config.parallel
    data = parallel.data if isinstance(parallel.data, int) else 1
    world = data * parallel.tensor * parallel.context * parallel.pipeline
    resolved = resolve(config, Layout(world=world, **degrees))
    return predicted_traffic(resolved, case.rank)[case.axis]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.page}: {case.settings}")
def test_formulas_give_the_bytes_that_are_predicted(case: Case) -> None:
    bytes_sent = sent(case)
    # The weights of experts' rows and sums of a few numbers are not in the formulas.
    assert bytes_sent == pytest.approx(case.formula, rel=1e-3)
    digits = len(case.quoted.partition(".")[2])
    assert f"{bytes_sent / GIB:.{digits}f}" == case.quoted


@pytest.mark.parametrize("page", sorted({case.page for case in CASES}))
def test_the_pages_quote_these_numbers(page: str) -> None:
    text = (PAGES / f"{page}.md").read_text(encoding="utf-8")
    missing = [
        case.quoted
        for case in CASES
        if case.page == page and not re.search(rf"(?<![\d.]){re.escape(case.quoted)}\b", text)
    ]
    assert missing == []
