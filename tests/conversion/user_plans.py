"""Models and plans as users write them: attention that reshapes in every way, and layers between."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

HIDDEN, HEADS, WIDTH, VOCAB = 24, 4, 6, 41
QKVO = {"q": "column", "k": "column", "v": "column", "o": "row"}
ATTENTION = {f"attention.{name}": style for name, style in QKVO.items()}


class Attention(nn.Module):
    """Queries, keys and values of their own layers; what differs is in the methods."""

    def __init__(self, kv_heads: int = HEADS) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.dim = HEADS, kv_heads, WIDTH
        self.hidden_size = HIDDEN
        self.q, self.o = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.k, self.v = (nn.Linear(HIDDEN, kv_heads * WIDTH) for _ in range(2))

    def split(self, x: Tensor, heads: int) -> Tensor:
        return x.view(x.size(0), -1, heads, self.dim).transpose(1, 2)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def merge(self, y: Tensor, x: Tensor) -> Tensor:
        return y.transpose(1, 2).reshape(x.size(0), x.size(1), -1)

    def forward(self, x: Tensor) -> Tensor:
        heads = (self.heads, self.kv_heads, self.kv_heads)
        q, k, v = (self.split(f(x), n) for f, n in zip((self.q, self.k, self.v), heads))
        return self.o(self.merge(self.attend(q, k, v), x))


class ByWidth(Attention):
    """The number of heads follows from their width."""

    def split(self, x: Tensor, heads: int) -> Tensor:
        return x.view(x.size(0), x.size(1), -1, self.dim).transpose(1, 2)


class ByHeads(Attention):
    """The width of heads follows from their number."""

    def split(self, x: Tensor, heads: int) -> Tensor:
        return x.view(x.size(0), x.size(1), heads, -1).transpose(1, 2)


class Constant(Attention):
    """A number of heads that is no attribute."""

    def split(self, x: Tensor, heads: int) -> Tensor:
        return x.view(x.size(0), x.size(1), HEADS, -1).transpose(1, 2)


class ConstantLength(Attention):
    def split(self, x: Tensor, heads: int) -> Tensor:
        return x.view(x.size(0), -1, HEADS, self.dim).transpose(1, 2)


class Merged(Attention):
    """Features are merged to a number of them."""

    def merge(self, y: Tensor, x: Tensor) -> Tensor:
        return y.transpose(1, 2).reshape(x.size(0), x.size(1), self.hidden_size)


class MergedAndScaled(Merged):
    """The same number scales."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.softmax(q @ k.transpose(2, 3) / math.sqrt(self.hidden_size), dim=-1) @ v


class Flat(Attention):
    """Batch and heads in one dim."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        batch, heads, tokens, dim = q.shape
        q, k, v = (x.reshape(batch * heads, tokens, dim) for x in (q, k, v))
        scores = torch.baddbmm(torch.zeros((), dtype=q.dtype), q, k.transpose(1, 2), alpha=dim**-0.5)
        return torch.bmm(scores.softmax(-1), v).view(batch, heads, tokens, dim)


class Einsum(ByWidth):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = torch.einsum("bhqd,bhkd->bhqk", q, k).softmax(-1)
        return torch.einsum("bhqk,bhkd->bhqd", scores, v)


class Grouped(Attention):
    """Heads of queries share those of keys, the neighbours or every second one."""

    def __init__(self, kv_heads: int = 2, tiled: bool = False) -> None:
        super().__init__(kv_heads)
        self.tiled = tiled

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        groups = self.heads // self.kv_heads
        if self.tiled:
            k, v = k.repeat(1, groups, 1, 1), v.repeat(1, groups, 1, 1)
        else:
            k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        return super().attend(q, k, v)


class GroupedByTorch(Attention):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)


class Three(Attention):
    """Three heads."""

    def __init__(self) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.dim = 3, 3, 8


class OneKey(ByWidth):
    """One head of keys and values for all queries."""

    def __init__(self) -> None:
        super().__init__(1)


class Temperature(ByWidth):
    """A number that is trained, and that all heads use."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.ones(1))

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return super().attend(q * self.temperature.exp(), k, v)


class HeadBias(ByWidth):
    """A parameter of every head."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.ones(HEADS))

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return super().attend(q, k, v) * self.bias.exp().view(1, -1, 1, 1)


class NormedFeatures(ByWidth):
    """A norm of all features of the queries."""

    def split(self, x: Tensor, heads: int) -> Tensor:
        return super().split(x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt(), heads)


class NormedHeads(ByWidth):
    """A norm of every head."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)

    def split(self, x: Tensor, heads: int) -> Tensor:
        return self.norm(super().split(x, heads))


class Slopes(ByHeads):
    """A bias that follows from the number of a head (ALiBi)."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        slopes = 2.0 ** -torch.arange(1, self.heads + 1, dtype=q.dtype, device=q.device)
        places = torch.arange(q.size(2), dtype=q.dtype, device=q.device)
        bias = slopes[:, None, None] * (places - places[:, None])
        return torch.softmax(q @ k.transpose(2, 3) + bias, -1) @ v


class FirstHeads(ByHeads):
    """A table for all heads, of which each takes its own."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.arange(1.0, HEADS + 1))

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return super().attend(q * self.table[: self.heads, None, None], k, v)


class Fused(nn.Module):
    """One layer for queries, keys and values: in thirds, or for one head after the other."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.num_heads, self.embed_dim = how, HEADS, HIDDEN
        self.qkv, self.o = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, _ = x.shape
        y = self.qkv(x)
        if self.how == "chunk":
            q, k, v = (part.reshape(batch, tokens, -1, WIDTH) for part in y.chunk(3, -1))
        elif self.how == "split":
            q, k, v = (p.view(batch, tokens, self.num_heads, -1) for p in y.split(self.embed_dim, -1))
        elif self.how == "thirds":
            q, k, v = y.view(batch, tokens, 3, self.num_heads, -1).unbind(2)
        else:  # heads
            q, k, v = y.view(batch, tokens, self.num_heads, 3, -1).unbind(3)
        y = F.scaled_dot_product_attention(*(part.transpose(1, 2) for part in (q, k, v)), is_causal=True)
        return self.o(y.transpose(1, 2).flatten(2))


class Gated(nn.Module):
    """Gate and up in one layer."""

    def __init__(self, between: Callable[[Tensor], Tensor] | None = None) -> None:
        super().__init__()
        self.between, self.inner = between, 2 * HIDDEN
        self.up = nn.Linear(HIDDEN, 4 * HIDDEN if between is None else 2 * HIDDEN)
        self.down = nn.Linear(2 * HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(x)
        if self.between is not None:
            return self.down(self.between(y))
        gate, up = y.chunk(2, -1)
        return self.down(F.silu(gate) * up)


class Block(nn.Module):
    """A layer around an attention, called with a mask as well."""

    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(HIDDEN), attention

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        return x + self.attention(self.norm(x)) * scale


class OfDicts(nn.Module):
    """Is called with what nobody can guess."""

    def __init__(self, attention: nn.Module, reads: bool = False) -> None:
        super().__init__()
        self.attention, self.reads = attention, reads

    def forward(self, batch: dict[str, Any]) -> Tensor:
        x = batch["x"]
        if self.reads and float(x.detach().square().sum()) < 0:
            return x
        return self.attention(x)


class Case(NamedTuple):
    """A plan.

    Attributes:
        build: the model.
        plan: of it; None for its own.
        refusal: a part of the message; empty for one that works.
        call: with hidden states, of other models.
    """

    build: Callable[[], nn.Module]
    plan: dict[str, str]
    refusal: str = ""
    call: Callable[[nn.Module, Tensor], Tensor] = lambda model, x: model(x)


def of_dicts(model: nn.Module, x: Tensor) -> Tensor:
    return model({"x": x})


def scaled(model: nn.Module, x: Tensor) -> Tensor:
    return model(x, torch.full((), 0.5, dtype=x.dtype))


UP = {"up": "column", "down": "row"}
FUSED = {"qkv": "column", "o": "row"}
OWN = "own heads or features"
CASES: dict[str, Case] = {
    "length computed, heads an attribute": Case(Attention, QKVO),
    "length computed, heads constant": Case(ConstantLength, QKVO, "is invalid for input of size"),
    "heads computed": Case(ByWidth, QKVO),
    "width computed, heads an attribute": Case(ByHeads, QKVO),
    "width computed, heads constant": Case(Constant, QKVO, "expected"),
    "merged to an attribute": Case(Merged, QKVO),
    "merged, and scaled by it": Case(MergedAndScaled, QKVO, "is invalid for input of size"),
    "batch and heads in one dim": Case(Flat, QKVO),
    "einsum": Case(Einsum, QKVO),
    "grouped": Case(Grouped, QKVO),
    "grouped, every second": Case(lambda: Grouped(tiled=True), QKVO, "expected"),
    "grouped by torch": Case(lambda: GroupedByTorch(2), QKVO),
    "grouped, keys whole": Case(Grouped, {"q": "column", "o": "row"}, "expected"),
    "one head of keys, whole": Case(OneKey, {"q": "column", "o": "row"}, "expected a rank's part"),
    "one head of keys, partial": Case(
        OneKey, {"q": "column", "o": "row", "k": "partial", "v": "partial"}, "found a 'partial' parameter"
    ),
    "one head of keys, divided": Case(OneKey, QKVO, "expected"),
    "three heads of two ranks": Case(Three, QKVO, "is invalid for input of size"),
    "temperature": Case(Temperature, QKVO, OWN),
    "temperature, partial": Case(Temperature, QKVO | {"temperature": "partial"}),
    "bias of heads": Case(HeadBias, QKVO | {"bias": "colwise"}),
    "bias of heads, whole": Case(HeadBias, QKVO, "expected"),
    "norm of features": Case(NormedFeatures, QKVO, "expected"),
    "norm of heads": Case(NormedHeads, QKVO, OWN),
    "norm of heads, partial": Case(NormedHeads, QKVO | {"norm": "partial"}),
    "norm of all, partial": Case(
        lambda: Block(ByWidth()), ATTENTION | {"norm": "partial"}, "'partial'", scaled
    ),
    "slopes": Case(Slopes, QKVO, "expected"),
    "first heads": Case(FirstHeads, QKVO, "expected"),
    "fused, chunked": Case(lambda: Fused("chunk"), FUSED, "expected"),
    "fused, split": Case(lambda: Fused("split"), FUSED, "expected"),
    "fused, in thirds": Case(lambda: Fused("thirds"), FUSED, "expected"),
    "fused, by heads": Case(lambda: Fused("heads"), FUSED),
    "gate and up": Case(Gated, UP, "expected"),
    "gate and up, packed": Case(Gated, {"up": "packed_colwise", "down": "row"}),
    "softmax of features": Case(lambda: Gated(lambda y: y.softmax(-1)), UP, "expected"),
    "largest of features": Case(lambda: Gated(lambda y: y - y.amax(-1, keepdim=True)), UP, "expected"),
    "sum of all features": Case(lambda: Gated(lambda y: y / y.square().sum()), UP, "expected"),
    "pairs of features": Case(lambda: Gated(lambda y: y.unflatten(-1, (-1, 2)).flip(-1).flatten(2)), UP),
    "halves of features": Case(
        lambda: Gated(lambda y: y.unflatten(-1, (2, -1)).flip(-2).flatten(2)), UP, "expected"
    ),
    "reversed features": Case(lambda: Gated(lambda y: y.flip(-1)), UP, "expected"),
    "row without a column": Case(Gated, {"down": "row"}, "expected a rank's part of"),
    "column without a row": Case(Gated, {"up": "packed_colwise"}, "expected"),
    "a result in parts": Case(
        lambda: nn.Sequential(nn.Linear(HIDDEN, HIDDEN)), {"0": "column"}, "expected all"
    ),
    "two columns": Case(
        lambda: nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)),
        {"*": "column"},
        "expected",
    ),
    "another argument": Case(lambda: Block(Attention()), ATTENTION, call=scaled),
    "arguments unknown": Case(lambda: OfDicts(Attention()), ATTENTION, call=of_dicts),
    "arguments unknown, heads constant": Case(
        lambda: OfDicts(ConstantLength()), ATTENTION, "would not compute a rank's part", of_dicts
    ),
    "values are read": Case(lambda: OfDicts(ByWidth(), reads=True), ATTENTION, call=of_dicts),
}


def built(case: Case) -> nn.Module:
    """The model in float64."""
    torch.manual_seed(0)
    return case.build().double()


def results(case: Case, model: nn.Module, batch: int, tokens: int) -> tuple[float, Tensor, dict[str, Tensor]]:
    """The loss, and the gradients of the input and of the weights."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(batch, tokens, HIDDEN, dtype=torch.float64, generator=generator).requires_grad_()
    model.zero_grad()
    loss = case.call(model, x).square().sum()
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert x.grad is not None
    return float(loss.detach()), x.grad, gradients
