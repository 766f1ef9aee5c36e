"""Facts in a published row's note and keys about how it was computed, besides its layout. No torch."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

AttentionImplementation = Literal["fused", "unfused", "auto"]


@dataclass(frozen=True)
class Notes:
    """Settings of a published row that move its memory or time.

    Attributes:
        attention: whether its scores are in memory; ``auto``: the implementation's choice.
        dropout, attention_dropout: of the residual stream, and of scores; None where not stated.
        gradient: bytes of an element of the gradient buffers; None where not stated.
        accumulated: gradients are also accumulated in float32 buffers.
        local_layers: Megatron-LM's own layers, not Transformer Engine's.
        fused_loss: cross entropy keeps no float32 logits.
        fused_gradients: weight gradients are added to their sum by the product itself; None: not stated.
        optimizer: its name; None where not stated.
        offloaded: activations are moved to the host.
        scope: of the replicas over which the optimizer's state is sharded, the part in one group.
        compiled: whether pointwise functions are compiled; None where not stated.
        graphs: kernels are started by CUDA graphs.
        tensor_overlap: whether tensor-parallel collectives run beside products; None where not stated.
        deterministic: kernels whose results do not depend on their order.
        first_layers, last_layers: of the first and of the last pipeline stage; None where not stated.
        shorter_ends: the first and the last pipeline stage have a layer less than the others.
        one_by_one: experts are computed one after the other, not in one grouped product.
        gathered: tokens reach experts by an all-gather, not by an all-to-all.
        eight_attention: attention computes in 8 bits.
        deferred_embedding: gradients of the output matrix are computed at the end of the step.
    """

    attention: AttentionImplementation = "auto"
    dropout: float | None = None
    attention_dropout: float | None = None
    gradient: int | None = None
    accumulated: bool = False
    local_layers: bool = False
    fused_loss: bool = False
    fused_gradients: bool | None = None
    optimizer: str | None = None
    offloaded: bool = False
    scope: float = 1.0
    compiled: bool | None = None
    graphs: bool = False
    tensor_overlap: bool | None = None
    deterministic: bool = False
    first_layers: int | None = None
    last_layers: int | None = None
    shorter_ends: bool = False
    one_by_one: bool = False
    gathered: bool = False
    deferred_embedding: bool = False
    eight_attention: bool = False

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> Notes:
        """The notes of a row."""
        text = f"{row.get('note') or ''}; {row.get('kernel') or ''}".lower()
        dropout = re.search(r"dropout ([\d.]+)/([\d.]+)", text)
        none = 0.0 if "no dropout" in text else None
        gradient = re.search(r"\b(?:bf|fp)(\d+) gradients", text)
        scope = re.search(r"sharded over (\d+)/(\d+) of the replicas", text)
        return cls(
            attention=_attention(text),
            dropout=float(dropout[1]) if dropout else none,
            attention_dropout=float(dropout[2]) if dropout else none,
            gradient=int(gradient[1]) // 8 if gradient else None,
            accumulated="fp32 grad accum" in str(row.get("precision")).lower(),
            local_layers=_local_layers(row),
            fused_loss=bool(re.search(r"fused cross entropy|\bce fusion|cross.entropy.fusion", text)),
            fused_gradients=False if "no gradient-accumulation fusion" in text else None,
            optimizer=str(row["optimizer"]).lower() if row.get("optimizer") else None,
            offloaded=bool(re.search(r"activations offloaded|cpu_offload=(1|true)", text)),
            scope=int(scope[1]) / int(scope[2]) if scope else 1.0,
            compiled=_compiled(text),
            graphs=_graphs(row, text),
            tensor_overlap=_flag(text, r"tp_comm_overlap=(\w+)", r"\btp overlap|async tp", r"vanilla tp"),
            deterministic="deterministic" in text.replace("nondeterministic", ""),
            first_layers=_count(text, r"first pipeline num layers (\d+)"),
            last_layers=_count(text, r"last pipeline num layers (\d+)"),
            shorter_ends="first and last stage hold one layer fewer" in text,
            one_by_one="experts one by one" in text,
            gathered="dispatcher allgather" in text,
            eight_attention=bool(re.search(r"fp8_attention=(1|true)", text)),
            deferred_embedding="deferred embedding gradients" in text,
        )


def _attention(text: str) -> AttentionImplementation:
    if re.search(r"attention unfused|unfused attention", text):
        return "unfused"
    return "fused" if re.search(r"attention (flash|fused)|flash attention|flash-attn", text) else "auto"


def _compiled(text: str) -> bool | None:
    if re.search(r"\beager\b", text):
        return False
    return True if re.search(r"\+\s*compile|, compile|torch\.compile|\bcompiled\b", text) else None


def _flag(text: str, assigned: str, yes: str, no: str) -> bool | None:
    if match := re.search(assigned, text):
        return match[1] in ("1", "true", "yes")
    if re.search(yes, text):
        return True
    return False if re.search(no, text) else None


def _count(text: str, pattern: str) -> int | None:
    match = re.search(pattern, text)
    return int(match[1]) if match else None


def _local_layers(row: Mapping[str, Any]) -> bool:
    """Whether a test of Megatron-LM runs its own layers: the names of those with Transformer Engine say so,
    and 8-bit formats need it."""
    name = str((row.get("model") or {}).get("name"))
    if "mcore" not in name or "fp8" in str(row.get("precision")):
        return False
    return "uninstall_te" in name or not re.search(r"_te(_|$)", name)


def _graphs(row: Mapping[str, Any], text: str) -> bool:
    """Whether CUDA graphs start the kernels: as the note says; Megatron-Bridge's recipes for Blackwell GPUs
    capture them."""
    if match := re.search(r"cuda_graph=(\w+)", text):
        return match[1] in ("1", "true")
    bridge = "megatron-bridge" in str(row.get("source")).lower()
    return "cuda graphs" in text or (bridge and bool(re.search(r"\bg?b[23]00", str(row.get("gpu")).lower())))
