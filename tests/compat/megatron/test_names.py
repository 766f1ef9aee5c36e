"""Names that scripts import from Megatron-LM: found after ``install()``, or refused when they are used."""

import ast
import importlib.metadata
import sys
from pathlib import Path

import pytest

from hexad.compat.facade.installed import refused_name
from hexad.compat.megatron.installed import CONSTANTS, MODULES, UNSUPPORTED, VERSION, WHERE
from hexad.config import HexadError

from ... import forks

INSTALLED = """
from importlib import import_module
from hexad.compat import megatron as compat
compat.install()
from hexad.compat.megatron.installed import CONSTANTS, MODULES, UNSUPPORTED, WHERE
import megatron
from megatron import get_args, mpu
from megatron.core import parallel_state, tensor_parallel
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import ModelType
from megatron.model import GPTModel
from megatron.core.models.gpt import GPTModel as same
assert megatron is compat and GPTModel is same and mpu is parallel_state
for name in WHERE:
    import_module(f"megatron.{name}")
for name in MODULES:
    import_module(f"megatron.{name}")
implemented, refused = [], []
for name in [*CONSTANTS, *UNSUPPORTED]:
    module, _, attribute = f"megatron.{name}".rpartition(".")
    value = getattr(import_module(module), attribute)
    if name in CONSTANTS or name in MODULES:
        continue
    if not hasattr(value, "why"):
        implemented.append(name)
        continue
    try:
        value(1, keyword=2)
    except Exception as error:
        assert type(error).__name__ == "HexadError" and "not supported: " in str(error), (name, error)
        refused.append(name)
    else:
        raise AssertionError(name)
from megatron.core.transformer.transformer_layer import TransformerConfig as again  # which imports it
assert again is TransformerConfig
assert {"training.pretrain", "core.parallel_state.get_tensor_model_parallel_rank", "mpu.broadcast_data"} <= {
    *implemented
}
assert {"training.checkpointing.load_checkpoint", "core.models.mamba.MambaModel"} <= {*refused}
print(len(implemented) + len(refused), "names")
"""


def test_names_are_found_after_install() -> None:
    done = forks.run([sys.executable, "-c", INSTALLED], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [str(len({*UNSUPPORTED} - {*MODULES})), "names"]
    with pytest.raises(HexadError, match=r"megatron.a.B: not supported: why"):
        refused_name("megatron.a.B", "why")()
    assert len(UNSUPPORTED) > 4000 and len(WHERE) > 50


def test_the_table_has_what_the_package_has() -> None:
    """All classes and functions that the modules of the installed package define, by their text."""
    assert importlib.metadata.version("megatron-core") == VERSION == CONSTANTS["core.__version__"]
    root = Path(str(importlib.metadata.distribution("megatron-core").locate_file("megatron/core")))
    names = {*UNSUPPORTED, *CONSTANTS, *MODULES}
    modules = 0
    for path in root.rglob("*.py"):
        parts = path.relative_to(root).with_suffix("").parts
        module = ".".join(["core", *(part for part in parts if part != "__init__")])
        assert module in MODULES, module
        modules += 1
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
                assert f"{module}.{node.name}" in names, (module, node.name)
    assert modules > 300
