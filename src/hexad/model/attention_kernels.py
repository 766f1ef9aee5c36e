"""The attention kernels of one device, and attention of one rank by them.

- *varlen*: one kernel for all documents of a microbatch, and for sliding windows: FlashAttention (Dao, arXiv
  2307.08691) through ``torch.nn.attention.varlen``; GPUs, 16-bit formats.
- *sdpa*: PyTorch's ``scaled_dot_product_attention``, which chooses among flash, cuDNN, memory-efficient and
  plain kernels; one call per document, and for sliding windows blocks of queries.

What computes a layer's attention is decided by :mod:`hexad.parallel.attention_choice`. FlashAttention 3 or 4
takes the place of PyTorch's own flash kernels where its package is installed and computes what the model
needs.
"""

import inspect
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from hexad.parallel.attention_choice import AttentionFacts, AttentionMethod, choose_attention
from hexad.parallel.context.spans import Spans

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class AttentionKernel:
    """A layer's attention by the kernels of a device, inside spans (sequences or documents) of flattened
    tokens.

    Attributes:
        scale: what scores are multiplied by.
        window: a query sees its own token's key and those of the ``window - 1`` tokens before; None: all.
        varlen: the kernel for spans of any lengths, see :func:`varlen`; None where there is none.
        flash: a GPU has flash kernels (compute capability 8.0).
    """

    scale: float
    window: int | None = None
    varlen: Callable[..., Tensor] | None = None
    flash: bool = True

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, spans: Spans) -> Tensor:
        """``[tokens, heads * width]``.

        Args:
            q: ``[tokens, heads, width]``.
            k, v: ``[tokens, key/value heads, width]``.
            spans: of the tokens.
        """
        return self.attend(choose_attention(self.facts(q, spans)), q, k, v, spans)

    def attend(self, method: AttentionMethod, q: Tensor, k: Tensor, v: Tensor, spans: Spans) -> Tensor:
        """Attention by the method ``VARLEN`` or ``SDPA``."""
        if method is AttentionMethod.VARLEN:
            return self._by_varlen(q, k, v, spans)
        if spans.bounds is None:
            return self._equal_spans(q, k, v, spans.sequences)
        # One call per document: no mask to build, and no arithmetic between documents.
        lengths = [end - begin for begin, end in pairwise(spans.bounds)]
        parts = zip(q.split(lengths), k.split(lengths), v.split(lengths))
        return torch.cat([self._equal_spans(*part, 1) for part in parts])

    def facts(
        self, q: Tensor, spans: Spans, exact: bool = False, ring: int = 1, dropped: bool = False
    ) -> AttentionFacts:
        """The facts of the choice for queries ``[tokens, heads, width]``.

        Args:
            q: of this rank.
            spans: of the tokens.
            exact, ring, dropped: see :class:`~hexad.parallel.attention_choice.AttentionFacts`.
        """
        windowed = self.window is not None and self.window < spans.longest
        cpu, documents = q.device.type == "cpu", spans.bounds is not None
        varlen = self.varlen is not None
        return AttentionFacts(
            cpu, q.dtype.itemsize, q.shape[-1], varlen, exact, ring, dropped, documents, windowed
        )

    def cached_facts(
        self, q: Tensor, cpu: bool, cache: Literal["keys", "latents"], longest: int, single: bool
    ) -> AttentionFacts:
        """The facts of the choice where keys of earlier tokens are cached.

        Args:
            q: ``[tokens, heads, width]``.
            cpu: the cache is arranged for a CPU's kernels.
            cache: what is kept.
            longest: tokens of the longest sequence, the new ones included.
            single: every sequence has one new token.
        """
        windowed = self.window is not None and self.window < longest
        facts = AttentionFacts(cpu, q.dtype.itemsize, q.shape[-1], self.varlen is not None)
        return facts._replace(windowed=windowed, cache=cache, single=single)

    def _by_varlen(self, q: Tensor, k: Tensor, v: Tensor, spans: Spans) -> Tensor:
        assert self.varlen is not None
        window = (self.window - 1 if self.window is not None and self.window < spans.longest else -1, 0)
        offsets, longest = spans.offsets(q.device), spans.longest
        out = self.varlen(q, k, v, offsets, offsets, longest, longest, scale=self.scale, window_size=window)
        return out.flatten(1)

    def _equal_spans(self, q: Tensor, k: Tensor, v: Tensor, spans: int) -> Tensor:
        """``[tokens, heads, width]`` of all three -> ``[tokens, heads * width]``."""
        tokens = q.shape[0]
        q, k, v = (x.view(spans, -1, *x.shape[1:]).transpose(1, 2) for x in (q, k, v))
        if self.window is None or self.window >= q.shape[2]:
            out = self.dense(q, k, v, causal=True)
        else:
            out = self._banded(q, k, v, self.window)
        return out.transpose(1, 2).reshape(tokens, -1)

    def dense(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, mask: Tensor | None = None) -> Tensor:
        """Attention of ``[spans, heads, tokens, width]``, all of one length."""
        group = q.shape[1] // k.shape[1]
        flash = mask is None and q.dtype.itemsize == 2 and self.flash
        if group > 1 and q.device.type != "cpu" and not flash:
            # The memory-efficient kernel takes these, but up to PyTorch 2.13 it knows no groups: PyTorch
            # would use plain products, which keep a score of every pair of tokens.
            k, v = (tensor.repeat_interleave(group, dim=1) for tensor in (k, v))
            group = 1
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=causal, scale=self.scale, enable_gqa=group > 1
        )

    def _banded(self, q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
        """Windowed attention of ``[spans, heads, tokens, width]``: a block of queries sees its own keys and
        the one before, under one mask for all blocks."""
        spans, _, tokens, _ = q.shape
        blocks = tokens // window
        whole = blocks * window
        column = torch.arange(2 * window, device=q.device)
        row = column[:window, None]
        seen = (column > row) & (column <= row + window)
        parts = [self.dense(q[:, :, :window], k[:, :, :window], v[:, :, :window], causal=True)]
        if blocks > 1:
            middle = _blocks(q[:, :, window:whole], window, window)
            keys, values = (_blocks(tensor[:, :, :whole], 2 * window, window) for tensor in (k, v))
            out = self.dense(middle, keys, values, causal=False, mask=seen)
            parts.append(out.unflatten(0, (spans, -1)).transpose(1, 2).flatten(2, 3))
        if tokens > whole:
            begin, rest = whole - window, tokens - whole
            mask = seen[:rest, : window + rest]
            parts.append(
                self.dense(q[:, :, whole:], k[:, :, begin:], v[:, :, begin:], causal=False, mask=mask)
            )
        return torch.cat(parts, dim=2)


def _blocks(x: Tensor, size: int, step: int) -> Tensor:
    """Blocks of tokens, one every ``step``: ``[spans * blocks, heads, size, width]``."""
    return x.unfold(2, size, step).permute(0, 2, 1, 4, 3).flatten(0, 1)


def device_kernel(
    device: torch.device,
    dtype: torch.dtype,
    heads: int,
    kv_heads: int,
    width: int,
    scale: float,
    window: int | None,
) -> AttentionKernel:
    """The kernels for a layer with this rank's ``heads`` and ``kv_heads`` of ``width`` features."""
    flash = device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 0)
    kernel = varlen(device, dtype, heads, kv_heads, width, window is not None)
    return AttentionKernel(scale, window, kernel, flash)


@cache
def varlen(
    device: torch.device, dtype: torch.dtype, heads: int, kv_heads: int, width: int, windowed: bool
) -> Callable[..., Tensor] | None:
    """PyTorch's kernel for spans of any lengths; None where it cannot compute forward and backward here.

    FlashAttention 4 or 3 takes the place of PyTorch's flash kernels before, if it computes spans of equal
    lengths, and others too where windows need them.
    """
    if device.type not in ("cuda", "meta") or dtype.itemsize != 2:
        return None
    kernel = _varlen_kernel(heads != kv_heads)
    if device.type == "meta":  # a GPU's, whose kernels cannot be tried
        return kernel
    refusal = partial(_refusal, device, dtype, heads, kv_heads, width)
    _use_newest_flash(torch.cuda.get_device_capability(device), refusal, kernel if windowed else None)
    why = "this version of PyTorch has no kernel" if kernel is None else refusal(kernel)
    if why is not None:
        log.info("attention: documents and windows by separate calls: %s", why)
        return None
    return kernel


def _refusal(
    device: torch.device,
    dtype: torch.dtype,
    heads: int,
    kv_heads: int,
    width: int,
    kernel: Callable[..., Tensor] | None,
) -> str | None:
    """Why attention fails here: by ``kernel``, or if that is None, of spans of equal lengths; None if it
    computes what it should, forward and backward."""
    # Whether it can depends on GPU, build, version and sizes: the kernels themselves know.
    q = torch.zeros((4, heads, width), dtype=dtype, device=device).requires_grad_()  # all keys weigh the same
    k = torch.zeros((4, kv_heads, width), dtype=dtype, device=device).requires_grad_()
    places = torch.tensor([0.0, 1.0, 2.0, 3.0], dtype=dtype, device=device)
    v = (k.detach() + places[:, None, None]).requires_grad_()
    try:
        if kernel is None:
            means, expected = AttentionKernel(1.0)(q, k, v, Spans(4, 1)), _MEANS
        else:
            offsets = torch.tensor([0, 1, 4], dtype=torch.int32, device=device)
            means = kernel(q, k, v, offsets, offsets, 3, 3, scale=1.0, window_size=(1, 0)).flatten(1)
            expected = _WINDOW_MEANS
        means.float().sum().backward()
    except Exception as error:  # of any kind: FlashAttention's packages assert, or fail as they generate code
        return _brief(error)
    gradient = torch.zeros(4) if v.grad is None else v.grad[:, 0, 0].float().cpu() * kv_heads / heads
    pairs = zip((means[:, -1].detach().float().cpu(), gradient), expected)
    right = all(torch.allclose(values, torch.tensor(numbers), atol=0.02) for values, numbers in pairs)
    return None if right else "it computes other values"


_MEANS = (0.0, 0.5, 1.0, 1.5), (25 / 12, 13 / 12, 7 / 12, 1 / 4)
"""Means of the places that each of four tokens sees in :func:`_refusal`, and their gradients."""
_WINDOW_MEANS = (0.0, 1.0, 1.5, 2.5), (1.0, 1.5, 1.0, 0.5)
"""Means and gradients for spans of one and three tokens, each of which sees one before it."""


def _brief(error: Exception) -> str:
    """The first line of its message, if it has one."""
    return next(iter(str(error).splitlines()), type(error).__name__)


def _varlen_kernel(grouped: bool) -> Callable[..., Tensor] | None:
    """``varlen_attn`` with the arguments that this version of PyTorch has."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    known = inspect.signature(varlen_attn).parameters
    if "window_size" not in known or "scale" not in known:
        return None
    kernel: Any = varlen_attn
    return partial(kernel, enable_gqa=grouped) if "enable_gqa" in known else kernel


_refused: set[str] = set()
"""FlashAttention packages that failed: as kernels are those of the process, they are not tried again."""


def _use_newest_flash(
    capability: tuple[int, int],
    refusal: Callable[[Callable[..., Tensor] | None], str | None],
    kernel: Callable[..., Tensor] | None,
) -> None:
    """Put FlashAttention 4 or 3 in the place of PyTorch's flash kernels, where its package is installed, made
    for the GPU (3 for Hopper, 4 for Hopper and Blackwell) and computes what is needed: :func:`_refusal` says
    so of spans of equal lengths, and of ``kernel`` where that is given.
    """
    try:
        from torch.nn.attention import (
            activate_flash_attention_impl,
            current_flash_attention_impl,
            list_flash_attention_impls,
            restore_flash_attention_impl,
        )
    except ImportError:
        return
    for name, capabilities in (("FA4", (9, 10)), ("FA3", (9,))):
        known = name in list_flash_attention_impls() and capability[0] in capabilities
        if not known or name in _refused:
            continue
        try:
            if current_flash_attention_impl() != name:
                activate_flash_attention_impl(name)
        except ModuleNotFoundError as error:
            if (error.name or "").startswith("flash_attn"):
                continue  # not installed
            why: str | None = _brief(error)
        except Exception as error:
            why = _brief(error)
        else:
            why = refusal(None) or (refusal(kernel) if kernel is not None else None)
            if why is None:
                log.info("attention: flash kernels of %s", name)
                return
            restore_flash_attention_impl()
        _refused.add(name)
        log.warning("attention: %s is installed but not used: %s", name, why)
