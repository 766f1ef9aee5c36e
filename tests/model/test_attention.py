"""Attention inside documents and sliding windows, by whatever kernel, against one softmax under a mask."""

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch.nn import functional as F

from hexad.config.model import ModelSettings
from hexad.model import attention_kernels
from hexad.model.attention_kernels import AttentionKernel, device_kernel
from hexad.model.dropout import DropoutKey, Dropper, Site, row_keys
from hexad.parallel.context.spans import Spans

from ..layers import dropped_attention

CPU = torch.device("cpu")
TOKENS, HEADS, KV_HEADS, WIDTH, SCALE = 34, 4, 2, 6, 0.3


def _inputs() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [
        torch.randn(TOKENS, heads, WIDTH, dtype=torch.float64, generator=generator).requires_grad_()
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    ]


def _wanted(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spans: Spans, window: int) -> torch.Tensor:
    place = spans.positions(CPU)
    span = (torch.arange(TOKENS) - place)[:, None]
    back = torch.arange(TOKENS)[:, None] - torch.arange(TOKENS)
    seen = (span == span.T) & (back >= 0) & (back < window)
    k, v = (heads.repeat_interleave(HEADS // KV_HEADS, dim=1) for heads in (k, v))
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
    rows = row_keys(DropoutKey(1, 2, 3), torch.arange(TOKENS * HEADS).view(TOKENS, HEADS))
    dropper = Dropper(0.0, 1, Site.PROBABILITIES)
    for output in (
        AttentionKernel(SCALE, window)(q, k, v, SPANS[spans]),
        dropped_attention(q, k, v, SPANS[spans], rows, dropper, SCALE, window),
    ):
        torch.testing.assert_close(output, wanted)
        again = torch.autograd.grad((output * weights).sum(), (q, k, v))
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
    output = AttentionKernel(SCALE, window, varlen)(q, k, v, SPANS[spans])
    torch.testing.assert_close(output, _wanted(q, k, v, SPANS[spans], window or TOKENS))
    windowed = window is not None and window < SPANS[spans].longest
    needed = windowed or spans == "documents"
    assert varlen.calls == ([(window - 1 if window and windowed else -1, 0)] if needed else [])


def test_the_kernel_is_chosen_by_device_and_format(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: Any = HEADS, KV_HEADS, WIDTH, SCALE, None
    assert device_kernel(CPU, torch.bfloat16, *sizes).varlen is None
    tried: list[Callable[..., Any] | None] = []

    def broken(*arguments: Any, **options: Any) -> torch.Tensor:
        raise RuntimeError("no kernel for this GPU")

    monkeypatch.setattr(attention_kernels, "_varlen_kernel", lambda grouped: tried.append(grouped) or broken)
    _on_a_gpu(monkeypatch)
    assert device_kernel(GPU, torch.float32, *sizes).varlen is None and not tried
    assert device_kernel(GPU, torch.bfloat16, *sizes).varlen is None and tried == [True]
    assert device_kernel(GPU, torch.bfloat16, *sizes).flash
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 0))
    assert not device_kernel(GPU, torch.float16, *sizes).flash


GPU = torch.device("cuda", 0)


def _on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if there were one of compute capability 9.0, whose tensors are the host's."""
    for name in ("zeros", "tensor"):
        monkeypatch.setattr(torch, name, partial(_on_the_host, getattr(torch, name)))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(attention_kernels, "_refused", set())
    monkeypatch.setattr(attention_kernels, "varlen", attention_kernels.varlen.__wrapped__)  # not cached


def _on_the_host(create: Callable[..., torch.Tensor], *arguments: Any, **options: Any) -> torch.Tensor:
    return create(*arguments, **{**options, "device": CPU})


class _Packages:
    """PyTorch's registry of FlashAttention packages, and kernels some of which fail.

    Args:
        broken: (package, or None for PyTorch's own; which of its calls) -> what happens there: an exception
            that is raised, or a factor of the values.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, broken: dict[tuple[str | None, str], Any]) -> None:
        self.active: str | None = None
        self.activated: list[str] = []
        self.broken = broken
        self._varlen, dense = _Varlen(), attention_kernels.AttentionKernel.dense
        module = torch.nn.attention
        monkeypatch.setattr(module, "list_flash_attention_impls", lambda: ["FA3", "FA4"])
        monkeypatch.setattr(module, "current_flash_attention_impl", lambda: self.active)
        monkeypatch.setattr(module, "activate_flash_attention_impl", self._activate)
        monkeypatch.setattr(module, "restore_flash_attention_impl", lambda: setattr(self, "active", None))
        monkeypatch.setattr(attention_kernels, "_varlen_kernel", lambda grouped: self.varlen)
        monkeypatch.setattr(
            attention_kernels.AttentionKernel,
            "dense",
            lambda *a, **o: self._meet("dense") * dense(*a, **o),
        )

    def varlen(self, *arguments: Any, **options: Any) -> torch.Tensor:
        with mock.patch.object(self, "broken", {}):  # computed by calls of dense
            out = self._varlen(*arguments, **options)
        return self._meet("varlen") * out

    def _activate(self, name: str) -> None:
        self._meet("import", name)
        self.active = name
        self.activated.append(name)

    def _meet(self, call: str, name: str | None = None) -> float:
        reply = self.broken.get((name or self.active, call), 1.0)
        if isinstance(reply, Exception):
            raise reply
        return float(reply)


MISSING = ModuleNotFoundError("no module", name="flash_attn.cute")


@pytest.mark.parametrize(
    ("broken", "window", "used", "warned"),
    [
        ({}, None, "FA4", []),
        ({}, 7, "FA4", []),
        ({("FA4", "import"): MISSING}, None, "FA3", []),
        ({("FA4", "import"): ImportError("undefined symbol")}, None, "FA3", ["FA4: undefined symbol"]),
        ({("FA4", "import"): OSError("a library")}, None, "FA3", ["FA4: a library"]),
        ({("FA4", "dense"): AssertionError()}, None, "FA3", ["FA4: AssertionError"]),
        ({("FA4", "dense"): 1.1}, None, "FA3", ["FA4: it computes other values"]),
        ({("FA4", "varlen"): AssertionError("local")}, None, "FA4", []),
        ({("FA4", "varlen"): AssertionError("local")}, 7, "FA3", ["FA4: local"]),
        ({("FA4", "varlen"): 1.1, ("FA3", "varlen"): 0.9}, 7, None, ["FA4: ", "FA3: "]),
    ],
)
def test_flash_attention_that_fails_is_given_up(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    broken: dict[tuple[str | None, str], Any],
    window: int | None,
    used: str | None,
    warned: list[str],
) -> None:
    """Its packages assert where they do not support a size or a GPU; PyTorch's kernels come back."""
    _on_a_gpu(monkeypatch)
    packages = _Packages(monkeypatch, broken)
    sizes = HEADS, KV_HEADS, WIDTH, SCALE, window
    kernel = device_kernel(GPU, torch.bfloat16, *sizes)
    assert packages.active == used
    assert (kernel.varlen is None) == ((used, "varlen") in broken)
    said = [record.getMessage().replace(" is installed but not used", "") for record in caplog.records]
    said = [line.removeprefix("attention: ") for line in said if line.startswith("attention: FA")]
    assert len(said) == len(warned) and all(map(str.startswith, said, warned))
    # Another model in the same process: nothing is activated twice, and nothing refused is tried again.
    device_kernel(GPU, torch.bfloat16, *sizes)
    assert packages.active == used and len(packages.activated) == len(set(packages.activated))


@pytest.mark.parametrize("broken", [RuntimeError("no kernel"), 1.1])
def test_torch_s_own_kernel_for_documents_is_tried(monkeypatch: pytest.MonkeyPatch, broken: Any) -> None:
    _on_a_gpu(monkeypatch)
    packages: dict[tuple[str | None, str], Any] = {(name, "import"): MISSING for name in ("FA3", "FA4")}
    _Packages(monkeypatch, packages | {(None, "varlen"): broken})
    assert device_kernel(GPU, torch.bfloat16, HEADS, KV_HEADS, WIDTH, SCALE, None).varlen is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("flash", [True, False])
def test_no_kernel_of_plain_products_for_grouped_heads(
    dtype: torch.dtype, window: int | None, flash: bool
) -> None:
    """On a GPU the kernel that computes float32, under a mask, or before flash kernels, wants a key head per
    query head."""
    asked: list[tuple[bool, bool, bool]] = []
    attention = F.scaled_dot_product_attention

    def record(q: torch.Tensor, k: torch.Tensor, *rest: Any, **options: Any) -> torch.Tensor:
        plain = options["attn_mask"] is None and dtype == torch.bfloat16 and flash
        asked.append((plain, q.shape[1] == k.shape[1], options["enable_gqa"]))
        return attention(q, k, *rest, **options)

    q, k, v = (operand.detach().to("meta", dtype) for operand in _inputs())
    with mock.patch.object(attention_kernels.F, "scaled_dot_product_attention", record):
        kernel = AttentionKernel(SCALE, window, flash=flash)
        assert kernel(q, k, v, SPANS["two"]).shape == (TOKENS, HEADS * WIDTH)
    assert asked and all(equal is not plain and grouped is plain for plain, equal, grouped in asked)


def test_positions_of_documents_do_not_wait_for_the_device() -> None:
    """On ``meta`` tensors an operator that needed a value would raise."""
    spans = Spans(TOKENS, 2, (0, 1, 9, 17, 30, 34))
    assert spans.positions(CPU).tolist() == [place for length in (1, 8, 8, 13, 4) for place in range(length)]
    spans = Spans(TOKENS, 2, (0, 34))
    assert spans.positions(torch.device("meta")).shape == (TOKENS,)


def test_the_window_is_a_setting() -> None:
    assert ModelSettings(family="mistral").sliding_window is None
    assert ModelSettings(sliding_window=7).sliding_window == 7
