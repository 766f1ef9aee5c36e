"""Wrong inputs as a new user makes them: command line -> what the one line of the error must contain."""

import shlex
from typing import NamedTuple

from .of_deepspeed import DEEPSPEED
from .of_files import FILES
from .of_megatron import MEGATRON
from .of_others import DATA, SHOW, USE
from .of_training import CONFIG, ENVIRONMENT, TRAIN


class Case(NamedTuple):
    """A wrong input.

    Attributes:
        command: as typed after ``hexad``, before it variables of the environment; relative to the directory
            that :mod:`.places` makes.
        says: what the line must contain: field or file, and what is wrong with it.
        more: whether the command prints what it does, or has found, before it refuses.
    """

    command: str
    says: str
    more: bool = False

    @property
    def variables(self) -> dict[str, str]:
        """``NAME=value`` before the command."""
        words = shlex.split(self.command)
        return dict(word.split("=", 1) for word in words[: self._begin(words)])

    @property
    def arguments(self) -> list[str]:
        """What follows ``hexad``."""
        words = shlex.split(self.command)
        return words[self._begin(words) :]

    @staticmethod
    def _begin(words: list[str]) -> int:
        return next((n for n, word in enumerate(words) if not word[:1].isupper()), 0)


GROUPS = {
    name: tuple(Case(*case) for case in cases)
    for name, cases in {
        "Training": TRAIN,
        "Environment": ENVIRONMENT,
        "Configuration": CONFIG,
        "Data and tokenizers": DATA,
        "Generation, evaluation and checkpoints": USE,
        "Pictures and the demo": SHOW,
        "Names, odd files and damaged ones": FILES,
        "Launch lines of Megatron-LM": MEGATRON,
        "DeepSpeed's files and checkpoints of other systems": DEEPSPEED,
    }.items()
}
CASES = tuple(case for cases in GROUPS.values() for case in cases)
