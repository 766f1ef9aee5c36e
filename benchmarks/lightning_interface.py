"""Step time of Lightning's strategies: ``HexadStrategy`` beside ``DDPStrategy``, one unchanged module on two
ranks of a CPU. Fits take turns; reported are medians of steps, and of the ratios of neighbouring fits.

    python benchmarks/lightning_interface.py --rounds 3 --output benchmarks/results/lightning_interface.json
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from facts import facts

STEPS, WARM_UP = 8, 2
STRATEGIES = ("ddp", "hexad", "hexad_zero1", "hexad_zero3")


def fit(strategy: str, file: str) -> None:
    """One fit, on each of two ranks; the first writes its steps' seconds and losses."""
    import torch
    from lightning.pytorch import Callback, LightningModule, Trainer
    from peers.plain_torch import (
        ADAMW,
        Llama,
        Shape,
        load_reference_weights,
        random_tokens,
        reference_weights,
    )
    from torch.utils.data import DataLoader, TensorDataset

    import hexad.compat.lightning  # noqa: F401  # registers its strategies

    torch.set_num_threads(1)
    shape = Shape(sequence=128)

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = Llama(shape)
            load_reference_weights(self.net, reference_weights(shape))
            self.losses: list[float] = []

        def training_step(self, batch: Any, index: int) -> Any:
            tokens = batch[0]
            logits = self.net(tokens[:, :-1])
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
            self.losses.append(float(loss.detach()))
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), weight_decay=0.1, **ADAMW)

    class Clock(Callback):
        def __init__(self) -> None:
            self.seconds: list[float] = []

        def on_train_batch_start(self, *_: Any) -> None:
            self.begin = time.perf_counter()

        def on_train_batch_end(self, *_: Any) -> None:
            self.seconds.append(time.perf_counter() - self.begin)

    tokens = random_tokens(shape)[0]
    data = TensorDataset(tokens.repeat(STEPS * 2, 1)[: STEPS * 8])
    clock, module = Clock(), Module()
    trainer = Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=2,
        max_steps=STEPS,
        callbacks=[clock],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(data, 4, shuffle=False))
    if trainer.global_rank == 0:
        result = {"seconds": clock.seconds[WARM_UP:], "losses": module.losses}
        Path(file).write_text(json.dumps(result), encoding="utf-8")


def measured(strategy: str) -> dict[str, Any]:
    """A fit's figures, in processes of its own."""
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "fit.json"
        command = [sys.executable, __file__, "--fit", strategy, str(file)]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        subprocess.run(command, check=True, env=environment, capture_output=True)
        result: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return result


def main() -> None:
    """Print a table, or fit."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--strategies", nargs="+", default=list(STRATEGIES[1:]))
    parser.add_argument("--output", type=Path)
    parser.add_argument("--fit", nargs=2, metavar=("STRATEGY", "FILE"))
    options = parser.parse_args()
    if options.fit:
        fit(*options.fit)
        return
    names = [STRATEGIES[0], *options.strategies]
    fits: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    for _ in range(options.rounds):
        for name in names:
            fits[name].append(measured(name))
    seconds = {name: [median(one["seconds"]) for one in each] for name, each in fits.items()}
    strategies = []
    for name in names:
        paired = median(one / other for one, other in zip(seconds[name], seconds["ddp"]))
        pairs = zip(fits[name][0]["losses"], fits["ddp"][0]["losses"])
        differ = max(abs(one - other) / other for one, other in pairs)
        strategies.append(
            {"strategy": name, "seconds": median(seconds[name]), "paired": paired, "losses_differ_by": differ}
        )
        print(f"{name}: {median(seconds[name]):.3f} s, {paired:.3f} of DDP, losses differ by {differ:.1e}")
    if options.output is not None:
        result = facts() | {"strategies": strategies, "rounds": options.rounds}
        options.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
