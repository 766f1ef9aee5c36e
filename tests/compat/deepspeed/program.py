"""One training script, run with the ``deepspeed`` package or with ours: only the import differs.

``python -m tests.compat.deepspeed.program DIRECTORY CASES`` runs all cases with both, and writes what each
computed. The package keeps global state, so that it runs in separate processes.
"""

import copy
import json
import math
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..forked import quiet_deepspeed, run_forked, written_by
from .layers import batch_of as pipe_batch_of
from .layers import loss_of, specs
from .scripts import SCRIPTS

Results = dict[str, dict[str, Any]]
"""By the case's name, on the first rank."""


@dataclass(frozen=True)
class Case:
    """A module, a configuration, and how the script steps.

    Attributes:
        model: ``mlp``, ``gpt2``, or ``pipe``: a pipeline of two stages; or a script's name, whose only key is
            the ``stage``.
        keys: of the configuration, beside batch sizes.
        accumulation: backward passes per step.
        steps: how many.
        optimizer: ``""`` for the configuration's; else a class of ``torch.optim`` that the script makes.
        groups: make two groups of parameters, the second without weight decay and with another rate.
        scheduler: a scheduler of torch that the script makes.
        poison: step whose loss is made infinite.
    """

    model: str = "mlp"
    keys: dict[str, Any] = field(default_factory=dict)
    accumulation: int = 1
    steps: int = 5
    optimizer: str = ""
    groups: bool = False
    scheduler: str = ""
    poison: int = -1


class Mlp(nn.Module):
    """Odd widths, a buffer, a frozen parameter, and one that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(7, 13)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(13, 13), nn.GELU()) for _ in range(2))
        self.shared = nn.Linear(13, 13, bias=False)
        self.norm = nn.LayerNorm(13)
        self.last = nn.Linear(13, 5)
        self.register_buffer("scale", torch.tensor(0.7))
        self.first.bias.requires_grad_(False)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = self.first(x.to(self.first.weight.dtype))
        for layer in self.layers:
            x = x + self.shared(layer(x))
        out = self.last(self.norm(x)).float() * self.scale
        return nn.functional.cross_entropy(out, y)


def model_of(name: str) -> nn.Module:
    """The module, with the same values in every process."""
    torch.manual_seed(11)
    if name == "mlp":
        return Mlp()
    return gpt2(vocab_size=53, n_positions=16, n_embd=24, n_layer=2, n_head=3)


def gpt2(**sizes: int) -> nn.Module:
    """The model of transformers, without dropout."""
    from transformers import GPT2Config, GPT2LMHeadModel

    none = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    return GPT2LMHeadModel(GPT2Config(**sizes, **none))


def batch_of(name: str, rank: int, number: int) -> tuple[Any, ...]:
    """A rank's microbatch of three samples."""
    generator = torch.Generator().manual_seed(1000 * number + rank)
    if name == "mlp":
        x = torch.randn(3, 7, generator=generator)
        return x, torch.randint(5, (3,), generator=generator)
    return (torch.randint(53, (3, 11), generator=generator),)


def run_pipeline(deepspeed: Any, case: Case, rank: int) -> dict[str, Any]:
    """The script of a pipeline, which makes complete steps."""
    module = deepspeed.PipelineModule(
        specs(deepspeed.pipe), num_stages=2, loss_fn=loss_of, seed_layers=True, seed_fn=torch.manual_seed
    )
    config = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": case.accumulation}
    engine, *_ = deepspeed.initialize(
        model=module, model_parameters=module.parameters(), config={**config, **case.keys}
    )
    batches = iter([pipe_batch_of(number) for number in range(case.steps * case.accumulation)])
    record: dict[str, Any] = {"loss": [], "norm": [], "lr": [], "scale": []}
    for _ in range(case.steps):
        record["loss"].append(float(engine.train_batch(batches)))
    return record | {
        "steps": engine.global_steps,
        "skipped": engine.skipped_steps,
        "samples": engine.global_samples,
    }


def run(deepspeed: Any, case: Case, rank: int, world: int) -> dict[str, Any]:
    """Train one case as a script does; returns what it computes."""
    if case.model == "pipe":
        return run_pipeline(deepspeed, case, rank)
    if case.model in SCRIPTS:
        return SCRIPTS[case.model](deepspeed, case.keys["stage"], rank)
    module = model_of(case.model)
    config = {
        "train_micro_batch_size_per_gpu": 3,
        "gradient_accumulation_steps": case.accumulation,
        "gradient_clipping": 0.0,
        **copy.deepcopy(case.keys),
    }
    optimizer, parameters, scheduler = None, None, None
    if case.groups:
        named = [(n, p) for n, p in module.named_parameters() if p.requires_grad]
        parameters = [
            {"params": [p for n, p in named if p.dim() > 1], "weight_decay": 0.1},
            {"params": [p for n, p in named if p.dim() == 1], "weight_decay": 0.0, "lr": 3e-2},
        ]
    if case.optimizer:
        trained = parameters or [p for p in module.parameters() if p.requires_grad]
        settings = {"momentum": 0.9} if case.optimizer == "SGD" else {}
        optimizer = getattr(torch.optim, case.optimizer)(trained, lr=1e-2, **settings)
    if case.scheduler:
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
    engine, optimizer, _, _ = deepspeed.initialize(
        model=module, optimizer=optimizer, model_parameters=parameters, lr_scheduler=scheduler, config=config
    )
    record: dict[str, Any] = {"loss": [], "norm": [], "lr": [], "scale": []}
    for step in range(case.steps):
        total = 0.0
        for micro in range(case.accumulation):
            batch = batch_of(case.model, rank, step * case.accumulation + micro)
            loss = engine(*batch) if case.model == "mlp" else engine(*batch, labels=batch[0]).loss
            if step == case.poison:
                loss = loss * math.inf
            total += loss.item() / case.accumulation
            engine.backward(loss)
            engine.step()
        record["loss"].append(total)
        norm = engine.get_global_grad_norm()
        record["norm"].append(None if norm is None else float(norm))
        record["lr"].append([float(group["lr"]) for group in optimizer.param_groups])
        scale = getattr(optimizer, "loss_scale", 1.0) if "fp16" in case.keys else 1.0
        record["scale"].append(float(scale))
    record |= {
        "steps": engine.global_steps,
        "skipped": engine.skipped_steps,
        "samples": engine.global_samples,
    }
    return record


def results_of(cases: Mapping[str, Case]) -> tuple[Results, Results]:
    """The results of the script with the package, and with its compatibility layer, on two ranks."""
    text = json.dumps([asdict(case) for case in cases.values()])
    with written_by(__name__, text) as directory:
        theirs, ours = (
            dict(zip(cases, json.loads((Path(directory) / name).read_text()))) for name in ("theirs", "ours")
        )
    return theirs, ours


def main() -> None:
    directory, cases = Path(sys.argv[1]), [Case(**settings) for settings in json.loads(sys.argv[2])]
    import deepspeed
    import transformers

    from hexad.compat import deepspeed as compat

    assert transformers.GPT2LMHeadModel  # imported once
    quiet_deepspeed()
    optimizers = [case.keys.get("optimizer", {}).get("params", {}) for case in cases]
    if any(not params.get("bias_correction", True) for params in optimizers):
        # Compiled once, ahead of the forks, in a directory of its own: a process killed while it compiles
        # leaves a lock for which all later ones wait.
        deepspeed.ops.op_builder.FusedAdamBuilder().load(verbose=False)

    def write(rank: int, package: Any, name: str) -> None:
        results = []
        for case in cases:
            try:
                results.append(run(package, case, rank, 2))
            except Exception as error:  # a case that one of them refuses
                results.append({"error": f"{type(error).__name__}: {error}"})
        if not rank:
            (directory / name).write_text(json.dumps(results))

    run_forked(2, directory, lambda rank: write(rank, deepspeed, "theirs"))
    run_forked(2, directory, lambda rank: write(rank, compat, "ours"))


if __name__ == "__main__":
    main()
