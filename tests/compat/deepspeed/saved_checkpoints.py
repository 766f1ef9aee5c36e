"""Checkpoints that DeepSpeed itself writes, with what its own functions say they hold.

DeepSpeed leaves state in a process, so two separate ranks write all of them, once per test session.
"""

import contextlib
import io
import sys
import tempfile
from argparse import Namespace
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..forked import quiet_deepspeed, run_forked, written_by

RANKS, STEPS, AFTER = 2, 3, 3
VOCAB = 307
"""Of published models: as many ids as the byte tokenizer has, and more."""
LR, BETAS, EPS = 1e-2, (0.9, 0.95), 1e-8
MOMENTS = ("exp_avg", "exp_avg_sq")

CLIENT_STATE = {"epoch": 1, "options": Namespace(lr=LR)}
"""What a script adds; the object is not loaded."""

CASES = {
    "none_bf16": {"stage": 0, "dtype": "bf16"},
    "none_fp32": {"stage": 0, "dtype": "fp32", "model": "gpt2"},
    "none_ambiguous": {"stage": 0, "dtype": "fp32"},  # a frozen bias looks like trained ones
    "zero1_bf16": {"stage": 1, "dtype": "bf16"},
    "zero1_accumulated": {"stage": 1, "dtype": "bf16", "accumulate": "fp32"},  # DeepSpeed's BF16_Optimizer
    "zero2_fp16": {"stage": 2, "dtype": "fp16"},
    "zero2_fp32": {"stage": 2, "dtype": "fp32"},
    "zero3_bf16": {"stage": 3, "dtype": "bf16"},
    "zero3_fp32": {"stage": 3, "dtype": "fp32", "sub_group": 100},
    "scheduled": {"stage": 2, "dtype": "fp32", "warmup": 4},
    "gpt2": {"stage": 2, "dtype": "fp32", "model": "gpt2"},
    "gpt2_inner": {"stage": 3, "dtype": "fp32", "model": "gpt2", "frozen": "inner.transformer.wpe.weight"},
    "llama": {"stage": 3, "dtype": "fp32", "model": "llama"},
}
UNIVERSAL = ("zero1_bf16", "zero3_bf16", "gpt2")
"""Those that are converted to the universal format, too."""


class Odd(nn.Module):
    """Odd and prime sizes, a tied and a frozen layer, buffers, and a parameter of one value."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(13, 7)
        self.up = nn.Linear(7, 11)
        self.fixed = nn.Linear(11, 11).requires_grad_(False)
        self.norm = nn.LayerNorm(11)
        self.norm.register_buffer("seen", torch.tensor(0))
        self.norm.register_buffer("mean", torch.zeros(11))
        self.norm.register_buffer("scratch", torch.zeros(5), persistent=False)
        self.down = nn.Linear(11, 7)
        self.scale = nn.Parameter(torch.tensor([1.5]))
        self.head = nn.Linear(7, 13, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.norm(F.gelu(self.up(self.embedding(tokens))))
        self.norm.seen += 1
        self.norm.mean.lerp_(hidden.detach().float().mean((0, 1)), 0.1)
        hidden = self.down(hidden + self.fixed(hidden)) * self.scale
        return self.head(hidden)


class Wrapped(nn.Module):
    """A model as a part of a module."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, tokens: Tensor) -> Any:
        return self.inner(tokens)


def samples_of(step: int) -> Tensor:
    """The samples of all ranks: a row for each, with one token more than the inputs."""
    return torch.randint(0, 13, (RANKS, 6), generator=torch.Generator().manual_seed(step))


def loss_of(logits: Tensor, tokens: Tensor) -> Tensor:
    """The mean loss over tokens."""
    return F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())


def published_model(kind: str) -> Any:
    """A small model of transformers."""
    import transformers

    torch.manual_seed(5)
    if kind == "gpt2":
        config = transformers.GPT2Config(
            vocab_size=VOCAB, n_positions=8, n_embd=12, n_layer=2, n_head=3, bos_token_id=0, eos_token_id=0,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        )  # fmt: skip
        return transformers.GPT2LMHeadModel(config)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB, hidden_size=12, intermediate_size=20, num_hidden_layers=2, num_attention_heads=3,
        num_key_value_heads=1, max_position_embeddings=8, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


@cache
def _written() -> tempfile.TemporaryDirectory[str]:
    pytest.importorskip("deepspeed")
    return written_by(__name__)


def saved(name: str) -> Path:
    """A path among the checkpoints, which are written once per session: ``<case>`` (DeepSpeed's directory),
    ``<case>-universal``, ``<case>.pt`` (the expected values), or ``<model>-config`` (``config.json``)."""
    return Path(_written().name) / name


def deepspeed_config(case: dict[str, Any]) -> dict[str, Any]:
    """The settings of DeepSpeed for a case."""
    kind, stage = case["dtype"], {"stage": case["stage"]}
    if case["stage"] == 3:
        stage |= {"sub_group_size": case.get("sub_group", 10**9), "stage3_param_persistence_threshold": 0}
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 0.0,
        "zero_optimization": stage,
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": LR, "betas": BETAS, "eps": EPS, "torch_adam": True},
        },
        "steps_per_print": 10**9,
    }
    if kind != "fp32":
        config[kind] = {"enabled": True} | ({"initial_scale_power": 6} if kind == "fp16" else {})
    if "accumulate" in case:
        config["data_types"] = {"grad_accum_dtype": case["accumulate"]}
    if "warmup" in case:
        warmup = {"warmup_num_steps": case["warmup"], "warmup_max_lr": 2 * LR}
        config["scheduler"] = {"type": "WarmupLR", "params": warmup}
    return config


def groups_of(module: nn.Module) -> list[dict[str, Any]]:
    """Matrices with weight decay, all else without."""
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    return [
        {
            "params": [parameter for parameter in trained if (parameter.dim() > 1) == decay],
            "weight_decay": 0.1 * decay,
        }
        for decay in (True, False)
    ]


def _initialize(case: dict[str, Any], module: nn.Module) -> Any:
    import deepspeed

    return deepspeed.initialize(
        model=module, model_parameters=groups_of(module), config=deepspeed_config(case)
    )[0]


def _expected(engine: Any, stage: int) -> dict[str, dict[str, Tensor]]:
    """The state by DeepSpeed's functions for it, or by the references that its optimizer holds."""
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    if hasattr(engine.optimizer, "_hp_optimizer_states_linked"):
        # It links the state once the first group has been updated, when other groups have none yet.
        engine.optimizer._hp_optimizer_states_linked = False
        engine.optimizer._lazy_init_hp_params_optimizer_state()
    expected: dict[str, dict[str, Tensor]] = {kind: {} for kind in ("model", *MOMENTS)}
    for name, parameter in engine.module.named_parameters():
        if not parameter.requires_grad:
            continue
        if stage:
            expected["model"][name] = safe_get_full_fp32_param(parameter).clone()
            for kind in MOMENTS:
                expected[kind][name] = safe_get_full_optimizer_state(parameter, kind).clone()
            continue
        master, inner = parameter, engine.optimizer
        if hasattr(inner, "fp32_groups"):
            pairs = zip(chain(*inner.fp16_groups), chain(*inner.fp32_groups))
            master = next(full for half, full in pairs if half is parameter)
            inner = inner.optimizer
        expected["model"][name] = master.detach().clone()
        for kind in MOMENTS:
            expected[kind][name] = inner.state[master][kind].clone()
    state = engine.module.state_dict()
    expected["buffers"] = {name: state[name].clone() for name in ("norm.seen", "norm.mean") if name in state}
    return expected


def _train(directory: Path, name: str, case: dict[str, Any], rank: int) -> None:
    torch.manual_seed(1)
    kind = case.get("model")
    module = Odd() if kind is None else published_model(kind)
    if kind is not None and not rank:
        module.config.save_pretrained(directory / f"{kind}-config")  # config.json
    if name.endswith("_inner"):
        module = Wrapped(module)
    if "frozen" in case:
        module.get_parameter(case["frozen"]).requires_grad_(False)
    engine, losses = _initialize(case, module), []
    for step in range(STEPS + AFTER):
        if step == STEPS:
            expected = _expected(engine, case["stage"])
            engine.save_checkpoint(str(directory / name), client_state=CLIENT_STATE)
        if step == STEPS + 1 and name == "zero1_bf16":  # to be mixed in
            engine.save_checkpoint(str(directory / f"{name}-later"))
        tokens = samples_of(step)[rank : rank + 1]
        out = engine(tokens[:, :-1])
        loss = loss_of(out if kind is None else out.logits, tokens)
        engine.backward(loss)
        engine.step()
        mean = loss.detach()
        torch.distributed.all_reduce(mean)
        losses.append(float(mean) / RANKS)
    expected["losses"] = losses[STEPS:]
    expected["after"] = _expected(engine, case["stage"])["model"]
    engine.destroy()
    if rank:
        return
    torch.save(expected, directory / f"{name}.pt")
    if name in UNIVERSAL:
        from deepspeed.checkpoint.ds_to_universal import main as convert

        convert(
            Namespace(
                input_folder=str(directory / name / f"global_step{STEPS}"),
                output_folder=str(directory / f"{name}-universal" / f"global_step{STEPS}_universal"),
                num_extract_workers=1,
                num_merge_workers=1,
                keep_temp_folder=False,
                strict=True,
                inject_missing_state=True,
            )
        )


def _main(directory: Path) -> None:
    import transformers  # noqa: F401 (imported once)

    quiet_deepspeed()

    def write(rank: int) -> None:
        with contextlib.redirect_stdout(io.StringIO()):
            for name, case in CASES.items():
                _train(directory, name, case, rank)

    run_forked(RANKS, directory, write)


if __name__ == "__main__":
    _main(Path(sys.argv[1]))
