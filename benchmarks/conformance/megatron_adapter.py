"""megatron-core's ``GPTModel`` on gloo ranks of CPUs, by its own ``DistributedDataParallel``, schedules,
``finalize_model_grads`` and optimizer.

What it would ask of CUDA is done by the host (:func:`on_host`): devices are replaced, streams do nothing. Its
optimizers for 16 bits and for ZeRO, and its clipping, take tensors of CUDA types only: they are left out.
"""

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from .scenario import Adapter, Outcome, Piece, Sample, Scenario, Tensors

_FUSIONS = ("bias_activation", "masked_softmax", "bias_dropout", "gradient_accumulation")


class _Host(TorchFunctionMode):
    """Tensors that are asked for on ``cuda`` are made on the host."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = dict(kwargs or {})
        if str(options.get("device", "")).startswith("cuda"):
            options["device"] = "cpu"
        return function(*args, **options)


class _Stream:
    """A stream that does nothing, and an event of it."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def wait_stream(self, stream: Any) -> None:
        """Nothing to wait for."""

    def synchronize(self) -> None:
        """Nothing to wait for."""

    wait = wait_event = wait_stream

    def record_event(self, *_: Any) -> "_Stream":
        """An event."""
        return self


def on_host() -> None:
    """Replace what megatron-core calls of CUDA, for the rest of this process."""
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment,return-value]
    torch.cuda.Stream = _Stream  # type: ignore[misc,assignment]
    torch.cuda.stream = lambda stream: nullcontext()  # type: ignore[assignment]
    torch.cuda.current_stream = torch.cuda.default_stream = _Stream  # type: ignore[assignment]
    torch.cuda.synchronize = lambda *_: None  # type: ignore[assignment]
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    random.CudaRNGStatesTracker.fork = lambda self, *_: nullcontext()
    random._get_cuda_rng_state = lambda *_, **__: torch.zeros(0)
    random._set_cuda_rng_state = lambda *_, **__: None
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None  # 0.16.1 reads it also where Transformer Engine is missing
    token_dispatcher.maybe_move_tensor_to_cpu = _on_host_already
    _Host().__enter__()


def _on_host_already(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """In place of ``maybe_move_tensor_to_cpu``, which leaves host tensors as they are, also those that
    collectives take as lists of sizes."""
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


class MegatronAdapter(Adapter):
    """A ``GPTModel`` with the local layers, ``SequentialMLP`` and the alltoall dispatcher, in float32."""

    name, package = "megatron", "megatron-core"
    tolerance = 1e-4
    itemsize = 4

    @classmethod
    def refusal(cls, scenario: Scenario) -> str | None:
        """What needs CUDA, and what it does not allow."""
        if scenario.dtype != "float64":
            return "its 16-bit optimizer takes CUDA tensors only"
        if scenario.clip:
            return "its clipping takes CUDA tensors only"
        if scenario.degrees.zero:
            return "its distributed optimizer takes CUDA tensors only"
        if scenario.sizes.capacity is not None:
            return "drops by torch.topk of equal numbers: which tokens is not defined"
        if scenario.degrees.tensor > 1:
            return "experts with tensor ranks need sequence parallel, whose norms are Apex's or TE's"
        return None

    def build(self, scenario: Scenario) -> None:
        """See the base class."""
        on_host()
        from megatron.core import parallel_state
        from megatron.core.distributed import (
            DistributedDataParallel,
            DistributedDataParallelConfig,
            finalize_model_grads,
        )
        from megatron.core.models.gpt import GPTModel
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

        self.scenario, self.states = scenario, parallel_state
        sizes, degrees = scenario.sizes, scenario.degrees
        parallel_state.initialize_model_parallel(
            degrees.tensor,
            degrees.pipeline,
            expert_model_parallel_size=degrees.expert,
            expert_tensor_parallel_size=1,
        )
        self.config = self._config()
        self.config.finalize_model_grads_func = finalize_model_grads
        self.model = GPTModel(
            self.config,
            get_gpt_layer_local_spec(num_experts=sizes.experts, normalization="RMSNorm"),
            vocab_size=sizes.vocab,
            max_sequence_length=max(scenario.lengths),
            pre_process=parallel_state.is_pipeline_first_stage(),
            post_process=parallel_state.is_pipeline_last_stage(),
            position_embedding_type="rope",
            share_embeddings_and_output_weights=False,
        )
        self.wrapped = DistributedDataParallel(self.config, DistributedDataParallelConfig(), self.model)
        self.config.grad_scale_func = None
        settings = OptimizerConfig(
            optimizer="adam",
            lr=scenario.lr,
            weight_decay=scenario.decay,
            adam_beta1=scenario.betas[0],
            adam_beta2=scenario.betas[1],
            adam_eps=scenario.eps,
            clip_grad=0.0,
        )
        self.optimizer = get_megatron_optimizer(settings, [self.wrapped])
        for group in self.optimizer.param_groups:  # as its scheduler does
            group["lr"], group["weight_decay"] = scenario.lr, scenario.decay * group["wd_mult"]

    def _config(self) -> Any:
        from megatron.core.transformer import TransformerConfig

        sizes, degrees, scenario = self.scenario.sizes, self.scenario.degrees, self.scenario
        recompute = {
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
        }
        biased = {
            "moe_router_score_function": "sigmoid",
            "moe_router_enable_expert_bias": True,
            "moe_router_bias_update_rate": sizes.bias_rate,
        }
        capacity = {
            "moe_expert_capacity_factor": sizes.capacity,
            "moe_token_drop_policy": "position",
        }
        return TransformerConfig(
            num_layers=sizes.layers,
            hidden_size=sizes.hidden,
            num_attention_heads=sizes.heads,
            num_query_groups=sizes.kv_heads,
            ffn_hidden_size=sizes.ffn,
            moe_ffn_hidden_size=sizes.ffn,
            num_moe_experts=sizes.experts,
            moe_router_topk=sizes.top_k,
            moe_router_load_balancing_type="aux_loss" if sizes.aux_loss else "none",
            moe_aux_loss_coeff=sizes.aux_loss,
            moe_token_dispatcher_type="alltoall",
            use_cpu_initialization=True,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            normalization="RMSNorm",
            layernorm_epsilon=1e-5,
            gated_linear_unit=True,
            activation_func=F.silu,
            add_bias_linear=False,
            apply_rope_fusion=False,
            params_dtype=torch.float32,
            pipeline_dtype=torch.float32,
            tensor_model_parallel_size=degrees.tensor,
            pipeline_model_parallel_size=degrees.pipeline,
            expert_model_parallel_size=degrees.expert,
            expert_tensor_parallel_size=1,
            sequence_parallel=degrees.tensor > 1,
            variable_seq_lengths=len(scenario.lengths) > 1,
            # Where microbatches differ in their tokens, a mean over all needs it.
            calculate_per_token_loss=len(scenario.lengths) > 1,
            **dict.fromkeys((f"{name}_fusion" for name in _FUSIONS), False),
            **(recompute if scenario.recompute else {}),
            **(biased if sizes.score == "sigmoid" else {}),
            **(capacity if sizes.capacity is not None else {}),
        )

    def _views(self, name: str, tensor: torch.Tensor) -> Iterator[tuple[str, tuple[int, ...], torch.Tensor]]:
        """(canonical name, offset in the global tensor, view) of a parameter's parts."""
        sizes, rank = self.scenario.sizes, self.states.get_tensor_model_parallel_rank()
        parts = name.split(".")
        if parts[0] in ("embedding", "output_layer"):
            yield {"embedding": "embedding"}.get(parts[0], "head"), (rank * len(tensor), 0), tensor
            return
        if parts[1] == "final_layernorm":
            yield "norm", (0,), tensor
            return
        layer = self.model.decoder.layers[int(parts[2])].layer_number - 1
        prefix, rest = f"layers.{layer}.", ".".join(parts[3:])
        if rest == "self_attention.linear_qkv.weight":
            width, times = sizes.head_dim, sizes.heads // sizes.kv_heads
            groups = tensor.view(-1, (times + 2) * width, sizes.hidden)
            first = rank * len(groups)
            for number, group in enumerate(groups, first):
                queries = times * width
                yield prefix + "q", (number * queries, 0), group[:queries]
                yield prefix + "k", (number * width, 0), group[queries : queries + width]
                yield prefix + "v", (number * width, 0), group[queries + width :]
        elif rest == "self_attention.linear_proj.weight":
            yield prefix + "out", (0, rank * tensor.shape[1]), tensor
        elif parts[3:5] == ["mlp", "experts"]:
            local = sizes.experts // self.scenario.degrees.expert
            expert = self.states.get_expert_model_parallel_rank() * local + int(parts[6])
            if parts[7] == "linear_fc2":
                yield prefix + "experts.down", (expert, 0, 0), tensor[None]
                return
            for kind, part in zip(("gate", "up"), tensor.chunk(2), strict=True):
                yield f"{prefix}experts.{kind}", (expert, 0, 0), part[None]
        else:
            names = {
                "input_layernorm.weight": "attention_norm",
                "pre_mlp_layernorm.weight": "ffn_norm",
                "mlp.router.weight": "router",
                "mlp.router.expert_bias": "bias",
            }
            yield prefix + names[rest], (0,) * tensor.dim(), tensor

    def _tensors(self) -> list[tuple[str, torch.Tensor]]:
        """Parameters, and the biases of experts."""
        biases = [item for item in self.model.named_buffers() if item[0].endswith("expert_bias")]
        return [*self.model.named_parameters(), *biases]

    @torch.no_grad()
    def set_weights(self, weights: Tensors) -> None:
        """See the base class."""
        for name, tensor in self._tensors():
            for canonical, offset, view in self._views(name, tensor.data):
                place = tuple(slice(start, start + size) for start, size in zip(offset, view.shape))
                view.copy_(torch.from_numpy(weights[canonical][place].copy()))

    def _forward(self, samples: Iterator[Sample], model: Any) -> Any:
        """What the schedules call for each microbatch."""
        sample = next(samples)
        length = len(sample.tokens)
        documents = torch.from_numpy(np.searchsorted(sample.documents[1:], np.arange(length), side="right"))
        seen = (documents[:, None] == documents) & torch.ones(length, length, dtype=torch.bool).tril()
        labels = torch.from_numpy(sample.labels[None].copy())
        tokens = torch.from_numpy(sample.tokens[None].copy())
        output = model(tokens, torch.arange(length)[None], ~seen[None, None], labels=labels)
        return output, partial(self._loss, length)

    def _loss(self, length: int, output: torch.Tensor) -> Any:
        total = output.sum()
        reported = {"sum": total.detach().double()}
        if self.config.calculate_per_token_loss:
            return total, torch.tensor(length, dtype=torch.int), reported
        return total / length, reported

    def step(self, batch: Sequence[Sample]) -> Outcome:
        """See the base class."""
        from megatron.core.pipeline_parallel import get_forward_backward_func

        degrees, rank = self.scenario.degrees, self.states.get_data_parallel_rank()
        mine = batch[rank :: degrees.data]
        self.wrapped.zero_grad_buffer()
        self.optimizer.zero_grad()
        results = get_forward_backward_func()(
            forward_step_func=self._forward,
            data_iterator=iter(mine),
            model=[self.wrapped],
            num_microbatches=len(mine),
            seq_length=max(self.scenario.lengths),
            micro_batch_size=1,
            forward_only=False,
        )
        loss = None
        if results:
            total = torch.stack([result["sum"] for result in results]).sum()
            dist.all_reduce(total, group=self.states.get_data_parallel_group())
            loss = total.item() / sum(len(sample.labels) for sample in batch)
        self._gradients = [
            piece
            for name, parameter in self.model.named_parameters()
            for piece in self._pieces(name, parameter.main_grad)
        ]
        self.optimizer.prepare_grads()
        norm = self.optimizer.get_grad_norm()
        self.optimizer.step()
        return Outcome(loss, None, float(norm))

    def _pieces(self, name: str, tensor: torch.Tensor) -> Iterator[Piece]:
        for canonical, offset, view in self._views(name, tensor.detach()):
            yield Piece(canonical, offset, view.double().numpy().copy())

    def gradients(self) -> list[Piece]:
        """See the base class."""
        return self._gradients

    def weights(self) -> list[Piece]:
        """See the base class."""
        return [piece for name, tensor in self._tensors() for piece in self._pieces(name, tensor)]

    def _sharded(self, loading: bool) -> dict[str, Any]:
        model = self.model.sharded_state_dict()
        return {"model": model, "optimizer": self.optimizer.sharded_state_dict(model, is_loading=loading)}

    def save(self, directory: str) -> None:
        """See the base class."""
        from megatron.core import dist_checkpointing

        dist_checkpointing.save(self._sharded(False), directory)

    def load(self, directory: str) -> None:
        """See the base class."""
        from megatron.core import dist_checkpointing

        state = dist_checkpointing.load(self._sharded(True), directory)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])

    def mixtures(self) -> list[Any]:
        """See the base class."""
        from megatron.core.transformer.moe.moe_layer import MoELayer

        return [module for module in self.model.modules() if isinstance(module, MoELayer)]
