"""What only a script's own version of a system has ends the script with one line."""

import copy
import pickle
import sys
from argparse import Namespace
from pathlib import Path
from types import ModuleType

import pytest

from hexad.compat.facade.installed import run_script
from hexad.compat.megatron import gpt, parallel_state, training
from hexad.compat.megatron.arguments import Arguments
from hexad.config import HexadError

SYSTEM = "spamsystem"


@pytest.fixture
def system(monkeypatch: pytest.MonkeyPatch) -> None:
    """A package with some of the interface's modules."""
    package, core = ModuleType(SYSTEM), ModuleType(f"{SYSTEM}.core")
    package.__path__ = core.__path__ = []
    modules = {"": package, ".core": core, ".core.parallel_state": parallel_state, ".mpu": parallel_state}
    modules |= {".training": training, ".core.models": gpt}
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, f"{SYSTEM}{name}", module)
    for name in ("mpu", "training"):
        setattr(package, name, sys.modules[f"{SYSTEM}.{name}"])
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(sys, "path", [*sys.path])


ABSENT = [
    (
        "from spamsystem.core.parallel_state import get_rank, get_spam",
        "spamsystem.core.parallel_state.get_",
    ),
    ("import spamsystem.core.spam", "the module spamsystem.core.spam"),
    ("from spamsystem.spam.eggs import x", "the module spamsystem.spam"),
    ("from spamsystem import mpu\nprint(mpu.get_spam())", "the name spamsystem.mpu.get_spam"),
    ("from spamsystem import training\ntraining.get_timers().spam()", "Timers: found the attribute 'spam'"),
    (
        "from spamsystem.training import print_rank_0\nprint_rank_0('x', end='')",
        "print_rank_0() got an unexpected keyword argument 'end': Hexad's spamsystem",
    ),
    ("from spamsystem import training\ntraining.print_rank_last()", "print_rank_last() missing 1"),
    ("from spamsystem import training\ntraining.Timer().start(1, 2)", "Timer.start() takes from 1 to 2"),
    (
        "from spamsystem.core.models import core_transformer_config_from_args as f\n"
        "class C:\n    swiglu = 1\n    params_dtype = norm_epsilon = num_experts = 1\nf(C()).spam",
        "'TransformerConfig' object has no attribute 'spam'",
    ),
    (
        "from spamsystem.core.models import GPTModel\nGPTModel(spam=1)",
        "GPTModel: unexpected argument 'spam'",
    ),
    (
        "from spamsystem.core.models import GPTModel\nGPTModel.spam",
        "GPTModel: found the attribute 'spam'",
    ),
]


@pytest.mark.usefixtures("system")
@pytest.mark.parametrize(("text", "words"), ABSENT)
def test_what_hexad_lacks_is_one_line(
    text: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "script.py"
    script.write_text(text)
    with pytest.raises(SystemExit):
        run_script(lambda: None, [str(script)], SYSTEM)
    shown = capsys.readouterr().err
    assert shown.startswith("hexad: error: ") and shown.count("\n") == 1 and words in shown
    assert f"(script.py:{len(text.splitlines())})" in shown


OWN = [
    ("import spam_of_the_script", ModuleNotFoundError),
    ("from collections import spam", ImportError),
    ("None.spam", AttributeError),
    ("import json\njson.spam", AttributeError),
    ("def f(): pass\nf(spam=1)", TypeError),
    ("class GPTModels: pass\nGPTModels().spam", AttributeError),
    ("from torch import Tensor, ones\nones(1).spam", AttributeError),
    ("def print_rank_0s(): pass\nprint_rank_0s(1)", TypeError),
    ("from pathlib import Path\nPath(spam=1, x=2).spam", Exception),
    ("int(1, 2, 3)", TypeError),
]


@pytest.mark.usefixtures("system")
@pytest.mark.parametrize(("text", "kind"), OWN)
def test_errors_of_the_script_are_its_own(text: str, kind: type[Exception], tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(text)
    with pytest.raises(kind):
        run_script(lambda: None, [str(script)], SYSTEM)


def test_arguments_that_no_flag_sets() -> None:
    """Scripts ask for them with ``hasattr``; files have argparse's class."""
    arguments = Arguments(lr=1.0)
    assert not hasattr(arguments, "spam") and getattr(arguments, "spam", 3) == 3 and arguments.lr == 1.0
    with pytest.raises(HexadError, match="found no argument 'spam'; no flag that Hexad knows sets it"):
        _ = arguments.spam
    with pytest.raises(AttributeError):
        _ = arguments.spam
    assert type(pickle.loads(pickle.dumps(arguments))) is Namespace
    assert copy.copy(arguments) == arguments
