"""The programs that ``step_time.py`` compares, mode by mode: Hexad, and its peers."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

RANKS = {"single": 1, "data2": 2, "tensor2": 2, "tensor2_sequence": 2}
SCHEDULES = {
    "1f1b": ("1f1b", "1f1b"),
    "interleaved": ("interleaved", "interleaved"),
    "zb_v": ("zb_v", "zb_v"),
    "best": ("zb_v", "1f1b"),
    "auto": ("auto", "1f1b"),
}
"""Hexad's schedule and PyTorch's, by the end of a pipeline mode's name."""
PLAIN = tuple(RANKS)
ZERO = {f"zero{stage}_2": stage for stage in (1, 2, 3)}
"""Modes with several peers, by their stage."""
RANKS |= {f"pipeline2_{end}": 2 for end in SCHEDULES} | {f"tensor2_pipeline2_{end}": 4 for end in SCHEDULES}
RANKS |= dict.fromkeys(ZERO, 2)


def programs(mode: str) -> tuple[list[str], list[str]]:
    """(Names of the programs of a mode that can run here, Hexad first; names of peers left out).

    ``hexad_pointwise``, Hexad with ``run.compile: pointwise``, takes part where it is asked for.
    """
    if mode not in ZERO:
        return ["hexad", "torch"], []
    from peers.sharded import PEERS

    names = [name for name, peer in PEERS.items() if peer.stage == ZERO[mode]]
    missing = [name for name in names if not PEERS[name].installed]
    return ["hexad", *(name for name in names if name not in missing)], missing


def make_step(program: str, mode: str, dtype: str) -> Callable[[], float | None]:
    """The step of a program on this rank; ranks that do not know the loss return None."""
    if program in ("hexad", "hexad_pointwise"):
        return hexad_step(mode, dtype, "none" if program == "hexad" else "pointwise")
    if program == "torch":
        return torch_step(mode, dtype)
    from peers.plain_torch import Shape, random_tokens
    from peers.sharded import PEERS

    return PEERS[program].make(random_tokens(Shape())[0], dtype)


def model_settings() -> dict[str, int]:
    """Hexad's settings for the peers' model."""
    from peers.plain_torch import Shape

    shape = Shape()
    names = ("layers", "hidden", "heads", "kv_heads", "ffn_hidden", "vocab")
    return {name: getattr(shape, name) for name in names}


def hexad_engine(
    parallel: dict[str, Any], world: int, dtype: str, compiled: str = "none"
) -> tuple[Any, list[Any]]:
    """Hexad's engine with the peer's weights, and this rank's microbatches of the peer's tokens."""
    import torch
    from peers.plain_torch import GLOBAL, MICRO, Shape, random_tokens, reference_weights

    sys.path.insert(0, str(Path(__file__).parents[1]))
    from tests.weights import WholeTensors

    from hexad import Engine, Layout, Mesh, Microbatch, load_config
    from hexad.checkpoint.hugging_face.names import published_tensors

    shape = Shape()
    config = load_config(
        {
            "run": {"device": "cpu", "compile": compiled},
            "model": model_settings(),
            "data": {"sequence": shape.sequence},
            "batch": {"micro": MICRO, "global": GLOBAL},
            "parallel": parallel,
            "precision": {"dtype": dtype},
            "optimizer": {"lr": 3e-4, "clip": 0.0},
            "lr_schedule": {"kind": "constant", "warmup": 0},
        }
    )
    mesh = Mesh.create(Layout.from_settings(config.parallel, world), torch.device("cpu"))
    engine = Engine(config, mesh)
    state = reference_weights(shape)
    table = published_tensors(config.model)
    engine.load_weights(WholeTensors({ours: place.read(state) for ours, place in table.items()}))
    tokens = random_tokens(shape)[0]
    rows = range(mesh.data.rank * MICRO, GLOBAL, MICRO * mesh.data.size)
    batch = [
        Microbatch(tokens[row : row + MICRO, :-1].contiguous(), tokens[row : row + MICRO, 1:].contiguous())
        for row in rows
    ]
    return engine, batch


def hexad_step(mode: str, dtype: str, compiled: str) -> Callable[[], float]:
    """A step of Hexad on the peer's weights and tokens."""
    engine, batch = hexad_engine(parallel_settings(mode), RANKS[mode], dtype, compiled)
    return lambda: engine.train_step(batch).loss


def parallel_settings(mode: str) -> dict[str, Any]:
    """Hexad's ``parallel`` settings for a mode."""
    if mode in ZERO:
        return {"zero": ZERO[mode]}
    settings = {"tensor": 2 if "tensor" in mode else 1, "sequence": mode.endswith("sequence")}
    if "pipeline" not in mode:
        return settings
    from peers.torch_pipelining import PIPELINE, SPLITS

    schedule = SCHEDULES[mode.split("pipeline2_")[1]][0]
    virtual_stages = 2 if schedule in ("interleaved", "zb_v") else 1
    # How many stages there are, `auto` finds itself.
    split = "cost" if schedule == "auto" else list(SPLITS[PIPELINE * virtual_stages])
    pipeline = {"pipeline": PIPELINE, "virtual_stages": virtual_stages, "schedule": schedule, "split": split}
    return settings | pipeline


def torch_step(mode: str, dtype: str) -> Callable[[], float | None]:
    """A step of plain PyTorch. With a pipeline, ranks without the last stage know no loss."""
    import torch
    from peers.plain_torch import Shape, make_step, random_tokens

    tokens = random_tokens(Shape())[0]
    step: Callable[[], float | None]
    if "pipeline" in mode:
        from peers.torch_pipelining import make_step as make_pipeline_step

        layout, _, end = mode.rpartition("pipeline2_")
        step = make_pipeline_step(f"{layout}pipeline2_{SCHEDULES[end][1]}", tokens)
    else:
        step = make_step(mode, tokens)
    if dtype == "fp32":
        return step

    def in_bf16() -> float | None:
        with torch.autocast("cpu", torch.bfloat16):
            return step()

    return in_bf16
