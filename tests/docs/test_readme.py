"""The README: its length, and its table of what is supported against what the checks accept."""

import re
from pathlib import Path

import pytest

from hexad.config import ConfigError, HexadError
from hexad.model.configuration import build_config
from hexad.model.families import families, presets
from hexad.planning.checks import check_config
from hexad.topology.layout import Layout

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
AXES = {
    "data": {"data": 2},
    "tensor": {"tensor": 2},
    "sequence": {"tensor": 2, "sequence": True},
    "context": {"context": 2},
    "pipeline": {"pipeline": 2},
    "expert": {"expert": 2, "data": 2},
}
DENSE = "GPT-2, Llama 2/3, Mistral, Qwen 2.5/3, Phi-3, Granite 3"
EXPERTS = "Mixtral, Qwen3-MoE, DeepSeek-V2/V3, Moonlight, Kimi K2"
ROW_OF = {
    **dict.fromkeys(("gpt2", "llama", "mistral", "qwen2", "qwen3", "phi3", "granite"), DENSE),
    **dict.fromkeys(("mixtral", "qwen3_moe", "deepseek_v2", "deepseek_v3"), EXPERTS),
}


def matrix() -> dict[str, dict[str, str]]:
    """Cells of the table of what is supported, by the row's and the column's name."""
    section = README.split("## What is supported")[1].split("\n## ")[0]
    head, _, *rows = (
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in section.splitlines()
        if line.startswith("|")
    )
    return {row[0]: dict(zip(head[1:], row[1:])) for row in rows}


def test_it_is_short() -> None:
    assert len(README.splitlines()) <= 150


def test_each_yes_links_to_a_page() -> None:
    pages = dict(re.findall(r"^\[(\w+)\]: (\S+)$", README, re.MULTILINE))
    for row, cells in matrix().items():
        for column, cell in cells.items():
            if "**" in row:
                assert not cell
            elif match := re.fullmatch(r"\[y\]\[(\w+)\]", cell):
                assert (ROOT / pages[match[1]]).is_file()
            else:
                assert cell in ("no", "-"), (row, column)


def test_every_family_is_in_the_table() -> None:
    assert set(ROW_OF) == set(families())
    assert set(ROW_OF.values()) < set(matrix())


@pytest.mark.parametrize("zero", range(4))
@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("family", families())
def test_cells_of_models_are_what_the_checks_say(family: str, axis: str, zero: int) -> None:
    name = next(name for name, shape in presets().items() if shape["family"] == family)
    parallel = {"data": 2, **AXES[axis], "zero": zero}
    tree = {
        "model": {"preset": name},
        "data": {"sequence": 1024},
        "batch": {"micro": 1, "global": 16},
        "parallel": parallel,
    }
    config = build_config(tree)
    world = 2 * AXES[axis].get("tensor", 1) * AXES[axis].get("context", 1) * AXES[axis].get("pipeline", 1)
    layout = Layout.from_settings(config.parallel, world)
    cells = matrix()[ROW_OF[family]]
    if cells[axis] == "-":
        with pytest.raises(ConfigError, match="has no experts"):
            check_config(config, layout)
    else:
        check_config(config, layout)
        assert cells[axis].startswith("[y]")
    assert cells["ZeRO 0-3"].startswith("[y]")


def test_expert_degrees_of_interfaces_are_refused_where_the_table_says_no() -> None:
    from hexad.compat.lightning import HexadStrategy
    from hexad.compat.megatron.arguments import parse

    rows = matrix()
    with pytest.raises(HexadError, match="expert"):
        HexadStrategy(expert_model_parallel_size=2)
    with pytest.raises(HexadError, match="expert"):
        parse(["--num-experts", "8", "--expert-model-parallel-size", "2"])
    interfaces = [row for row in rows if ":" in row]
    assert len(interfaces) == 5
    assert all(rows[row]["expert"] == "no" for row in interfaces)
