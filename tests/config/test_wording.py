"""Names in messages, in the words of each interface."""

import ast
import pickle
import re
from pathlib import Path

import click
import pytest

from hexad.cli.main import hexad
from hexad.cli.options import in_options
from hexad.config import AgreedError, ConfigError, HexadError, blaming, setting_names, worded, wording

SOURCE = Path(__file__).parents[2] / "src/hexad"
MARKED = re.compile(r"``([A-Za-z_][\w.]*)``")


def test_str_is_python() -> None:
    error = ConfigError("top_k", "found 5 with ``temperature`` 0; raise ``temperature``")
    assert str(error) == "top_k: found 5 with temperature 0; raise temperature"
    assert f"{error}" == str(error)
    assert (
        str(error.worded(lambda name: name.upper())) == "TOP_K: found 5 with TEMPERATURE 0; raise TEMPERATURE"
    )
    assert error.worded(lambda name: name.upper()).field == "TOP_K"


def test_names_survive_processes_and_quotations() -> None:
    error = pickle.loads(pickle.dumps(ConfigError("top_k", "found ``x``")))
    assert isinstance(error, ConfigError) and error.marked == "``top_k``: found ``x``"
    with pytest.raises(ConfigError) as caught, blaming("prompts"):
        raise HexadError("line 3: ``tokens``: found 0")
    assert caught.value.marked == "``prompts``: line 3: ``tokens``: found 0"
    agreed = AgreedError(error.marked, ConfigError)
    assert str(agreed.worded(lambda name: f"<{name}>")) == "<top_k>: found <x>"


def test_flags_of_launch_lines_are_names() -> None:
    with (
        pytest.raises(ConfigError, match=r"^hidden_size: found 3, which heads 2 do not divide$"),
        wording(
            lambda name: name.removeprefix("--").replace("-", "_").replace("num_attention_heads", "heads")
        ),
    ):
        raise ConfigError("--hidden-size", "found 3, which --num-attention-heads 2 do not divide")


@pytest.mark.parametrize(
    "text", ["`x` of others", "a--b", "x -- y", "```three```", "``two words``", "-5", "``"]
)
def test_other_texts_stay(text: str) -> None:
    assert worded(text, lambda name: "CHANGED") == text.replace("``three``", "CHANGED")


def test_long_fields_are_no_names() -> None:
    field = "run." + "x" * 5000
    message = str(ConfigError(field, "unknown key"))
    assert message.startswith("run.xxx") and message.endswith("unknown key") and "`" not in message


def _commands(command: click.Command) -> list[click.Command]:
    if not isinstance(command, click.Group):
        return [command]
    inner = (
        command.get_command(click.Context(command), name)
        for name in command.list_commands(click.Context(command))
    )
    return [leaf for one in inner if one is not None for leaf in _commands(one)]


def test_options_in_messages_of_commands() -> None:
    command = hexad.get_command(click.Context(hexad), "generate")
    assert in_options("``top_k``: with ``temperature`` 0", command) == "--top-k: with --temperature 0"
    plan = hexad.get_command(click.Context(hexad), "plan")
    assert in_options("``cluster``: found ``parallel.tensor``", plan) == "--cluster: found parallel.tensor"
    assert in_options("``cluster``: found", None) == "cluster: found"


def test_every_marked_name_is_an_option_or_a_setting() -> None:
    """A name that no command and no setting has would be shown as it is: a misspelling."""
    options = {
        option.removeprefix("--").replace("-", "_")
        for command in _commands(hexad)
        for param in command.params
        for option in param.opts
    }
    assert {"top_k", "chat_template", "cluster", "json_key"} <= options
    known, marked = options | set(setting_names()), set()
    for path in SOURCE.rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        bodies = (n.body for n in ast.walk(tree) if hasattr(n, "body") and isinstance(n.body, list))
        documented = {
            body[0].value
            for body in bodies
            if body and isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant)
        }
        attributes = {
            following.value
            for node in ast.walk(tree)
            for body in [getattr(node, "body", None)]
            if isinstance(body, list)
            for following in body
            if isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant)
        }
        for node in ast.walk(tree):
            if (
                isinstance(node, ast.Constant)
                and isinstance(node.value, str)
                and node not in documented | attributes
            ):
                marked |= set(MARKED.findall(node.value))
    assert len(marked) > 15
    assert not marked - known
