"""Step time of Lightning's strategies: ``HexadStrategy`` beside ``DDPStrategy``, and on a GPU
``FSDPStrategy``, with unchanged modules. All run at once and alternate, a step each, loading its batch
included. On a CPU there are two ranks; on a GPU there is one, whose step has no messages.

    python benchmarks/lightning_interface.py --rounds 10 --output benchmarks/results/lightning_interface.json
    python benchmarks/lightning_interface.py --accelerator cuda --precisions 32-true bf16-mixed \\
        --output benchmarks/results/lightning_interface_gpu.json
"""

import argparse
import json
import queue
import sys
import threading
from collections.abc import Callable
from itertools import pairwise, product
from pathlib import Path
from statistics import median
from typing import Any

import torch
from facts import facts, machine
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy
from peers.plain_torch import ADAMW, Llama, Shape
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset
from turns import Program, serve, wall

from hexad.compat.lightning import HexadStrategy

STRATEGIES: dict[str, Callable[[], Any]] = {
    "ddp": DDPStrategy,
    "ddp_views": lambda: DDPStrategy(gradient_as_bucket_view=True),
    "zero0": HexadStrategy,
    "zero1": lambda: HexadStrategy(zero=1),
    "zero2": lambda: HexadStrategy(zero=2),
    "zero3": lambda: HexadStrategy(zero=3),
    "fsdp": FSDPStrategy,
}
WITHOUT_GPU = [name for name in STRATEGIES if name != "fsdp"]  # which refuses CPUs
AHEAD = 3
"""Steps that are not counted: memory is allocated, algorithms are chosen."""

# Modules and their batches


class Residual(nn.Module):
    """Two convolutions beside a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.convolutions = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        self.shortcut = nn.Conv2d(inputs, outputs, 1, stride) if inputs != outputs else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.convolutions(x) + self.shortcut(x))


def resnet(width: int) -> nn.Module:
    """18 layers for images of 32 x 32; with a width of 64 it has 11M parameters."""
    widths = [width, width, 2 * width, 4 * width, 8 * width]
    blocks: list[nn.Module] = [nn.Conv2d(3, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
    for number, (inputs, outputs) in enumerate(pairwise(widths)):
        blocks += [Residual(inputs, outputs, 2 if number else 1), Residual(outputs, outputs, 1)]
    return nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8 * width, 100))


class Samples(Dataset[tuple[Tensor, Tensor]]):
    """Some samples again and again."""

    def __init__(self, inputs: Tensor, targets: Tensor) -> None:
        self.inputs, self.targets = inputs, targets

    def __len__(self) -> int:
        return 100_000

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.inputs[index % len(self.inputs)], self.targets[index % len(self.inputs)]


def model_and_data(name: str, accelerator: str) -> tuple[nn.Module, DataLoader[Any]]:
    """A module, and batches of a rank as large as the device is made for."""
    gpu = accelerator == "cuda"
    torch.manual_seed(1)
    if name == "resnet":
        rows = 256 if gpu else 32
        inputs, targets = torch.randn(2 * rows, 3, 32, 32), torch.randint(100, (2 * rows,))
        return resnet(64 if gpu else 32), DataLoader(Samples(inputs, targets), rows)
    shape = Shape(hidden=1024, layers=16, ffn_hidden=2816, heads=16, kv_heads=8, sequence=1024)
    shape = shape if gpu else Shape(sequence=128)
    rows = 4
    tokens = torch.randint(shape.vocab, (2 * rows, shape.sequence + 1))
    return Llama(shape), DataLoader(Samples(tokens[:, :-1], tokens[:, 1:]), rows)


class Module(LightningModule):
    def __init__(self, net: nn.Module, fused: bool) -> None:
        super().__init__()
        self.net, self.fused = net, fused

    def training_step(self, batch: Any, index: int) -> Tensor:
        inputs, targets = batch
        outputs = self.net(inputs)
        return cross_entropy(outputs.view(-1, outputs.shape[-1]), targets.reshape(-1))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), weight_decay=0.1, **ADAMW | {"fused": self.fused or None})


# A rank


class Turns(Callback):
    """Hold a fit after each batch, until the next one is asked for."""

    def __init__(self) -> None:
        self.asked: queue.Queue[None] = queue.Queue()
        self.made: queue.Queue[float | BaseException] = queue.Queue()

    def on_train_start(self, *_: Any) -> None:
        self.made.put(0.0)
        self.asked.get()

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
        if module.device.type == "cuda":
            torch.cuda.synchronize()
        self.made.put(float(outputs["loss"]))
        self.asked.get()

    def step(self, _: str) -> dict[str, Any]:
        """A step of the fit in another thread."""
        self.asked.put(None)
        return {"loss": self.wait()}

    def wait(self) -> float:
        """Wait until the fit, which has the process group meanwhile, is held; returns the loss."""
        made = self.made.get()
        if isinstance(made, BaseException):
            raise made
        return made


def make_step(
    accelerator: str, strategy: str, model: str, precision: str, clip: str
) -> Callable[[str], dict[str, Any]]:
    """The step of a rank; its fit never ends."""
    turns = Turns()

    def fit() -> None:
        try:
            net, data = model_and_data(model, accelerator)
            trainer = Trainer(
                strategy=STRATEGIES[strategy](),
                accelerator=accelerator,
                devices=ranks(accelerator),
                precision=precision,  # type: ignore[arg-type]
                gradient_clip_val=float(clip) or None,
                max_epochs=-1,
                callbacks=[turns],
                logger=False,
                enable_checkpointing=False,
                enable_progress_bar=False,
                enable_model_summary=False,
            )
            # Lightning does not clip in autocast with a fused optimizer.
            trainer.fit(Module(net, fused="mixed" not in precision or not float(clip)), data)
        except BaseException as error:
            turns.made.put(error)

    threading.Thread(target=fit, daemon=True).start()
    turns.wait()
    return turns.step


def ranks(accelerator: str) -> int:
    return 1 if accelerator == "cuda" else 2


# The comparison


def compare(accelerator: str, names: list[str], case: tuple[str, ...], rounds: int) -> list[dict[str, Any]]:
    """A row per strategy: medians of its steps, and of the ratios to the first one's of the same round."""
    worker = [sys.executable, __file__, "--worker", accelerator]
    programs = {name: Program([[*worker, name, *case]] * ranks(accelerator)) for name in names}
    try:
        for program in programs.values():
            program.wait()
        for _ in range(AHEAD + rounds):
            for program in programs.values():
                program.step()
    finally:
        for program in programs.values():
            program.kill()
    peer = programs[names[0]].steps[AHEAD:]
    rows = []
    for name, program in programs.items():
        steps = program.steps[AHEAD:]
        ratios = sorted(wall(one) / wall(other) for one, other in zip(steps, peer))
        cpu = (sum(r["cpu"] for r in one) / sum(r["cpu"] for r in other) for one, other in zip(steps, peer))
        rows.append(
            dict(zip(("model", "precision", "clip"), case))
            | {
                "strategy": name,
                "step_seconds": median(map(wall, steps)),
                "paired": median(ratios),
                "quartiles": [ratios[len(ratios) // 4], ratios[-1 - len(ratios) // 4]],
                "cpu_ratio": median(cpu),
                "peak_rss_mb": max(rank["rss"] for rank in steps[-1]),
                "last_loss": steps[-1][0]["loss"],
            }
        )
    return rows


def main() -> None:
    """Print a table, or be a rank."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--accelerator", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--models", nargs="+", default=["llama", "resnet"])
    parser.add_argument("--precisions", nargs="+", default=["32-true"])
    parser.add_argument("--clip", nargs="+", default=["0", "1"], help="gradient_clip_val; 0: no clipping")
    parser.add_argument("--strategies", nargs="+", choices=STRATEGIES, help="the first one is the peer")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--worker", nargs=5)
    options = parser.parse_args()
    if options.worker:
        serve(lambda: make_step(*options.worker), ranks(options.worker[0]))
        return
    on = options.accelerator
    names = options.strategies or (WITHOUT_GPU if on == "cpu" else list(STRATEGIES))
    rows = []
    for case in product(options.models, options.precisions, options.clip):
        able = [name for name in names if name != "fsdp" or not float(case[2])]  # it refuses clipping by norm
        rows += compare(on, able, case, options.rounds)
        for row in rows[-len(able) :]:
            low, high = row["quartiles"]
            print(
                f"{' '.join(case)} {row['strategy']}: {row['step_seconds']:.4f} s, paired "
                f"{row['paired']:.3f} ({low:.3f}-{high:.3f}), CPU {row['cpu_ratio']:.3f}, "
                f"{row['peak_rss_mb']:.0f} MB, loss {row['last_loss']:.6f}",
                flush=True,
            )
    if options.output is not None:
        device = torch.cuda.get_device_name() if on == "cuda" else machine()
        result = facts() | {"machine": device, "accelerator": on, "fits": rows, "rounds": options.rounds}
        options.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
