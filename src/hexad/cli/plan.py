"""``hexad plan``: what the planner predicts."""

import click

from .plan_validate import validate


@click.group()
def plan() -> None:
    """Predict step time and memory of layouts."""


plan.add_command(validate)
