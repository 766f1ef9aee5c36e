"""Any layout to any layout: every ordered pair of layouts, bit for bit, and the losses that follow."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hexad.checkpoint.checkpointer import Checkpointer
from hexad.config import Config
from hexad.engine.engine import Engine
from hexad.topology.layout import Layout
from hexad.topology.mesh import Mesh

from ..parity.expert_cases import MIXTRAL
from ..parity.harness import Case, Variant, assemble, microbatches
from ..pool import Pool

BEFORE, AFTER = 2, 2
"""Steps until the save, and after the load."""

# Tied embeddings (held by two stages), masked labels, dropout; 5 layers, a vocabulary no degree divides.
VARIANT = Variant(
    "qwen2, tied, dropout",
    {
        "family": "qwen2",
        "layers": 5,
        "hidden": 20,
        "heads": 4,
        "kv_heads": 2,
        "head_dim": 6,
        "ffn_hidden": 28,
        "vocab": 97,
        "tied_embeddings": True,
        "dropout": 0.1,
    },
    masked=0.2,
)
_BASE = Case(VARIANT, samples=12)

LAYOUTS = {
    "one rank": _BASE,
    "data 3": replace(_BASE, data=3),
    "data 2, tensor 2, zero 1": replace(_BASE, data=2, tensor=2, zero=1),
    "data 4, zero 2, 2 replicas": replace(_BASE, data=4, zero=2, replicas=2),
    "data 3, zero 3": replace(_BASE, data=3, zero=3),
    "data 4, zero 3, 2 replicas, recompute": replace(_BASE, data=4, zero=3, replicas=2, recompute="full"),
    "tensor 2 without sequence": replace(_BASE, tensor=2, sequence=False),
    "tensor 2, pipeline 2": replace(_BASE, tensor=2, pipeline=2, split=(1, 4)),
    "data 2, pipeline 3, gpipe, zero 1": replace(_BASE, data=2, pipeline=3, schedule="gpipe", zero=1),
    "data 2, interleaved, zero 2": replace(
        _BASE, data=2, pipeline=2, schedule="interleaved", virtual=2, zero=2
    ),
    "data 2, zb_v, zero 3": replace(_BASE, data=2, pipeline=2, schedule="zb_v", virtual=2, zero=3),
    "data 2, tensor 2, zb_h1, zero 3": replace(_BASE, data=2, tensor=2, pipeline=2, schedule="zb_h1", zero=3),
    "tensor 2, dualpipe_v": replace(_BASE, tensor=2, pipeline=2, schedule="dualpipe_v", virtual=2),
    "pipeline 3, zb_h2": replace(_BASE, pipeline=3, schedule="zb_h2"),
    "tensor 2, context 2, zero 3": replace(_BASE, tensor=2, context=2, zero=3),
    "tensor 4, each KV head on two ranks": replace(_BASE, tensor=4),
}
NAMES = tuple(LAYOUTS)


class Saved:
    """A checkpoint of each layout, written when it is first asked for: the run directory, and the state as
    global tensors."""

    def __init__(self, pool: Pool, factory: pytest.TempPathFactory) -> None:
        self._pool, self._factory = pool, factory
        self._found: dict[str, tuple[Path, dict[str, Any]]] = {}

    def __getitem__(self, name: str) -> tuple[Path, dict[str, Any]]:
        if name not in self._found:
            directory = self._factory.mktemp(f"layout-{NAMES.index(name)}")
            results = self._pool.run(LAYOUTS[name].world, save, LAYOUTS[name], directory)
            self._found[name] = directory, assemble([pieces for _, pieces in results])
        return self._found[name]


def _engine(case: Case, directory: Path) -> tuple[Engine, Checkpointer]:
    config = case.config()
    mesh = Mesh.create(Layout.from_settings(config.parallel, case.world), torch.device("cpu"))
    run = config.run.model_copy(update={"dir": str(directory)})
    saved = config.checkpoint.model_copy(update={"asynchronous": False})
    config = config.model_copy(update={"run": run, "checkpoint": saved})
    return Engine(config, mesh), Checkpointer(config, mesh)


def _pieces(engine: Engine) -> list[Any]:
    return [
        (chunk.name, chunk.rectangle.shape, chunk.rectangle.offset, chunk.tensor.detach().numpy().copy())
        for chunk in engine.chunks()
    ]


def save(case: Case, directory: Path) -> tuple[list[float], list[Any]]:
    """Train and save; this rank's losses and pieces."""
    engine, checkpointer = _engine(case, directory)
    losses = [
        engine.train_step(microbatches(case, step, engine.mesh.data.rank)).loss for step in range(BEFORE)
    ]
    checkpointer.save(engine.chunks(), engine.progress())
    return losses, _pieces(engine)


def load(case: Case, directories: list[Path]) -> list[tuple[list[float], list[Any]]]:
    """Load each checkpoint and resume from it; this rank's losses and pieces right after loading."""
    engine, checkpointer = _engine(case, directories[0])
    results = []
    for directory in directories:
        for chunk in engine.chunks():
            chunk.tensor.fill_(torch.nan)  # what is not loaded must show
        manifest = checkpointer.load(directory / "checkpoints" / f"step-{BEFORE:08d}", engine.chunks())
        engine.restored(manifest.progress)
        pieces = _pieces(engine)
        assert (engine.step, engine.samples) == (BEFORE, BEFORE * case.samples)
        losses = [
            engine.train_step(microbatches(case, engine.step, engine.mesh.data.rank)).loss
            for _ in range(AFTER)
        ]
        results.append((losses, pieces))
    return results


@pytest.fixture(scope="module")
def saved(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    return Saved(pool, tmp_path_factory)


@pytest.fixture(scope="module")
def uninterrupted(pool: Pool) -> list[float]:
    """The losses of one process that never stopped."""
    return pool.run(1, _straight)[0]


def _straight() -> list[float]:
    engine, _ = _engine(_BASE, Path("unused"))
    return [engine.train_step(microbatches(_BASE, step, 0)).loss for step in range(BEFORE + AFTER)]


# Experts: another degree, parts of experts, biases and loads of the step before, which balance the next.
_EXPERTS = Case(
    replace(
        MIXTRAL,
        name="experts, balance over the step, bias",
        model={
            **MIXTRAL.model,
            "moe": {
                "experts": 4,
                "top_k": 2,
                "ffn_hidden": 20,
                "score": "sigmoid",
                "bias_rate": 0.05,
                "balance": "step",
                "aux_loss": 0.3,
            },
        },
    ),
    samples=12,
)
EXPERT_LAYOUTS = (
    replace(_EXPERTS, data=2, expert=2, zero=1),
    replace(_EXPERTS, data=2, tensor=2, expert=2, expert_tensor=2, zero=3),
    replace(_EXPERTS, data=2, expert=2, pipeline=2, schedule="zb_v", virtual=2, zero=2),
    replace(_EXPERTS, data=4, expert=4, dispatcher="all_gather"),
)


def _expert_run() -> tuple[list[float], dict[str, Any]]:
    """The losses of one process that never stops, and its state after the steps before the save."""
    engine, _ = _engine(_EXPERTS, Path("unused"))
    losses, state = [], {}
    for step in range(BEFORE + AFTER):
        losses.append(engine.train_step(microbatches(_EXPERTS, step, 0)).loss)
        if step == BEFORE - 1:
            state = assemble([_pieces(engine)])
    return losses, state


@pytest.mark.parametrize("number", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2, 3))])
def test_experts_in_another_layout(number: int, pool: Pool, tmp_path: Path) -> None:
    """Weights, square ones too, optimizer state, biases and loads: those of one process, and its next
    losses."""
    origin, into = EXPERT_LAYOUTS[number], EXPERT_LAYOUTS[(number + 1) % len(EXPERT_LAYOUTS)]
    losses, state = pool.run(1, _expert_run)[0]
    results = pool.run(origin.world, save, origin, tmp_path)
    written = assemble([pieces for _, pieces in results])
    assert written.keys() == state.keys()
    for name, values in state.items():
        np.testing.assert_allclose(written[name], values, rtol=1e-8, atol=1e-12, err_msg=name)
    assert any(values.any() for name, values in written.items() if name.endswith("router.bias"))
    loaded = pool.run(into.world, load, into, [tmp_path])
    np.testing.assert_allclose(loaded[0][0][0], losses[BEFORE:], rtol=1e-9)
    again = assemble([rank[0][1] for rank in loaded])
    assert all(np.array_equal(again[name], values) for name, values in written.items())


def check(saved: Saved, uninterrupted: list[float], pool: Pool, origins: Sequence[str], into: str) -> None:
    """Load what each of ``origins`` saved in the layout ``into``, and resume."""
    case = LAYOUTS[into]
    results = pool.run(case.world, load, case, [saved[origin][0] for origin in origins])
    for number, origin in enumerate(origins):
        losses, state = results[0][number][0], saved[origin][1]
        np.testing.assert_allclose(losses, uninterrupted[BEFORE:], rtol=1e-9, err_msg=origin)
        loaded = assemble([rank[number][1] for rank in results])
        assert loaded.keys() == state.keys()
        assert any(name.startswith("optimizer.exp_avg_sq.") for name in loaded)
        for name, values in state.items():
            assert np.array_equal(loaded[name], values), f"{name}, from {origin}"


def _nearby(into: str) -> list[str]:
    """Three other layouts; the rest is in the slow sweep."""
    at = NAMES.index(into)
    return [NAMES[(at + far) % len(NAMES)] for far in (1, 2, 3)]


@pytest.mark.parametrize(
    "into",
    [
        name if number == 9 else pytest.param(name, marks=pytest.mark.slow)
        for number, name in enumerate(NAMES)
    ],
)
def test_other_layouts_into_this_one(saved: Saved, uninterrupted: list[float], pool: Pool, into: str) -> None:
    check(saved, uninterrupted, pool, _nearby(into), into)


@pytest.mark.slow
@pytest.mark.parametrize("into", NAMES)
def test_every_layout_into_this_one(saved: Saved, uninterrupted: list[float], pool: Pool, into: str) -> None:
    check(saved, uninterrupted, pool, [name for name in NAMES if name not in _nearby(into)], into)


@pytest.mark.parametrize(
    ("origins", "into"),
    [
        pytest.param(["one rank", "tensor 2 without sequence"], NAMES[-1], marks=pytest.mark.slow),
        ([NAMES[-1]], "one rank"),
        pytest.param([NAMES[-1]], "tensor 2 without sequence", marks=pytest.mark.slow),
    ],
)
def test_copied_kv_heads(
    saved: Saved, uninterrupted: list[float], pool: Pool, origins: list[str], into: str
) -> None:
    check(saved, uninterrupted, pool, origins, into)


def test_the_layouts_cover_every_axis_stage_and_schedule() -> None:
    cases = LAYOUTS.values()
    configs: list[Config] = [case.config() for case in cases]
    assert len(cases) >= 12
    assert {config.parallel.zero for config in configs} == {0, 1, 2, 3}
    assert {case.schedule for case in cases} >= {
        "gpipe", "1f1b", "interleaved", "zb_h1", "zb_h2", "zb_v", "dualpipe_v"
    }  # fmt: skip
    assert any(case.data > 1 and case.tensor > 1 and case.pipeline > 1 for case in cases)


SIXTEEN = Variant(
    "gpt2, untied, fp16",
    {**VARIANT.model, "family": "gpt2", "kv_heads": 4, "vocab": 67, "tied_embeddings": False},
    overrides={"precision": {"dtype": "fp16", "loss_scale_window": 2}},
)
_SIXTEEN = Case(SIXTEEN, samples=12)
OTHERS = {
    "one rank": _SIXTEEN,
    "data 2, zero 1": replace(_SIXTEEN, data=2, zero=1),
    "data 3, zero 3": replace(_SIXTEEN, data=3, zero=3),
    "tensor 2, pipeline 2": replace(_SIXTEEN, tensor=2, pipeline=2, schedule="zb_h1"),
}


def carry(case: Case, source: Path | None, directory: Path) -> tuple[list[Any], dict[str, Any]]:
    """Load ``source``, or train two steps; save; this rank's pieces and progress."""
    engine, checkpointer = _engine(case, directory)
    if source is None:
        save_steps = [
            engine.train_step(microbatches(case, step, engine.mesh.data.rank)) for step in range(BEFORE)
        ]
        assert save_steps[-1].loss_scale > 1
    else:
        for chunk in engine.chunks():
            chunk.tensor.fill_(torch.nan)
        engine.restored(checkpointer.load(source, engine.chunks()).progress)
    checkpointer.save(engine.chunks(), engine.progress())
    return _pieces(engine), engine.progress()


def test_around_through_other_layouts_in_sixteen_bits(pool: Pool, tmp_path: Path) -> None:
    """fp32 masters, a loss scaler, learned positions, biases and an untied head come through four layouts and
    back, bit for bit."""
    source, first = None, None
    for number, case in enumerate((*OTHERS.values(), _SIXTEEN)):
        directory = tmp_path / str(number)
        directory.mkdir()
        results = pool.run(case.world, carry, case, source, directory)
        state, progress = assemble([pieces for pieces, _ in results]), results[0][1]
        source = directory / "checkpoints" / f"step-{BEFORE:08d}"
        if first is None:
            first = state, progress
            assert progress["loss_scale"]["clean"] == 0 and progress["loss_scale"]["scale"] > 2**16
            assert {str(piece[3].dtype) for piece in results[0][0]} == {"float32"}
        assert progress == first[1]
        assert state.keys() == first[0].keys() and "model.positions.weight" in state
        assert all(np.array_equal(state[name], values) for name, values in first[0].items())
