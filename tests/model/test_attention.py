"""Attention inside documents and sliding windows, by whatever kernel, against one softmax under a mask."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch.nn import functional as F

from hexad.config.schema import ModelSettings
from hexad.model import attention_kernels
from hexad.model.attention_kernels import AttentionKernel, Spans, choose
from hexad.model.dropout import DropoutKey, Dropper, Site, row_keys
from hexad.model.dropped_attention import dropped_attention
from hexad.model.positions import span_positions

CPU = torch.device("cpu")
TOKENS, HEADS, KV_HEADS, WIDTH, SCALE = 34, 4, 2, 6, 0.3


def _inputs() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [
        torch.randn(TOKENS, heads, WIDTH, dtype=torch.float64, generator=generator).requires_grad_()
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    ]


def _wanted(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spans: Spans, window: int) -> torch.Tensor:
    place = span_positions(spans, TOKENS, CPU)
    span = (torch.arange(TOKENS) - place)[:, None]
    back = torch.arange(TOKENS)[:, None] - torch.arange(TOKENS)
    seen = (span == span.T) & (back >= 0) & (back < window)
    k, v = (each.repeat_interleave(HEADS // KV_HEADS, dim=1) for each in (k, v))
    scores = torch.einsum("qhw,khw->hqk", q, k).mul(SCALE).masked_fill(~seen, -torch.inf)
    return torch.einsum("hqk,khw->qhw", scores.softmax(-1), v).flatten(1)


SPANS = {
    "one": Spans(TOKENS, 1),
    "two": Spans(TOKENS, 2),
    "documents": Spans(TOKENS, 2, (0, 1, 9, 17, 30, 34)),
}


@pytest.mark.parametrize("window", [1, 2, 3, 5, 8, 16, 17, 33, 34, 50])
@pytest.mark.parametrize("spans", SPANS)
def test_windows(spans: str, window: int) -> None:
    q, k, v = _inputs()
    wanted = _wanted(q, k, v, SPANS[spans], window)
    weights = torch.arange(wanted.numel(), dtype=torch.float64).view_as(wanted).sin()
    gradients = torch.autograd.grad((wanted * weights).sum(), (q, k, v))
    bounds = SPANS[spans].bounds or range(0, TOKENS + 1, TOKENS // SPANS[spans].sequences)
    rows = row_keys(DropoutKey(1, 2, 3), torch.arange(TOKENS * HEADS).view(TOKENS, HEADS))
    dropper = Dropper(0.0, 1, Site.PROBABILITIES)
    length = TOKENS // SPANS[spans].sequences
    for found in (
        AttentionKernel(SCALE, window)(q, k, v, SPANS[spans]),
        dropped_attention(q, k, v, bounds, length, rows, dropper, SCALE, window),
    ):
        torch.testing.assert_close(found, wanted)
        again = torch.autograd.grad((found * weights).sum(), (q, k, v))
        torch.testing.assert_close(again, gradients)


class _Varlen:
    """In the place of PyTorch's kernel, which needs a GPU: the same arguments, one call per document."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, ...]] = []

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        offsets: torch.Tensor,
        others: torch.Tensor,
        longest: int,
        other: int,
        *,
        scale: float,
        window_size: tuple[int, int],
    ) -> torch.Tensor:
        assert offsets is others and offsets.dtype == torch.int32 and longest == other
        assert longest == offsets.diff().max() and window_size[1] == 0
        self.calls.append(window_size)
        window = window_size[0] + 1 if window_size[0] >= 0 else None
        spans = Spans(len(q), 1, offsets.tolist())
        return AttentionKernel(scale, window)(q, k, v, spans).view_as(q)


@pytest.mark.parametrize("spans", SPANS)
@pytest.mark.parametrize("window", [None, 4, 40])
def test_one_call_computes_all_documents(spans: str, window: int | None) -> None:
    """And windows; sequences without either are left to scaled_dot_product_attention."""
    q, k, v = _inputs()
    varlen = _Varlen()
    found = AttentionKernel(SCALE, window, varlen)(q, k, v, SPANS[spans])
    torch.testing.assert_close(found, _wanted(q, k, v, SPANS[spans], window or TOKENS))
    windowed = window is not None and window < SPANS[spans].longest
    needed = windowed or spans == "documents"
    assert varlen.calls == ([(window - 1 if window and windowed else -1, 0)] if needed else [])


def test_the_kernel_is_chosen_by_device_and_format(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: Any = HEADS, KV_HEADS, WIDTH, SCALE, None
    assert choose(CPU, torch.bfloat16, *sizes).varlen is None
    tried: list[Callable[..., Any] | None] = []

    def broken(*arguments: Any, **options: Any) -> torch.Tensor:
        raise RuntimeError("no kernel for this GPU")

    monkeypatch.setattr(attention_kernels, "_varlen_kernel", lambda grouped: tried.append(grouped) or broken)
    _on_a_gpu(monkeypatch)
    assert choose(GPU, torch.float32, *sizes).varlen is None and not tried
    assert choose(GPU, torch.bfloat16, *sizes).varlen is None and tried == [True]
    attention_kernels.varlen.cache_clear()


GPU = torch.device("cuda", 0)


def _on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if there were one of compute capability 9.0, whose tensors are the host's."""
    for name in ("ones", "tensor"):
        create = getattr(torch, name)
        replaced = partial(_on_the_host, create)
        monkeypatch.setattr(torch, name, replaced)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    attention_kernels.varlen.cache_clear()


def _on_the_host(create: Callable[..., torch.Tensor], *arguments: Any, **options: Any) -> torch.Tensor:
    return create(*arguments, **{**options, "device": CPU})


@pytest.mark.parametrize(
    ("broken", "used"),
    [
        ((), "FA4"),
        (("FA4",), "FA3"),
        ((("FA4", "package"),), "FA3"),
        (("FA4", "FA3"), None),
        (("FA4", "FA3", None), None),
    ],
)
def test_flash_attention_that_fails_is_given_up(
    monkeypatch: pytest.MonkeyPatch, broken: tuple[Any, ...], used: str | None
) -> None:
    """Its packages assert where they do not support a size or a GPU; PyTorch's kernels come back."""
    active: list[str | None] = [None]
    varlen = _Varlen()

    def kernel(*arguments: Any, **options: Any) -> torch.Tensor:
        assert active[-1] not in broken
        return varlen(*arguments, **options)

    monkeypatch.setattr(attention_kernels, "_varlen_kernel", lambda grouped: kernel)
    known = ["FA3", "FA4"]
    monkeypatch.setattr(torch.nn.attention, "list_flash_attention_impls", lambda: known)

    def activate(name: str) -> None:
        if (name, "package") in broken:
            raise OSError("a library is missing")
        active.append(name)

    monkeypatch.setattr(torch.nn.attention, "activate_flash_attention_impl", activate)
    monkeypatch.setattr(torch.nn.attention, "restore_flash_attention_impl", lambda: active.append(None))
    _on_a_gpu(monkeypatch)
    chosen = choose(GPU, torch.bfloat16, HEADS, KV_HEADS, WIDTH, SCALE, None)
    assert active[-1] == used and chosen.varlen == (None if None in broken else kernel)
    attention_kernels.varlen.cache_clear()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 5])
def test_no_kernel_of_plain_products_for_grouped_heads(dtype: torch.dtype, window: int | None) -> None:
    """On a GPU the kernel that computes float32, or under a mask, wants a key head per query head."""
    asked: list[tuple[bool, bool, bool]] = []
    attention = F.scaled_dot_product_attention

    def record(q: torch.Tensor, k: torch.Tensor, *rest: Any, **options: Any) -> torch.Tensor:
        plain = options["attn_mask"] is None and dtype == torch.bfloat16
        asked.append((plain, q.shape[1] == k.shape[1], options["enable_gqa"]))
        return attention(q, k, *rest, **options)

    q, k, v = (each.detach().to("meta", dtype) for each in _inputs())
    with mock.patch.object(attention_kernels.F, "scaled_dot_product_attention", record):
        assert AttentionKernel(SCALE, window)(q, k, v, SPANS["two"]).shape == (TOKENS, HEADS * WIDTH)
    assert asked and all(equal is not plain and grouped is plain for plain, equal, grouped in asked)


def test_positions_of_documents_do_not_wait_for_the_device() -> None:
    """On ``meta`` tensors an operator that needed a value would raise."""
    spans = Spans(TOKENS, 2, (0, 1, 9, 17, 30, 34))
    assert span_positions(spans, TOKENS, CPU).tolist() == [
        place for length in (1, 8, 8, 13, 4) for place in range(length)
    ]
    spans = Spans(TOKENS, 2, (0, 34), torch.empty(2, dtype=torch.int32, device="meta"))
    assert span_positions(spans, TOKENS, torch.device("meta")).shape == (TOKENS,)


def test_the_window_is_a_setting() -> None:
    assert ModelSettings(family="mistral").sliding_window is None
    assert ModelSettings(sliding_window=7).sliding_window == 7
