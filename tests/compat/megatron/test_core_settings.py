"""Configurations, settings and functions of training loops without flags: defaults, and what is refused."""

from copy import deepcopy
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional as F

from hexad.compat.megatron import distributed, transformer
from hexad.compat.megatron.gpt import GPTModel
from hexad.compat.megatron.schedules import forward_backward
from hexad.compat.megatron.settings import DistributedDataParallelConfig
from hexad.compat.megatron.tensor_parallel import model_parallel_cuda_manual_seed
from hexad.config import HexadError

from ...pool import Pool
from .test_core_loop import BATCH, CONFIG, SIZES, VOCAB, S, World, build, tokens

WRONG: list[tuple[dict[str, Any], str]] = [
    ({"num_moe_experts": 4}, "TransformerConfig.num_moe_experts: found 4"),
    ({"multi_latent_attention": True}, "TransformerConfig.multi_latent_attention: found True"),
    (
        {"hidden_sizes": 4},
        "found hidden_sizes, which Megatron-Core does not have (did you mean 'hidden_size'?)",
    ),
    ({"activation_func": F.relu}, "TransformerConfig.activation_func: found relu without gated_linear_unit"),
    ({"normalization": "RMSNorm"}, "TransformerConfig.normalization: found RMSNorm: the flags fit neither"),
    ({"tensor_model_parallel_size": 4}, "found 4, but parallel_state has 1"),
    ({"params_dtype": torch.int8}, "TransformerConfig.params_dtype: found torch.int8"),
    ({"init_method": torch.nn.init.ones_}, "TransformerConfig.init_method: found function"),
    ({"softmax_type": "off-by-one"}, "TransformerConfig.softmax_type: found off-by-one"),
    ({"num_layers": None}, "TransformerConfig.num_layers: is missing"),
    ({"num_query_groups": 3}, "TransformerConfig.num_query_groups: found 3, which does not divide"),
    ({"softmax_scale": -1.0}, "TransformerConfig.softmax_scale: found -1.0, expected greater than 0"),
    ({"window_size": 4}, "TransformerConfig.window_size: found 4, expected (LEFT, 0)"),
    ({"bf16": True}, "TransformerConfig.params_dtype: found torch.float64 with bf16; use torch.bfloat16"),
    ({"fp16": True}, "TransformerConfig.params_dtype: found torch.float64 with fp16; use torch.float16"),
]


def _refused() -> list[str]:
    messages = []
    with World():
        for more, _ in WRONG:
            with pytest.raises(HexadError) as error:
                build({**CONFIG, **more})
            messages.append(str(error.value))
        for call in (
            lambda: GPTModel(vocab_size=100, max_sequence_length=8),
            lambda: GPTModel(transformer.TransformerConfig(**CONFIG), max_sequence_length=8),
            lambda: GPTModel(transformer.TransformerConfig(**CONFIG), vocab_size=100),
            lambda: distributed.finalize_model_grads([build(CONFIG)]),
        ):
            with pytest.raises(HexadError) as error:
                call()
            messages.append(str(error.value))
    return messages


def test_settings_that_hexad_lacks_are_refused(pool: Pool) -> None:
    (messages,) = pool.run(1, _refused)
    wanted = [message for _, message in WRONG]
    wanted += ["pass a TransformerConfig, or call initialize_megatron", "found vocab_size None"]
    wanted += ["found max_sequence_length None", "found a GPTModel; wrap it in DistributedDataParallel"]
    assert [m for m, part in zip(messages, wanted, strict=True) if part not in m] == []
    assert all("\n" not in message for message in messages)


def _not_finite() -> str:
    """The error of a gradient that is not finite on one rank."""
    with World():
        model_parallel_cuda_manual_seed(3)
        ddp = DistributedDataParallelConfig(check_for_nan_in_grad=True)
        model = distributed.DistributedDataParallel(None, ddp, build({**CONFIG, "num_layers": 1}))
        for wrong in (False, dist.get_rank() == 1):
            losses = model(tokens()[:, :-1], None, None, labels=tokens()[:, 1:])
            (losses.mean() * (float("inf") if wrong else 1.0)).backward()
            try:
                model.finish_grad_sync()
            except HexadError as error:
                return str(error)
            model.zero_grad_buffer()
        return ""


def test_gradients_that_are_not_finite_are_refused_on_all_ranks(pool: Pool) -> None:
    one, other = pool.run(2, _not_finite)
    assert one == other and "check_for_nan_in_grad: found gradients that are not finite" in one


STEPS_REFUSED: list[tuple[Any, str]] = [
    (lambda loss: loss.mean(), "loss function: found a tensor of shape []; return (loss, reported) or"),
    (lambda loss: None, "loss function: found None"),
    (lambda loss: (loss.mean(),), "loss function: found a tuple of 1"),
    (lambda loss: (loss.sum(), 1, 1, {}), "loss function: found a tuple of 4"),
    (lambda loss: (loss, {}), f"loss function: found a tensor of shape [{BATCH}, {S}] as loss"),
    (lambda loss: (1.0, {}), "loss function: found a float as loss"),
    (lambda loss: (loss.mean().detach(), {}), "loss function: found a loss without a gradient"),
    (None, "forward_step: found None as loss function"),
]


@dataclass
class _MoreSettings(transformer.TransformerConfig):  # type: ignore[misc]
    """Settings of a script's own."""

    depth: int = field(kw_only=True)
    name: str = "mine"


def _configured() -> None:
    with World():
        config = _MoreSettings(**CONFIG, depth=3)
        assert (config.depth, config.name, config.kv_channels, config.num_query_groups) == (3, "mine", 16, 4)
        assert replace(config, hidden_size=32, depth=4).depth == 4
        assert GPTModel(config, None, VOCAB, S).config is config


def test_configurations_are_dataclasses(pool: Pool) -> None:
    config = transformer.TransformerConfig(**SIZES)
    assert (config.activation_func, config.params_dtype) == (F.gelu, torch.float32)
    assert config.add_bias_linear and config.perform_initialization and config.layernorm_epsilon == 1e-5
    assert replace(config, num_layers=3).num_layers == 3 and asdict(config)["ffn_hidden_size"] == 256
    assert deepcopy(config).hidden_size == 64 and "num_layers=2" in repr(config)
    with pytest.raises(AttributeError, match="Megatron-Core has no such setting"):
        _ = config.spam
    pool.run(1, _configured)


@pytest.mark.slow
def test_defaults_of_settings_are_megatron_cores() -> None:
    core: Any = pytest.importorskip("megatron.core.transformer").TransformerConfig
    ours, literals = transformer.TransformerConfig(), bool | int | float | str | torch.dtype
    wanted = {f.name: f.default for f in fields(core) if isinstance(f.default, literals)}
    different = {name for name, value in wanted.items() if getattr(ours, name) != value}
    assert len(wanted) > 150 and different <= {"min_offloaded_tensor_size", "attention_backend"}, different


def _steps_refused() -> list[str]:
    messages = []
    with World():
        model = build(CONFIG)
        config = transformer.TransformerConfig(**CONFIG, calculate_per_token_loss=True)

        def step(result: Any) -> None:
            forward_backward(
                forward_step_func=lambda rows, stage: result(stage),
                data_iterator=iter(()),
                model=model,
                num_microbatches=1,
            )

        losses = partial(model, tokens()[:, :-1], None, None, labels=tokens()[:, 1:])
        for call in (
            *(partial(step, lambda _, loss=loss: (losses(), loss)) for loss, _ in STEPS_REFUSED),
            lambda: step(lambda _: losses()),
            lambda: model(torch.zeros(1, S + 1, dtype=torch.long)),
            lambda: model(torch.zeros(S, dtype=torch.long)),
            lambda: distributed.DistributedDataParallel(config, None, model),
            lambda: distributed.DistributedDataParallel(
                None, DistributedDataParallelConfig(use_megatron_fsdp=True), model
            ),
            lambda: distributed.DistributedDataParallel(None, {"overlap_grad_reduce": True}, model),
            lambda: distributed.DistributedDataParallel(None, None, None),  # type: ignore[arg-type]
            lambda: distributed.finalize_model_grads(model),
            lambda: distributed.finalize_model_grads([]),
        ):
            with pytest.raises(HexadError) as error:
                call()
            messages.append(str(error.value))
    return messages


def test_steps_of_another_form_are_refused(pool: Pool) -> None:
    (messages,) = pool.run(1, _steps_refused)
    wanted = [message for _, message in STEPS_REFUSED]
    wanted += [f"forward_step: found a tensor of shape [{BATCH}, {S}]; return"]
    wanted += ["found sequences of 17 tokens, but max_sequence_length is 16", "found shape [16], expected"]
    wanted += ["calculate_per_token_loss", "DistributedDataParallelConfig.use_megatron_fsdp: found True"]
    wanted += ["ddp_config: found a mapping"]
    wanted += ["found None; pass a module", "found a GPTModel; pass a list", "found none; pass a list"]
    assert [m for m, part in zip(messages, wanted, strict=True) if part not in m] == []


def _odd_sequences(degrees: dict[str, int]) -> str:
    with World(**degrees):
        model = build({**CONFIG, "sequence_parallel": True})
        with pytest.raises(HexadError) as error:
            forward_backward(
                forward_step_func=lambda rows, stage: (stage(tokens()[:1, :15]), None),
                data_iterator=iter(()),
                model=model,
                num_microbatches=1,
                **({"seq_length": 15, "micro_batch_size": 1} if degrees.get("pipeline") else {}),  # type: ignore[arg-type]
            )
        return str(error.value)


@pytest.mark.parametrize("degrees", [{"tensor": 2}, {"tensor": 2, "pipeline": 2}])
def test_sequences_that_do_not_divide_are_refused_on_all_ranks(pool: Pool, degrees: dict[str, int]) -> None:
    messages = set(pool.run(2 * degrees.get("pipeline", 1), _odd_sequences, degrees))
    assert (
        len(messages) == 1 and "found microbatches of 15 tokens, which do not divide by 2" in messages.pop()
    )


def _seeded() -> list[float]:
    """Sums of parameters of a model on a rank with a seed of its own."""
    with World():
        model_parallel_cuda_manual_seed(3 + dist.get_rank())
        return [float(parameter.sum()) for parameter in build(CONFIG).parameters()]


def test_ranks_with_other_seeds_have_the_first_ones_values(pool: Pool) -> None:
    one, other = pool.run(2, _seeded)
    assert one == other
