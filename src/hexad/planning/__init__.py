"""Derives from a configuration the numbers for every ``auto``, the layout, the stages and the schedule. No
torch."""

from .checks import check_config, check_settings
from .layouts import planned_layout, smallest_world, working_layout
from .resolve import Resolved, check_vocab, planned_bf16, resolve, resolved_parallel, with_dtype
from .stages import PipelinePlan, plan_of_modules, training_schedule
