"""NeMo 2's settings of ``GPTConfig`` and arguments of functions, and what each means here. No torch."""

from ..facade.foreign_names import read_foreign_names
from ..megatron.tables import SETTINGS as OF_MEGATRON

OF_NEMO = {row.name: row for row in read_foreign_names(__package__, "gpt_settings.txt")[""]}
"""Settings of NeMo's class only, and those that mean something else there, by name."""
SETTINGS = {name: row for name, row in (OF_MEGATRON | OF_NEMO).items() if not name.startswith("_")}
"""Settings of Megatron-Core's and NeMo's classes by name."""

ARGUMENTS = read_foreign_names(__package__, "call_arguments.txt")
"""Arguments of functions and classes beside those of their signatures, by function."""
