"""What a rank measures of its own steps: the shapes that specifications declare, and sums that fit."""

import pytest

from hexad.calibration import measure
from hexad.calibration.figures import Figures, StepFigure
from hexad.calibration.fit import job_of
from hexad.parallel.inventory import Product
from hexad.topology.hardware.constants import Format

MODEL = (96, 6, 2, 160, 320, 40, 3, 2)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_the_products_of_a_step_are_those_declared(dtype: Format, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "_STEPS", 1)
    figures = Figures()
    measure._steps(MODEL, dtype, figures)
    (step,) = figures.steps
    job = job_of(StepFigure(dtype, MODEL, 0.0, 0.0, 0.0, 0.0))
    stage = job.stages[0]
    parts = [stage.after_layers(job.run), *stage.layer_operations(job.run, job.recompute, False)]
    declared = {
        (*sorted((one.m, one.n)), one.k)
        for part in parts
        for one in part.products
        if isinstance(one, Product) and one.kernel != "attention"
    }
    measured = {(*sorted((one.m, one.n)), one.k) for one in figures.products if min(one.m, one.n) > 1}
    assert measured == declared
    shapes = {(one.forward, one.heads, one.length, one.width) for one in figures.attention}
    assert shapes == {(True, 3 * 6, 40, 16), (False, 3 * 6, 40, 16)}
    assert min(step.products, step.attention) > 0
    assert Figures.from_tree(figures.as_tree()) == figures
