"""Context parallel in the engine: parts and whole microbatches, mistakes, 16-bit formats."""

from contextlib import ExitStack
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from hexad import ConfigError, Engine, HexadError, Layout, Mesh
from hexad.config import Config
from hexad.dataset.load.microbatch import Microbatch
from hexad.model import attention
from hexad.parallel.context.exchange import heads_for_tokens
from hexad.parallel.context.rounds import Round, rounds
from hexad.parallel.context.slice import Slicing
from hexad.topology.mesh import Axis

from ..pool import Pool
from ..small import Tree, config_of, engine_of, microbatch_of, random_tokens

_LENGTH, _DOCUMENTS = 24, (0, 1, 9, 24, 30, 48)


DEFAULTS: Tree = {
    "run": {"steps": 10},
    "model": {"layers": 2, "hidden": 32, "heads": 4, "kv_heads": 2, "ffn_hidden": 48, "vocab": 64},
    "data": {"sequence": _LENGTH, "documents": "isolate"},
    "batch": {"micro": 2, "global": 2},
    "lr_schedule": {"warmup": 1},
}


def _config(dtype: str = "fp64", **parallel: Any) -> Config:
    return config_of(DEFAULTS, precision={"dtype": dtype}, parallel=parallel)


def _whole() -> Microbatch:
    return microbatch_of(random_tokens(64, 2, _LENGTH, seed=1), _DOCUMENTS)


def _slicing(engine: Engine) -> Slicing:
    return Slicing.of(engine.config.parallel, engine.config.model)


def _losses(config: Config, given: str = "whole") -> list[float]:
    engine, whole = engine_of(config), _whole()
    part = whole.part(_slicing(engine), engine.mesh.context.rank)
    losses = [engine.train_step([whole if given == "whole" else part]).loss for _ in range(3)]
    assert engine.samples == 6
    return [*losses, engine.evaluate([part if given == "whole" else whole])[0]]


def test_whole_microbatches_and_parts_of_them_are_the_same(pool: Pool) -> None:
    (wanted,) = pool.run(1, _losses, _config())
    for given in ("whole", "part"):
        for losses in pool.run(2, _losses, _config(context=2), given):
            assert losses == pytest.approx(wanted, rel=1e-12)


def _cut(whole: Microbatch) -> Microbatch:
    """The same number of tokens in each sequence, but half as many sequences."""
    return Microbatch(whole.tokens[:1], whole.labels[:1], (0, 1, 9, 24))


def _short(part: Microbatch) -> Microbatch:
    return replace(part, tokens=part.tokens[:, 1:], labels=part.labels[:, 1:])


def _refusals(config: Config) -> list[str]:
    """What a step says of parts that are not this rank's; of an id that one rank alone has, all say it."""
    engine, whole, messages = engine_of(config), _whole(), []
    slicing, other = _slicing(engine), 1 - engine.mesh.context.rank
    tokens = whole.tokens.clone()
    tokens[0, 0] = 64
    bad, own = replace(whole, tokens=tokens), whole.part(slicing, 1 - other)
    steps: list[Any] = [
        lambda: engine.train_step([whole.part(slicing, other)]),
        lambda: engine.train_step([whole.part(replace(slicing, ranks=4), 0)]),
        lambda: engine.train_step([whole.part(slicing, 0)]),  # right on one rank
        lambda: engine.train_step([bad]),
        lambda: engine.train_step([bad.part(slicing, 1 - other)]),
        lambda: engine.evaluate([bad]),
        lambda: engine.train_step([whole][other:]),  # none on one rank
        lambda: engine.evaluate([whole][other:]),
        lambda: engine.evaluate([whole] * (1 + other)),
        lambda: engine.train_step([replace(whole, documents=_DOCUMENTS if other else (0, 24, 48))]),
        lambda: engine.train_step([_cut(whole) if other else whole]),
        lambda: engine.train_step([_short(own) if other else own]),
    ]
    for step in steps:
        with pytest.raises(HexadError) as error:
            step()
        messages.append(str(error.value))
    engine.train_step([whole])  # goes on
    return messages


def test_mistakes_are_refused_on_every_rank(pool: Pool) -> None:
    first, second = pool.run(2, _refusals, _config(context=2))
    assert [message.replace("than 1", "than 0") for message in second] == [
        message.replace("than 1", "than 0") for message in first
    ]
    assert all("another context rank" in message for message in first[:3])
    assert all(message.startswith("token id 64 is outside") for message in first[3:6])
    assert all("no microbatch on a rank" in message for message in first[6:8])
    assert all("ranks of one data rank were given different" in message for message in first[8:11])
    assert "found shape (1, 23), expected (1, 24)" in first[11]


def test_modules_of_ones_own_are_refused(pool: Pool) -> None:
    assert pool.run(2, _of_modules, _config("fp32", context=2)) == [True, True]


def _of_modules(config: Config) -> bool:
    mesh = Mesh.create(Layout.from_settings(config.parallel, 2), torch.device("cpu"))
    with pytest.raises(ConfigError, match=r"parallel\.context: found 2 with modules of your own"):
        Engine(nn.Linear(2, 2), mesh, config)
    return True


def _steps(config: Config, mistake: bool = False) -> list[float]:
    """Losses and gradient norms of a model whose attention is not nearly uniform; with the mistake, keys of
    other ranks are skipped, or heads of keys exchanged."""
    model = config.model.model_copy(update={"init_std": 0.15})
    engine = engine_of(config.model_copy(update={"model": model}))

    def skipping(*arguments: Any) -> tuple[Round, ...]:
        own, *others = rounds(*arguments)
        return own, *(replace(other, tiles=()) for other in others)

    def flipped(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, axis: Axis) -> tuple[torch.Tensor, ...]:
        return heads_for_tokens(q, k.flip(1) if axis.size > 1 else k, v, axis)

    with ExitStack() as mistakes:
        if mistake:
            mistakes.enter_context(mock.patch.object(attention, "rounds", skipping))
            mistakes.enter_context(mock.patch.object(attention, "heads_for_tokens", flipped))
        results = [engine.train_step([_whole()]) for _ in range(3)]
    return [number for result in results for number in (result.loss, result.grad_norm)]


@pytest.mark.parametrize(("dtype", "error"), [("bf16", 2**-7), ("fp16", 2**-9)])
@pytest.mark.parametrize("method", ["ring", "ulysses", "all_gather"])
def test_16_bits_stay_near_float64(dtype: str, error: float, method: str, pool: Pool) -> None:
    """The ranks differ by 3e-3 in bf16 and 8e-4 in fp16; a mistake by four times the bound."""
    (wanted,) = pool.run(1, _steps, _config())
    config = _config(dtype, context=2, context_method=method)
    for steps in pool.run(2, _steps, config):
        assert steps != wanted
        assert steps == pytest.approx(wanted, rel=error)
    for steps in pool.run(2, _steps, config, True):
        assert steps != pytest.approx(wanted, rel=4 * error)
