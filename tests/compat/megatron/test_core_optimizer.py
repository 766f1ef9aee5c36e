"""``get_megatron_optimizer`` and its schedule, in loops without flags."""

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hexad.compat.megatron import dist_checkpointing, distributed, training
from hexad.compat.megatron.core_optimizer import OptimizerParamScheduler, get_megatron_optimizer
from hexad.compat.megatron.schedules import forward_backward
from hexad.compat.megatron.settings import DistributedDataParallelConfig, OptimizerConfig
from hexad.compat.megatron.tensor_parallel import model_parallel_cuda_manual_seed
from hexad.config import HexadError

from ...pool import Pool
from .test_core_loop import BATCH, CONFIG, S, World, build, forward_step, mean_over_data, rows_of, tokens

ADAM = {"lr": 1e-2, "weight_decay": 0.1, "clip_grad": 0.5, "adam_beta2": 0.95}
STEPS = 4


def _plain() -> list[float]:
    """The steps by plain PyTorch: AdamW without decay of vectors, gradients clipped."""
    with World():
        model_parallel_cuda_manual_seed(3)
        model = build(CONFIG)
        named = list(model.named_parameters())
        groups = [
            {"params": [p for _, p in named if p.dim() > 1], "weight_decay": 0.1},
            {"params": [p for _, p in named if p.dim() == 1], "weight_decay": 0.0},
        ]
        optimizer, losses = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95)), []
        for step in range(STEPS):
            for group in optimizer.param_groups:
                group["lr"] = 1e-2 * (1 - step / 10)
            optimizer.zero_grad()
            loss = model(tokens()[:, :-1], None, None, labels=tokens()[:, 1:]).mean()
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            assert norm > 0.5
            optimizer.step()
            losses.append(loss.item())
        return losses


class Loop:
    """A model with its optimizer on this rank."""

    def __init__(self, settings: dict[str, Any], zero: bool, micro: int) -> None:
        model_parallel_cuda_manual_seed(3)
        self.micro = micro
        ddp = DistributedDataParallelConfig(use_distributed_optimizer=zero, overlap_grad_reduce=micro == 1)
        model = build({**CONFIG, **settings})
        self.model = distributed.DistributedDataParallel(model.config, ddp, model)
        config = OptimizerConfig(optimizer="adam", use_distributed_optimizer=zero, **ADAM)  # type: ignore[arg-type]
        self.optimizer = get_megatron_optimizer(config, [self.model])
        self.schedule = OptimizerParamScheduler(
            self.optimizer, 0.0, 1e-2, 0.0, 0, 10, "linear", 0.1, 0.1, 0, "constant"
        )

    def step(self) -> list[float]:
        """A step; the loss on the last stage."""
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        batches = rows_of(self.micro)
        reported = forward_backward(
            forward_step_func=forward_step,
            data_iterator=iter(batches),
            model=self.model,
            num_microbatches=len(batches),
            seq_length=S,
            micro_batch_size=self.micro,
        )
        distributed.finalize_model_grads([self.model])
        updated, norm, _ = self.optimizer.step()
        assert updated and norm > 0.5
        self.schedule.step(1)
        return [sum(row["lm loss"] for row in reported) / len(reported)] if reported else []

    def state(self) -> dict[str, Any]:
        return {
            "model": self.model.sharded_state_dict(prefix=""),
            "optimizer": self.optimizer.sharded_state_dict(),
            "schedule": self.schedule.state_dict(),
        }


def _steps(
    degrees: dict[str, int], settings: dict[str, Any], zero: bool, micro: int, save: str, load: str
) -> list[float]:
    """Losses of steps, of which the last two follow a checkpoint."""
    with World(**degrees):
        loop = Loop(settings, zero, micro)
        if load:
            saved = dist_checkpointing.load(loop.state(), load)
            loop.model.module.load_state_dict(saved["model"])
            loop.optimizer.load_state_dict(saved["optimizer"])
            loop.schedule.load_state_dict(saved["schedule"])
        losses = [loss for _ in range(2) for loss in loop.step()]
        if save:
            dist_checkpointing.save(loop.state(), save)
        return losses if load else losses + [loss for _ in range(2) for loss in loop.step()]


def test_steps_are_pytorchs_in_any_layout(pool: Pool, tmp_path: Path) -> None:
    """AdamW with clipping and a schedule, state sharded or not; resumed in another layout."""
    (losses,) = pool.run(1, _plain)
    assert losses[-1] < losses[0]
    saved = str(tmp_path / "saved")
    layouts: list[tuple[int, dict[str, int], dict[str, Any], bool, int]] = [
        (4, {"tensor": 2}, {"sequence_parallel": True}, True, 1),
        (4, {"pipeline": 2}, {}, True, 2),
    ]
    for number, (ranks, degrees, settings, zero, micro) in enumerate(layouts):
        save = saved if number == 0 else ""
        results = pool.run(ranks, _steps, degrees, settings, zero, micro, save, "")
        assert mean_over_data(results, 1) == pytest.approx(losses, rel=1e-9)
    for ranks, degrees, zero, micro in ((1, {}, False, BATCH), (2, {"pipeline": 2}, True, 2)):
        results = pool.run(ranks, _steps, degrees, {}, zero, micro, "", saved)
        assert mean_over_data(results, 1) == pytest.approx(losses[2:], rel=1e-9)


def _refused() -> None:
    with World():
        model = distributed.DistributedDataParallel(None, None, build(CONFIG))
        config = OptimizerConfig(**ADAM)
        for other, words in (
            (OptimizerConfig(optimizer="sgd"), "OptimizerConfig.optimizer: found sgd"),
            (OptimizerConfig(fp16=True), "OptimizerConfig.fp16: found True"),
            (OptimizerConfig(decoupled_lr=1.0), "OptimizerConfig.decoupled_lr: found 1.0"),
            (
                OptimizerConfig(optimizer_cpu_offload=True),
                "OptimizerConfig.optimizer_cpu_offload: found True",
            ),
            (
                OptimizerConfig(decoupled_weight_decay=False),
                "decoupled_weight_decay: found False, .* use True",
            ),
            (
                OptimizerConfig(exp_avg_dtype=torch.bfloat16),
                "exp_avg_dtype: found torch.bfloat16, .*float32",
            ),
            (
                OptimizerConfig(apply_wd_to_qk_layernorm=True),
                "OptimizerConfig.apply_wd_to_qk_layernorm: found",
            ),
            (OptimizerConfig(clip_grad=-1.0), "OptimizerConfig.clip_grad: found -1.0, expected greater than"),
            (OptimizerConfig(adam_beta2=1.5), "OptimizerConfig.adam_beta2: found 1.5, expected less than 1"),
            (OptimizerConfig(adam_eps=0.0), "OptimizerConfig.adam_eps: found 0.0, expected greater than 0"),
        ):
            with pytest.raises(HexadError, match=words):
                get_megatron_optimizer(other, [model])
        with pytest.raises(HexadError, match="wrap it in DistributedDataParallel"):
            get_megatron_optimizer(config, [model.module])
        optimizer = get_megatron_optimizer(config, [model])
        model(tokens()[:, :-1], None, None, labels=tokens()[:, 1:]).mean().backward()
        with pytest.raises(HexadError, match="call finalize_model_grads"):
            optimizer.step()
        optimizer.zero_grad()
        with pytest.raises(HexadError, match="found no gradients since zero_grad"):
            optimizer.step()
        model(tokens()[:, :-1], None, None, labels=tokens()[:, 1:]).mean().backward()
        model.finish_grad_sync()
        optimizer.param_groups[0]["lr"] = None
        with pytest.raises(HexadError, match=r"OptimizerConfig.lr: found None"):
            optimizer.step()
        optimizer.param_groups[0]["lr"] = -1.0
        with pytest.raises(HexadError, match=r"OptimizerConfig.lr: found -1.0"):
            optimizer.step()
        with torch.no_grad():
            parameter = next(model.parameters())
            parameter.fill_(2.0)
        optimizer.reload_model_params()
        optimizer.param_groups[0]["lr"] = 0.0
        assert optimizer.step()[0] and bool((parameter == 2.0).all())
        assert optimizer.get_grad_norm() > 0 and float(optimizer.scale_loss(torch.ones(1))) == 1.0


def test_what_the_optimizer_refuses(pool: Pool) -> None:
    pool.run(1, _refused)


SCHEDULES: list[dict[str, Any]] = [
    {"lr_decay_style": "linear", "lr_warmup_steps": 3},
    {"lr_decay_style": "cosine", "lr_warmup_steps": 0, "init_lr": 0.1},
    {"lr_decay_style": "constant", "lr_warmup_steps": 2, "init_lr": 0.2},
    {"lr_decay_style": "inverse-square-root", "lr_warmup_steps": 4},
    {"lr_decay_style": "inverse-square-root", "lr_warmup_steps": 0},
    *(
        {"lr_decay_style": "WSD", "lr_warmup_steps": 2, "wsd_decay_steps": 5, "lr_wsd_decay_style": style}
        for style in ("linear", "cosine", "exponential", "minus_sqrt")
    ),
    {"lr_decay_style": "linear", "lr_warmup_steps": 3, "end_wd": 0.3, "wd_incr_style": "linear"},
    {"lr_decay_style": "linear", "lr_warmup_steps": 3, "end_wd": 0.3, "wd_incr_style": "cosine"},
]
DEFAULTS = {
    "init_lr": 0.0,
    "max_lr": 1.0,
    "min_lr": 0.1,
    "lr_decay_steps": 12,
    "start_wd": 0.1,
    "end_wd": 0.1,
    "wd_incr_steps": 9,
    "wd_incr_style": "constant",
}


def rates_of(scheduler: Any, **settings: Any) -> list[float]:
    """Rates and decays of two groups over some steps."""
    groups: list[dict[str, Any]] = [{}, {"max_lr": 2.0, "min_lr": 0.0, "wd_mult": 0.5}]
    schedule = scheduler(SimpleNamespace(param_groups=groups), **{**DEFAULTS, **settings})
    rates = []
    for _ in range(15):
        rates += [group[name] for group in groups for name in ("lr", "weight_decay")]
        schedule.step(1)
    return rates


@pytest.mark.slow
@pytest.mark.parametrize("settings", SCHEDULES)
def test_schedules_are_megatron_cores(settings: dict[str, Any]) -> None:
    core = pytest.importorskip("megatron.core.optimizer_param_scheduler")
    assert rates_of(OptimizerParamScheduler, **settings) == pytest.approx(
        rates_of(core.OptimizerParamScheduler, **settings), rel=1e-12
    )


def test_schedules() -> None:
    rates = rates_of(OptimizerParamScheduler, lr_decay_style="cosine", lr_warmup_steps=2)[::4]
    cosine = [0.1 + 0.45 * (1 + math.cos(math.pi * step / 10)) for step in range(11)]
    assert rates == pytest.approx([0.0, 0.5, *cosine, 0.1, 0.1])
    for wrong in (
        {"lr_decay_style": "spam"},
        {"min_lr": 2.0},
        {"lr_warmup_steps": 12},
        {"lr_decay_style": "WSD"},
        {"end_wd": 0.05, "wd_incr_style": "linear"},
        {"end_wd": 0.2},
        {"wd_incr_style": "cosine", "wd_incr_steps": 0},
        {"override_opt_param_scheduler": True},
    ):
        with pytest.raises(HexadError, match="OptimizerParamScheduler: found"):
            rates_of(OptimizerParamScheduler, **{"lr_decay_style": "linear", "lr_warmup_steps": 1, **wrong})


def test_schedules_of_checkpoints() -> None:
    """Those of the checkpoint, of the script, or equal ones."""

    def resumed(rate: float, **options: Any) -> float:
        optimizer = SimpleNamespace(param_groups=[{}])
        settings = {**DEFAULTS, "lr_decay_style": "linear", "lr_warmup_steps": 0}
        saved = OptimizerParamScheduler(optimizer, **settings)
        saved.step(6)
        schedule = OptimizerParamScheduler(optimizer, **{**settings, "max_lr": rate}, **options)
        schedule.load_state_dict(saved.state_dict())
        return float(optimizer.param_groups[0]["lr"])

    own = {"use_checkpoint_opt_param_scheduler": False}
    assert resumed(2.0) == pytest.approx(0.55)
    assert resumed(2.0, **own, override_opt_param_scheduler=True) == pytest.approx(1.05)
    assert resumed(1.0, **own) == pytest.approx(0.55)
    with pytest.raises(HexadError, match=r"found max_lr 2.0, but 1.0 in the checkpoint"):
        resumed(2.0, **own)


def _half() -> None:
    """Modules in 16 bits."""
    with World():
        model = build({**CONFIG, "params_dtype": torch.bfloat16, "bf16": True})
        wrapped = distributed.Float16Module(model.config, model)
        outer = distributed.DistributedDataParallel(model.config, DistributedDataParallelConfig(), wrapped)
        assert distributed.unwrapped(outer) is model and training.get_model_config(outer) is model.config
        logits = wrapped(tokens()[:, :-1], None, None)
        assert logits.dtype == torch.float32 and outer.state_dict().keys() == model.state_dict().keys()
        linear = distributed.Float16Module(SimpleNamespace(fp16=True), torch.nn.Linear(2, 2))
        assert linear(torch.ones(1, 2), fp32_output=False).dtype == torch.float16
        with pytest.raises(HexadError, match="make it with TransformerConfig"):
            distributed.Float16Module(SimpleNamespace(bf16=True), build(CONFIG))
        with pytest.raises(HexadError, match="leave it out"):
            distributed.Float16Module(SimpleNamespace(), torch.nn.Linear(2, 2))


def test_modules_in_16_bits(pool: Pool) -> None:
    pool.run(1, _half)
