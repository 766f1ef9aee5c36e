"""Loads of experts from step to step: what a step counted, and the biases that follow from it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hexad.comm import streams
from hexad.config import HexadError
from hexad.config.model import ModelSettings
from hexad.model.router import Router
from hexad.model.routing_inventory import BESIDE_LOADS


@dataclass(frozen=True)
class LayerLoad:
    """The load of one layer's experts in a step, over all ranks.

    Attributes:
        tokens: of each expert, whether or not they were dropped.
        entropy: mean over tokens of the entropy of the router's scores, in nats.
        dropped: pairs of a token and an expert beyond the expert's capacity.
    """

    tokens: tuple[int, ...]
    entropy: float
    dropped: int

    @property
    def imbalance(self) -> float:
        """Load of the expert that has most, relative to the mean."""
        total = sum(self.tokens)
        return max(self.tokens) * len(self.tokens) / total if total else 0.0

    def as_tree(self) -> dict[str, Any]:
        """The load as JSON values."""
        return {
            "tokens": list(self.tokens),
            "imbalance": self.imbalance,
            "entropy": self.entropy,
            "dropped": self.dropped,
        }


class ExpertLoads:
    """Counts of a model's expert layers.

    Attributes:
        layers: numbers of the layers that have experts.
        shares: float64 ``[layers of the model, experts]``, of each layer the experts' parts of the last step;
            even before the first.
    """

    def __init__(self, model: ModelSettings, device: torch.device) -> None:
        assert model.moe is not None
        self.layers = model.expert_layers
        self.settings, self._all, self._device = model.moe, model.layers, device
        self.shares = self._even()

    def _even(self) -> Tensor:
        shape, even = (self._all, self.settings.experts), 1 / self.settings.experts
        return torch.full(shape, even, dtype=torch.float64, device=self._device)

    def empty(self) -> Tensor:
        """float64 ``[layers of the model, statistics]``: nothing counted yet."""
        shape = self._all, self.settings.experts + BESIDE_LOADS
        return torch.zeros(shape, dtype=torch.float64, device=self._device)

    def shaped(self, sums: Tensor) -> Tensor:
        """Counts that were flattened."""
        return sums.view(self._all, -1)

    def missed(self, counts: Tensor) -> Tensor:
        """Rows that found no place in a buffer."""
        return counts[:, -1].sum()

    @torch.no_grad()
    def adopt(self, counts: Tensor, stages: Iterable[nn.Module]) -> None:
        """Take a step's counts, of all ranks, for what follows from them: the shares, and the biases of this
        rank's routers, each changed by ``bias_rate`` towards an even load (arXiv 2408.15664, algorithm 1)."""
        loads = counts[:, : self.settings.experts]
        if self.settings.balance == "step":
            totals = loads.sum(1, keepdim=True)
            self.shares = torch.where(totals > 0, loads / totals.clamp(min=1), self.shares)
        if not self.settings.bias_rate:
            return
        streams.of(self._device).join(streams.SAVING)
        for stage in stages:
            for module in stage.modules():
                if isinstance(module, Router) and module.bias is not None and module.weight.requires_grad:
                    load = loads[module.layer]
                    above = load * self.settings.experts - load.sum()
                    module.bias.data.sub_((self.settings.bias_rate * above.sign()).to(module.bias.dtype))

    def report(self, counts: Sequence[float]) -> dict[int, LayerLoad]:
        """The loads of every layer that has experts, given flattened counts.

        Raises:
            HexadError: rows found no place in a buffer.
        """
        experts, width = self.settings.experts, self.settings.experts + BESIDE_LOADS
        reports, missed = {}, 0
        for layer in self.layers:
            row = counts[layer * width : (layer + 1) * width]
            tokens = tuple(map(int, row[:experts]))
            entropy, dropped, layer_missed = row[experts:]
            missed += int(layer_missed)
            passed = sum(tokens) / self.settings.top_k
            reports[layer] = LayerLoad(tokens, entropy / passed if passed else 0.0, int(dropped))
        if missed:
            raise HexadError(
                f"model.moe.allowance: found {missed} rows more than the experts' buffers hold in this step, "
                "which was not applied; set a larger one, balance loads (moe.aux_loss, moe.bias_rate), or "
                "set moe.capacity_factor"
            )
        return reports

    def state(self) -> list[list[float]] | None:
        """State for a checkpoint, in JSON's types; None if nothing depends on it."""
        return self.shares.tolist() if self.settings.balance == "step" else None

    def restore(self, shares: Sequence[Sequence[float]] | None) -> None:
        """Restore :meth:`state`; a checkpoint without it begins with even loads."""
        self.shares = self._even()
        if shares is not None and (len(shares), len(shares[0])) == tuple(self.shares.shape):
            self.shares = torch.tensor(shares, dtype=torch.float64, device=self._device)


Reports = Mapping[int, LayerLoad]
"""Loads by the layer's number."""
