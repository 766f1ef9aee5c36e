"""The same training in float64 in one process of plain PyTorch: dense loops over experts, gradients of
autograd, AdamW and biases by their formulas."""

from collections.abc import Callable
from math import ceil
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from .scenario import Outcome, Played, Sample, Scenario, Sizes, Tensors

Weights = dict[str, Tensor]
Balance = Callable[[Sizes, list[Any], list[Any]], Any]


def play(scenario: Scenario, balance: Balance) -> tuple[Played, Tensors]:
    """Train; (what happened, the part of the last gradients that the load-balancing loss has)."""
    weights = {name: torch.from_numpy(values.copy()) for name, values in scenario.weights().items()}
    moments = {name: (torch.zeros_like(value), torch.zeros_like(value)) for name, value in weights.items()}
    played, added = Played(), dict[str, Tensor]()
    for step in range(scenario.steps):
        for name, value in weights.items():
            value.requires_grad_(not name.endswith("bias"))
        tokens, auxiliary, loads = losses(scenario.sizes, weights, scenario.batch(step), balance)
        gradients, added = _gradients(tokens, weights), _gradients(auxiliary, weights)
        gradients = {name: gradients[name] + added[name] for name in gradients}
        norm = torch.stack([value.square().sum() for value in gradients.values()]).sum().sqrt().item()
        factor = min(1.0, scenario.clip / norm) if scenario.clip else 1.0
        for value in weights.values():
            value.requires_grad_(False)
        for name, gradient in gradients.items():
            update(scenario, step + 1, weights[name], gradient * factor, moments[name])
        _balance_biases(scenario.sizes, weights, loads)
        counts = {layer: load.tolist() for layer, load in enumerate(loads)}
        played.outcomes.append(Outcome(tokens.item(), auxiliary.item(), norm, counts))
        played.gradients = {name: value.numpy() for name, value in gradients.items()}
    played.weights = {name: value.numpy() for name, value in weights.items()}
    return played, {name: value.numpy() for name, value in added.items()}


def losses(
    sizes: Sizes, weights: Weights, batch: list[Sample], balance: Balance
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """(mean token loss of all targets, the auxiliary loss's mean over microbatches, loads of each layer)."""
    targets = sum(len(sample.labels) for sample in batch)
    tokens, auxiliary = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
    totals = [torch.zeros(sizes.experts, dtype=torch.float64) for _ in range(sizes.layers)]
    for sample in batch:
        logits, loads, shares = forward(sizes, weights, sample)
        labels = torch.from_numpy(sample.labels)
        tokens = tokens + F.cross_entropy(logits, labels, reduction="sum") / targets
        if sizes.aux_loss:
            auxiliary = auxiliary + sizes.aux_loss * balance(sizes, loads, shares) / len(batch)
        totals = [total + load for total, load in zip(totals, loads, strict=True)]
    return tokens, auxiliary, totals


def forward(sizes: Sizes, weights: Weights, sample: Sample) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """(logits, of each layer the loads of experts, and the shares of tokens)."""
    x = weights["embedding"][torch.from_numpy(sample.tokens)]
    bounds = torch.tensor(sample.documents[1:-1], dtype=torch.int64)
    places = torch.arange(len(x))
    document = torch.bucketize(places, bounds, right=True)
    places = places - torch.tensor(sample.documents)[document]
    mask = (document[:, None] == document) & torch.ones(len(x), len(x), dtype=torch.bool).tril()
    loads, shares = [], []
    for layer in range(sizes.layers):
        of_layer = {
            name.removeprefix(f"layers.{layer}."): value
            for name, value in weights.items()
            if name.startswith(f"layers.{layer}.")
        }
        x = x + _attention(sizes, of_layer, _norm(x, of_layer["attention_norm"]), mask, places)
        made, load, share = _mixture(sizes, of_layer, _norm(x, of_layer["ffn_norm"]))
        x = x + made
        loads.append(load)
        shares.append(share)
    return _norm(x, weights["norm"]) @ weights["head"].t(), loads, shares


def _norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weight


def _rotated(x: Tensor, places: Tensor) -> Tensor:
    """``[tokens, heads, width]``, rotated by each token's place in its document: the halves of a head are
    pairs. Frequencies, angles, sines and cosines are float32 numbers, as in published models."""
    half = x.shape[-1] // 2
    frequencies = (10000.0 ** -(torch.arange(half, dtype=torch.float64) / half)).float()
    angles = places.float()[:, None, None] * frequencies
    cos, sin = (values.float().double() for values in (angles.double().cos(), angles.double().sin()))
    first, second = x[..., :half], x[..., half:]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


def _attention(sizes: Sizes, weights: Weights, x: Tensor, mask: Tensor, places: Tensor) -> Tensor:
    width, times = sizes.head_dim, sizes.heads // sizes.kv_heads
    q = _rotated((x @ weights["q"].t()).unflatten(1, (-1, width)), places)
    k = _rotated((x @ weights["k"].t()).unflatten(1, (-1, width)), places).repeat_interleave(times, 1)
    v = (x @ weights["v"].t()).unflatten(1, (-1, width)).repeat_interleave(times, 1)
    scores = torch.einsum("qhd,khd->hqk", q, k) * width**-0.5
    probabilities = scores.masked_fill(~mask, -torch.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", probabilities, v).flatten(1) @ weights["out"].t()


def _mixture(sizes: Sizes, weights: Weights, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(the experts' sum, the load of each expert before any is dropped, normalised scores)."""
    logits = x @ weights["router"].t()
    scores = logits.sigmoid() if sizes.score == "sigmoid" else logits.softmax(-1)
    by = scores.detach() + weights["bias"] if "bias" in weights else scores.detach()
    chosen = by.sort(dim=-1, descending=True, stable=True).indices[:, : sizes.top_k]
    of_chosen = scores.gather(1, chosen)
    of_chosen = of_chosen / of_chosen.sum(-1, keepdim=True)
    most = len(x) if sizes.capacity is None else ceil(sizes.capacity * len(x) * sizes.top_k / sizes.experts)
    y, load = torch.zeros_like(x), torch.zeros(sizes.experts, dtype=torch.float64)
    for expert in range(sizes.experts):
        tokens, place = (chosen == expert).nonzero(as_tuple=True)
        load[expert] = len(tokens)
        tokens, place = tokens[:most], place[:most]
        gate, up, down = (weights[f"experts.{name}"][expert] for name in ("gate", "up", "down"))
        made = (F.silu(x[tokens] @ gate.t()) * (x[tokens] @ up.t())) @ down.t()
        y = y.index_add(0, tokens, of_chosen[tokens, place, None] * made)
    return y, load, scores / scores.sum(-1, keepdim=True)


def _gradients(loss: Tensor, weights: Weights) -> Weights:
    trained = {name: value for name, value in weights.items() if value.requires_grad}
    if not loss.requires_grad:
        return {name: torch.zeros_like(value) for name, value in trained.items()}
    found = torch.autograd.grad(loss, list(trained.values()), retain_graph=True, allow_unused=True)
    return {
        name: torch.zeros_like(value) if gradient is None else gradient
        for (name, value), gradient in zip(trained.items(), found, strict=True)
    }


def update(
    scenario: Scenario, step: int, weight: Tensor, gradient: Tensor, moments: tuple[Tensor, Tensor]
) -> None:
    """AdamW, in place (arXiv 1711.05101)."""
    first, second = scenario.betas
    moments[0].mul_(first).add_((1 - first) * gradient)
    moments[1].mul_(second).add_((1 - second) * gradient.square())
    if weight.dim() > 1:
        weight.mul_(1 - scenario.lr * scenario.decay)
    denominator = (moments[1] / (1 - second**step)).sqrt() + scenario.eps
    weight.sub_(scenario.lr * (moments[0] / (1 - first**step)) / denominator)


def _balance_biases(sizes: Sizes, weights: Weights, loads: list[Tensor]) -> None:
    """Each bias towards an even load, once in a step (arXiv 2408.15664, algorithm 1)."""
    if not sizes.bias_rate:
        return
    for layer, load in enumerate(loads):
        weights[f"layers.{layer}.bias"].sub_(sizes.bias_rate * (load - load.mean()).sign())


def error(values: np.ndarray, wanted: np.ndarray, floor: float = 0.0) -> float:
    """Largest difference, relative to the largest element; infinite for NaN."""
    found = float(np.abs(values - wanted).max()) / max(float(np.abs(wanted).max()), floor, 1e-300)
    return found if np.isfinite(found) else float("inf")
