"""Wrong arguments of Python's functions are refused in one line that names them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import hexad
from hexad.config import HexadError
from hexad.dataset.load.microbatch import Microbatch

from .command import SETTINGS

Call = Callable[[], object]


def _launched(action: Callable[[hexad.Mesh, hexad.Config], object]) -> Call:
    def call() -> None:
        with hexad.launch(hexad.load_config(SETTINGS)) as run:
            action(run.mesh, run.resolved.config)

    return call


def _updated(mesh: hexad.Mesh, config: hexad.Config) -> None:
    engine = hexad.Engine(
        nn.Linear(2, 2), mesh, config, compute=lambda module, batch, x, scale: module.weight.sum()
    )
    engine.begin(microbatches=1)
    engine.accumulate([None])
    engine.reduce()
    engine.update(lr="fast")  # type: ignore[arg-type]


def _stepped(microbatches: Any) -> Callable[[hexad.Mesh, hexad.Config], object]:
    return lambda mesh, config: hexad.Engine(config, mesh).train_step(microbatches)


CALLS: tuple[tuple[str, Call, str], ...] = (
    ("train a number", lambda: hexad.train(3), "config: found 3, expected a file's path, or a mapping"),  # type: ignore[arg-type]
    ("load a list", lambda: hexad.load_config(["a"]), r"config: found \['a'\], expected a file's path"),  # type: ignore[arg-type]
    ("load NUL", lambda: hexad.load_config("a\0b"), "cannot be read: embedded null byte"),
    ("override 3", lambda: hexad.load_config(None, [3]), "found '3', expected a setting name=value"),  # type: ignore[list-item]
    (
        "overrides None",
        lambda: hexad.load_config({}, None),
        "overrides: found None, expected a list such as",
    ),  # type: ignore[arg-type]
    (
        "overrides of a Config",
        lambda: hexad.train(hexad.load_config(SETTINGS), ["run.steps=3"]),
        r"overrides: found \['run.steps=3'\] with a Config; pass them to hexad.load_config",
    ),
    (
        "launch a path",
        lambda: hexad.launch("run.yaml").__enter__(),
        "config: found 'run.yaml', expected what",
    ),  # type: ignore[arg-type]
    ("no prompts", lambda: hexad.generate("x", None), "prompts: found None, expected a text or a list of"),  # type: ignore[arg-type]
    (
        "a prompt's mapping",
        lambda: hexad.generate("x", {"prompt": "a"}),
        "prompts: found {'prompt': 'a'}, expec",
    ),  # type: ignore[arg-type]
    (
        "tokens",
        lambda: hexad.generate("x", "a", tokens="many"),
        "found 'many', expected an integer of at le",
    ),  # type: ignore[arg-type]
    (
        "half a token",
        lambda: hexad.generate("x", "a", tokens=1.5),
        "found 1.5, expected an integer of at le",
    ),  # type: ignore[arg-type]
    (
        "tokens true",
        lambda: hexad.generate("x", "a", tokens=True),
        "found True, expected an integer of at l",
    ),
    (
        "temperature",
        lambda: hexad.generate("x", "a", temperature="hot"),
        "found 'hot', expected a number from 0",
    ),  # type: ignore[arg-type]
    ("seed", lambda: hexad.generate("x", "a", seed=1.5), r"seed: found 1.5, expected 0 to 2\^63 - 1"),  # type: ignore[arg-type]
    (
        "top k",
        lambda: hexad.generate("x", "a", top_k=1.5),
        r"top_k: found 1.5, expected 0 \(all\) or more",
    ),  # type: ignore[arg-type]
    ("stop", lambda: hexad.generate("x", "a", stop=3), "stop: found 3, expected a text or a list of texts"),  # type: ignore[arg-type]
    ("stops", lambda: hexad.generate("x", "a", stop=[3]), "stop: found 3, which is not Unicode text"),  # type: ignore[list-item]
    (
        "batches 0",
        lambda: hexad.evaluate("x", "a", batches=0),
        "batches: found 0, expected an integer from 1",
    ),
    (
        "batches",
        lambda: hexad.evaluate("x", "a", batches="all"),
        "batches: found 'all', expected an integer",
    ),  # type: ignore[arg-type]
    (
        "no mesh",
        _launched(lambda mesh, config: hexad.Engine(config, None)),  # type: ignore[arg-type]
        "mesh: found None, expected that of hexad.launch",
    ),
    ("a tensor", _launched(_stepped([torch.zeros(1, 8)])), r"microbatches\[0\]: found Tensor, expected Mic"),
    ("no list", _launched(_stepped(5)), "microbatches: found int, expected a list of Microbatch"),
    (
        "lists",
        _launched(_stepped([Microbatch([1], [1])])),
        "Microbatch.tokens: found list, expected a tensor",
    ),  # type: ignore[arg-type]
    (
        "overrides 5",
        lambda: hexad.generate("x", "a", overrides=5),
        "overrides: found 5, expected a list such",
    ),  # type: ignore[arg-type]
    ("score", lambda: hexad.score("x", None), "sequences: found None, expected lists of ids"),  # type: ignore[arg-type]
    ("a rate", _launched(_updated), "update: found lr 'fast', expected a number that is not negative"),
)


@pytest.mark.parametrize(("call", "says"), [pytest.param(*case[1:], id=case[0]) for case in CALLS])
def test_refused(call: Call, says: str) -> None:
    with pytest.raises(HexadError, match=says):
        call()


@pytest.mark.parametrize("prompt", [3, {"prompts": "a"}, {"prompt": 3}, {"prompt": "a", "messages": []}])
def test_a_prompt_of_another_form_is_refused(prompt: Any) -> None:
    from hexad.dataset.text.tokenizer import load_tokenizer
    from hexad.generation.prompts import PromptEncoder
    from hexad.planning.saved_model import SavedModel

    encoder = PromptEncoder(SavedModel("", hexad.load_config(SETTINGS), 16), load_tokenizer("byte"))
    with pytest.raises(HexadError, match=r'prompt 1: found .*, expected an object with "prompt", a text'):
        encoder.ids(prompt, "prompt 1")
