"""The one declaration of the settings of a generation, and what follows from it."""

import inspect
from typing import Any

import click
import pytest

from hexad.cli.generate import generate
from hexad.cli.options import option
from hexad.config import ConfigError
from hexad.generation.files import digest
from hexad.generation.sampling import Sampling, settings
from hexad.generation.texts import Settings, sampling_of


def test_arguments_in_python_are_the_declared_settings() -> None:
    """But for grammars, whose language is that of a package."""
    assert {*Settings.__annotations__} == settings().keys() - {"grammar"}
    documented = inspect.getdoc(Sampling) or ""
    assert all(f"\n    {name}: {setting.meaning}." in documented for name, (_, setting) in settings().items())


def test_options_have_the_declared_defaults_and_meanings() -> None:
    options = {part.opts[0]: part for part in generate.params if isinstance(part, click.Option)}
    numbers = [name for name, (kind, _) in settings().items() if kind in (int, float)]
    names = [name for name in numbers if option(name) in options]
    assert len(names) == 10
    for name in names:
        assert options[option(name)].default == getattr(Sampling(), name), name
        assert settings()[name][1].meaning[1:] in (options[option(name)].help or ""), name


def test_fields_of_requests_reach_the_settings() -> None:
    """By their names, and with the checks of the declaration."""
    pytest.importorskip("starlette")
    from hexad.generation.server.protocol import _SAME_NAMES, CompletionRequest, read

    values: dict[str, Any] = {
        "temperature": 0.5,
        "top_p": 0.5,
        "top_k": 3,
        "min_p": 0.25,
        "seed": 5,
        "min_tokens": 2,
        "repetition_penalty": 1.5,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "ignore_eos": True,
        "skip_special_tokens": False,
    }
    lists: dict[str, Any] = {"logit_bias": {"3": 1.5}, "stop": ["x"], "stop_token_ids": [4]}
    assert values.keys() | lists.keys() == {*_SAME_NAMES}
    body = read(CompletionRequest, {"model": "m", "prompt": "a", "max_tokens": 9, **values, **lists})
    body.check()
    expected = Sampling(**values, tokens=9, logit_bias=((3, 1.5),), stop=("x",), stop_token_ids=(4,))
    assert body.sampling(100) == expected
    for name, value in {"min_p": 2, "top_k": -2, "min_tokens": -1, "presence_penalty": 3}.items():
        wrong = read(CompletionRequest, {"model": "m", "prompt": "a", name: value})
        with pytest.raises(ConfigError, match=f"{name}: found {value}, expected "):
            wrong.sampling(100)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, "6d1b7098cfc5901d51a4b089"),
        ({"tokens": 7}, "f71a3ebc1f44b4495dc827ae"),
        ({"temperature": 0.5, "samples": 2, "seed": 7}, "32c6ba005847881ba3b19f30"),
        (
            {"temperature": 1, "top_k": 4, "stop": ["x"], "logprobs": 2, "logit_bias": {"3": 1.5}},
            "40e55c416e274962fde5d8a5",
        ),
        ({"tokens": 0, "prompt_logprobs": 0}, "d0f35e7c49d9b0937a454d89"),
        (
            {"schema": {"type": "object"}, "min_tokens": 2, "ignore_eos": True, "stop_token_ids": [4]}
            | {"skip_special_tokens": False, "routing": True},
            "4b21ba6c6af0524bb066b0c1",
        ),
    ],
)
def test_digests_of_files_never_change(values: dict[str, Any], expected: str) -> None:
    """A file that an earlier version has begun is continued by a later one."""
    assert digest(3, {"prompt": "a"}, 1, "m", sampling_of(values)) == expected
