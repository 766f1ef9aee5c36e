"""The example with NeMo's hooks, in the ranks of a pool; and the same encoder in a plain loop of PyTorch."""

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from ..lightning.program import launched, trainer_of

EXAMPLE = Path(__file__).parents[3] / "examples" / "nemo_bert.py"
STEPS, MICRO, GLOBAL = 4, 2, 8


def example() -> ModuleType:
    """The example as a module."""
    spec = importlib.util.spec_from_file_location("nemo_bert", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def optimizer() -> Any:
    """AdamW with a warm-up and a cosine."""
    from hexad.compat import nemo
    from hexad.compat.megatron import OptimizerConfig

    config = OptimizerConfig(lr=0.01, weight_decay=0.1, clip_grad=1.0)
    return nemo.MegatronOptimizerModule(
        config, nemo.lr_scheduler.CosineAnnealingScheduler(warmup_steps=1, constant_steps=0, min_lr=0.001)
    )


def fitted(
    given: dict[str, Any],
    options: dict[str, Any] | None = None,
    sampler: dict[str, Any] | None = None,
    path: str | None = None,
    stop: int | None = None,
) -> dict[str, Any]:
    """Fit the example; its losses, norms, rates and evaluations.

    Args:
        given: arguments of the strategy.
        options: of the trainer.
        sampler: further arguments of the sampler.
        path: of a checkpoint, to be saved after step ``stop``, or else to be loaded.
    """
    from lightning.pytorch import Callback

    from hexad.compat.nemo import MegatronDataSampler, MegatronStrategy

    bert, seen = example(), {"losses": [], "norms": [], "rates": [], "val": []}

    class Seen(Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            metrics = trainer.callback_metrics
            seen["losses"].append(float(metrics["reduced_train_loss"]))
            seen["norms"].append(float(metrics["grad_norm"]))
            seen["rates"].append(float(metrics["lr"]))
            trainer.should_stop = trainer.global_step == stop

        def on_validation_end(self, trainer: Any, *_: Any) -> None:
            seen["val"].append(float(trainer.callback_metrics["val_loss"]))

    with launched():
        strategy, options = MegatronStrategy(**given), dict(options or {})
        per_token = options.pop("per_token", False)
        settings = {"max_steps": STEPS, "val_check_interval": 2, "limit_val_batches": 2}
        settings |= {"num_sanity_val_steps": 0, "callbacks": [Seen()], **options}
        trainer = trainer_of(strategy, **settings)
        sequence = given.get("sequence_parallel", False)
        config = bert.BertConfig(
            params_dtype=torch.float64,
            sequence_parallel=sequence,
            calculate_per_token_loss=per_token,
            hidden_size=16,
            seq_length=12,
        )
        data = bert.Text(config.seq_length, MICRO, GLOBAL)
        if sampler is not None:
            data.data_sampler = MegatronDataSampler(config.seq_length, MICRO, GLOBAL, **sampler)
        module = bert.BertModule(config, optimizer())
        trainer.fit(module, data, ckpt_path=None if stop else path)
        if stop:
            trainer.save_checkpoint(path)
        result = {**seen, "samples": strategy.engine_module.engine.samples}
        return {**result, "config": vars(module.config)}


def evaluated(given: dict[str, Any]) -> dict[str, Any]:
    """Fit the example with dropout and an optimizer of PyTorch; evaluate it during the fit and after it."""
    from lightning.pytorch import LightningModule

    from hexad.compat.nemo import MegatronStrategy

    bert = example()

    class Dropping(bert.BertModule):  # type: ignore[name-defined, misc]
        def __init__(self, config: Any) -> None:
            LightningModule.__init__(self)
            self.config = config

        def configure_model(self) -> None:
            super().configure_model()
            for layer in self.module.layers.values():
                layer.register_forward_hook(lambda m, _, x: nn.functional.dropout(x, 0.5, m.training))

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.5)

        test_step = bert.BertModule.validation_step
        test_loss_reduction = bert.BertModule.validation_loss_reduction

    class Data(bert.Text):  # type: ignore[name-defined, misc]
        test_dataloader = bert.Text.val_dataloader

    with launched():
        options: dict[str, Any] = {"max_steps": STEPS, "val_check_interval": STEPS, "num_sanity_val_steps": 0}
        trainer = trainer_of(
            MegatronStrategy(**given), limit_val_batches=2, limit_test_batches=2, callbacks=[], **options
        )
        config = bert.BertConfig(params_dtype=torch.float64, hidden_size=16, seq_length=12)
        module, data = Dropping(config), Data(config.seq_length, MICRO, GLOBAL)
        trainer.fit(module, data)
        losses = [float(trainer.callback_metrics["val_loss"])]
        losses.append(trainer.validate(module, data, verbose=False)[0]["val_loss"])
        losses.append(trainer.test(module, data, verbose=False)[0]["test_loss"])
        engine = trainer.strategy.engine_module.engine  # type: ignore[attr-defined]
        return {"losses": losses, "clip": engine.config.optimizer.clip}


def marked(ranks: int) -> list[float]:
    """Losses of a stage of plain modules, of which a norm computes with this rank's tokens."""
    from lightning.pytorch import Callback

    from hexad.compat.megatron import mappings
    from hexad.compat.nemo import MegatronStrategy

    bert = example()
    losses: list[float] = []

    class Seen(Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            losses.append(float(trainer.callback_metrics["reduced_train_loss"]))

    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(3)
            options = {"dtype": torch.float64}
            self.words = nn.Embedding(bert.VOCAB, 8, **options)  # type: ignore[arg-type]
            self.norm = nn.LayerNorm(8, **options)  # type: ignore[arg-type]
            self.head = nn.Linear(8, bert.VOCAB, **options)  # type: ignore[arg-type]
            for parameter in self.norm.parameters():
                parameter.sequence_parallel = True  # type: ignore[attr-defined]

        def set_input_tensor(self, _: Any) -> None:
            """Not needed."""

        def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            x = self.norm(mappings.scatter_to_sequence_parallel_region(self.words(tokens).transpose(0, 1)))
            x = mappings.gather_from_sequence_parallel_region(x**2, tensor_parallel_output_grad=False)
            return nn.functional.cross_entropy(self.head(x).permute(1, 2, 0), labels, reduction="none")

    class Module(bert.BertModule):  # type: ignore[name-defined, misc]
        def configure_model(self) -> None:
            self.module = Plain()

    with launched():
        strategy = MegatronStrategy(tensor_model_parallel_size=ranks, sequence_parallel=True)
        trainer = trainer_of(strategy, max_steps=STEPS, limit_val_batches=0, callbacks=[Seen()])
        config = bert.BertConfig(params_dtype=torch.float64, hidden_size=8, seq_length=12)
        trainer.fit(Module(config, optimizer()), bert.Text(12, MICRO, GLOBAL))
    return losses


def plain() -> dict[str, list[float]]:
    """The same steps by PyTorch's AdamW, without Hexad's layers, engine or schedule."""
    bert = example()
    width, heads, length = 16, 4, 12

    def drawn(seed: int, *shapes: tuple[int, int]) -> list[nn.Parameter]:
        """What parallel layers draw, in their order."""
        torch.manual_seed(seed)
        values = [nn.init.normal_(torch.empty(shape, dtype=torch.float32), std=0.02) for shape in shapes]
        return [nn.Parameter(value.double()) for value in values]

    words, places = drawn(1000, (bert.VOCAB, width), (length, width))
    (head,) = drawn(2000, (bert.VOCAB, width))
    shapes = (3 * width, width), (width, width), (4 * width, width), (width, 4 * width)
    layers = [
        (drawn(n, *shapes), [nn.Parameter(torch.zeros(s[0]).double()) for s in shapes]) for n in range(4)
    ]
    norms = [nn.LayerNorm(width).double() for _ in range(9)]
    head_bias = nn.Parameter(torch.zeros(bert.VOCAB).double())

    def losses(batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        x = words[batch["tokens"]] + places
        for n, ((qkv, proj, up, down), (b1, b2, b3, b4)) in enumerate(layers):
            y = nn.functional.linear(norms[2 * n](x), qkv, b1).unflatten(2, (heads, 3, width // heads))
            query, key, value = y.permute(3, 0, 2, 1, 4)
            scores = (query @ key.mT / (width // heads) ** 0.5).softmax(-1) @ value
            x = x + nn.functional.linear(scores.transpose(1, 2).flatten(2), proj, b2)
            x = x + nn.functional.linear(
                nn.functional.gelu(nn.functional.linear(norms[2 * n + 1](x), up, b3)), down, b4
            )
        logits = nn.functional.linear(norms[8](x), head, head_bias)
        token = nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="none")
        mask = batch["loss_mask"].flatten().double()
        return (token * mask).sum(), mask.sum()

    def batch_of(numbers: range) -> dict[str, torch.Tensor]:
        return torch.utils.data.default_collate([data[n] for n in numbers])

    data = bert.MaskedText(length, 0.0, 0.9)
    matrices = [words, places, head, *(w for ws, _ in layers for w in ws)]
    vectors = [
        head_bias,
        *(b for _, bs in layers for b in bs),
        *(p for norm in norms for p in norm.parameters()),
    ]
    update = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}], lr=0.01
    )
    result: dict[str, list[float]] = {"losses": [], "norms": []}
    # NeMo's cosine with one step of warm-up: a half, the whole, then down to the least in 3 steps.
    for step, rate in enumerate((0.005, 0.01, 0.00775, 0.00325)):
        for group in update.param_groups:
            group["lr"] = rate
        update.zero_grad()
        parts = [
            losses(batch_of(range(n, n + MICRO))) for n in range(step * GLOBAL, (step + 1) * GLOBAL, MICRO)
        ]
        # What is trained is the mean of microbatches' means, what is logged the mean of all tokens.
        torch.stack([total / count.clamp(min=1) for total, count in parts]).mean().backward()
        loss = sum(total.detach() for total, _ in parts) / sum(count for _, count in parts)
        result["norms"].append(float(nn.utils.clip_grad_norm_(matrices + vectors, 1.0)))
        result["losses"].append(float(loss))
        update.step()
    return result
