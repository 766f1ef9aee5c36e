"""The page of a plan."""

import re
from pathlib import Path

import pytest

from hexad.planning.plan import Plan, explained, plan
from hexad.show.plan_page import plan_page, waterfall_figure

from ..training.command import call

JOB = ("llama3.2-1b", "h100:16")
FIXED = ["parallel.context=1", "parallel.tensor=2", "batch.micro=1"]


@pytest.fixture(scope="module")
def result() -> Plan:
    return plan(*JOB, sequence=4096, global_batch=32, fix=FIXED, top=3)


def test_one_page_with_everything(result: Plan) -> None:
    """Nothing is fetched from elsewhere; every layout that was looked at has its details."""
    candidate = explained(result, "tensor=2,pipeline=4,zero=1,micro=1,schedule=zb_h1")
    page = plan_page(result, candidate)
    for heading in ("Layouts", "Memory against speed", "Where the step goes", "The step in time", "Ranks"):
        assert f"<h2>{heading}</h2>" in page
    assert page.count("<svg") == 5
    assert not re.search(r'(?:src|href)="(?!#)', page.replace("xlink:href", "href"))
    titles = re.findall(r"<title>([^<]*)</title>", page)
    for point in result.points:
        assert any(title.startswith(f"{point.layout}: {point.seconds:.3f} s") for title in titles)
    assert f"{candidate.step.total:.3f} s a step" in page
    assert "forward of microbatch 0 in stage 3" in page


def test_the_waterfall_ends_at_mfu(result: Plan) -> None:
    """From 100 % down, cause by cause; what remains is MFU."""
    candidate = result.layouts[0]
    (axes,) = waterfall_figure(result, candidate).axes
    bars = [patch for patch in axes.patches if patch.get_width()]
    *causes, mfu = bars
    assert causes[0].get_x() + causes[0].get_width() == pytest.approx(1)
    assert mfu.get_width() == pytest.approx(result.mfu(candidate))
    assert causes[-1].get_x() == pytest.approx(mfu.get_width(), abs=5e-3)


def test_the_command(tmp_path: Path) -> None:
    job = ["--model", JOB[0], "--cluster", JOB[1], "--sequence", "4096", "--global-batch", "32"]
    arguments = [*job, *(f"--fix={text}" for text in FIXED)]
    page = tmp_path / "plan.html"
    result = call("show", "plan", *arguments, "--top", "2", "--output", str(page))
    assert result.status == 0, result.err
    assert page.read_text().startswith("<!doctype html>")
    wrong = call("show", "plan", *arguments, "--output", str(tmp_path / "plan.png"))
    assert wrong.status == 2 and "expected a name that ends in .html" in wrong.error
