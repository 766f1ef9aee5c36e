"""transformers' Mixtral in one process, trained as its ``Trainer`` does: the loss of each microbatch, with
``num_items_in_batch``, and backward passes that add up."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from transformers import MixtralConfig, MixtralForCausalLM
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

from .scenario import Adapter, Array, Outcome, Piece, Sample, Scenario, Sizes, Tensors

_NAMES = {
    "model.embed_tokens.weight": "embedding",
    "model.norm.weight": "norm",
    "lm_head.weight": "head",
    "input_layernorm.weight": "attention_norm",
    "post_attention_layernorm.weight": "ffn_norm",
    "self_attn.q_proj.weight": "q",
    "self_attn.k_proj.weight": "k",
    "self_attn.v_proj.weight": "v",
    "self_attn.o_proj.weight": "out",
    "mlp.gate.weight": "router",
    "mlp.experts.down_proj": "experts.down",
    "mlp.experts.gate_up_proj": "experts.gate_up",
}


def _canonical(name: str) -> str:
    parts = name.split(".")
    if parts[1] != "layers":
        return _NAMES[name]
    return f"layers.{parts[2]}.{_NAMES['.'.join(parts[3:])]}"


class TransformersAdapter(Adapter):
    """``MixtralForCausalLM`` with its eager experts and PyTorch's AdamW."""

    name, package = "transformers", "transformers"
    tolerance = 2e-5
    """Its routers' softmax and its auxiliary loss are in float32."""

    @classmethod
    def refusal(cls, scenario: Scenario) -> str | None:
        """What is not one process, and what Mixtral does not have."""
        if scenario.degrees.world > 1:
            return "tried in one process: it loads and computes models, and leaves ranks to other packages"
        if scenario.sizes.score == "sigmoid":
            return "Mixtral has no bias; models with one (deepseek_v3) never change it"
        if scenario.sizes.capacity is not None:
            return "Mixtral has no capacity"
        return None

    @classmethod
    def balance(cls, sizes: Sizes, loads: list[Any], shares: list[Any]) -> Any:
        """As ``load_balancing_loss_func`` declares it: loads and shares are means over all layers' tokens,
        and the result is neither summed over layers nor divided by ``top_k``."""
        tokens = sum(len(share) for share in shares)
        load = sum(loads) / tokens
        share = sum(share.sum(0) for share in shares) / tokens
        return sizes.experts * (load * share).sum()

    def build(self, scenario: Scenario) -> None:
        """See the base class."""
        self.scenario, sizes = scenario, scenario.sizes
        config = MixtralConfig(
            vocab_size=sizes.vocab,
            hidden_size=sizes.hidden,
            intermediate_size=sizes.ffn,
            num_hidden_layers=sizes.layers,
            num_attention_heads=sizes.heads,
            num_key_value_heads=sizes.kv_heads,
            head_dim=sizes.head_dim,
            num_local_experts=sizes.experts,
            num_experts_per_tok=sizes.top_k,
            rope_parameters={"rope_theta": 10000.0, "rope_type": "default"},
            router_aux_loss_coef=sizes.aux_loss,
            output_router_logits=bool(sizes.aux_loss),
            rms_norm_eps=1e-5,
            sliding_window=None,
            use_cache=False,
            attn_implementation="eager",
            experts_implementation="eager",
        )
        self._adopt(MixtralForCausalLM(config).to(getattr(torch, scenario.dtype)))

    def _adopt(self, model: Any) -> None:
        self.model = model.train()
        if self.scenario.recompute:
            model.activation_checkpointing_enable()
        parameters = list(model.parameters())
        groups = [
            {"params": [p for p in parameters if p.dim() > 1], "weight_decay": self.scenario.decay},
            {"params": [p for p in parameters if p.dim() == 1], "weight_decay": 0.0},
        ]
        scenario = self.scenario
        self.optimizer = torch.optim.AdamW(
            groups, lr=scenario.lr, betas=scenario.betas, eps=scenario.eps, foreach=False
        )

    @torch.no_grad()
    def set_weights(self, weights: Tensors) -> None:
        """See the base class."""
        for name, parameter in self.model.named_parameters():
            canonical = _canonical(name)
            if canonical.endswith("gate_up"):
                parts = [weights[canonical.replace("gate_up", kind)] for kind in ("gate", "up")]
                parameter.copy_(torch.cat([torch.from_numpy(part) for part in parts], 1))
            else:
                parameter.copy_(torch.from_numpy(weights[canonical]))

    def step(self, batch: Sequence[Sample]) -> Outcome:
        """See the base class."""
        self.optimizer.zero_grad()
        items = sum(len(sample.labels) for sample in batch)
        loss, auxiliary = 0.0, 0.0
        for sample in batch:
            outputs = self.model(
                input_ids=torch.from_numpy(sample.tokens[None].copy()),
                position_ids=torch.from_numpy(_positions(sample)[None].copy()),
                labels=torch.zeros((1, len(sample.labels)), dtype=torch.int64),
                shift_labels=torch.from_numpy(sample.labels[None].copy()),
                num_items_in_batch=items,
            )
            outputs.loss.backward()
            added = 0.0
            if outputs.aux_loss is not None:
                added = self.scenario.sizes.aux_loss * outputs.aux_loss.item()
            loss, auxiliary = loss + outputs.loss.item() - added, auxiliary + added / len(batch)
        norm = torch.nn.utils.get_total_norm([p.grad for p in self.model.parameters()]).item()
        self._gradients = self._pieces({name: p.grad for name, p in self.model.named_parameters()})
        if self.scenario.clip:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.scenario.clip)
        self.optimizer.step()
        return Outcome(loss, auxiliary, norm)

    def _pieces(self, tensors: dict[str, torch.Tensor]) -> list[Piece]:
        pieces = []
        for name, tensor in tensors.items():
            canonical, array = _canonical(name), tensor.detach().double().numpy().copy()
            if canonical.endswith("gate_up"):
                for kind, part in zip(("gate", "up"), np.split(array, 2, 1), strict=True):
                    pieces.append(Piece(canonical.replace("gate_up", kind), (0, 0, 0), part))
            else:
                pieces.append(Piece(canonical, (0,) * array.ndim, array))
        return pieces

    def gradients(self) -> list[Piece]:
        """See the base class."""
        return self._gradients

    def weights(self) -> list[Piece]:
        """See the base class."""
        return self._pieces(dict(self.model.named_parameters()))

    def save(self, directory: str) -> None:
        """A published checkpoint, and the optimizer's state as torch saves it."""
        self.model.save_pretrained(directory)
        torch.save(self.optimizer.state_dict(), f"{directory}/optimizer.pt")

    def load(self, directory: str) -> None:
        """See the base class."""
        dtype = getattr(torch, self.scenario.dtype)
        self._adopt(
            MixtralForCausalLM.from_pretrained(
                directory, dtype=dtype, attn_implementation="eager", experts_implementation="eager"
            )
        )
        self.optimizer.load_state_dict(torch.load(f"{directory}/optimizer.pt"))

    def mixtures(self) -> list[Any]:
        """See the base class."""
        return [module for module in self.model.modules() if isinstance(module, MixtralSparseMoeBlock)]


def _positions(sample: Sample) -> Array:
    """Places in each document: transformers isolates documents where they begin again at 0."""
    pairs = zip(sample.documents[:-1], sample.documents[1:], strict=True)
    return np.concatenate([np.arange(end - begin) for begin, end in pairs])
