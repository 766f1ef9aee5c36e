"""Published rows: as jobs of the planner, and predictions beside what was measured.

Rows are quoted from their sources, shortened to what the planner reads.
"""

from typing import Any

import pytest

from hexad.planning.other_memory import fits, peak_bytes
from hexad.planning.published import Uncovered, published
from hexad.planning.published_notes import Notes
from hexad.planning.step_time import Predictor

GPT = {"vocab": 50257, "tied": True, "gated": False, "bias": True}
LLAMA = {"vocab": 128256, "tied": False, "gated": True, "kv_heads": 8}
A100, H100 = "A100-SXM-80GB", "H100-SXM-80GB (DGX-H100)"
ZERO_1 = "distributed optimizer (ZeRO-1)"


def gpt(layers: int, hidden: int, heads: int, seq: int, vocab: int = 50257) -> dict[str, Any]:
    """A GPT-3 model."""
    sizes = {"layers": layers, "hidden": hidden, "heads": heads, "ffn": 4 * hidden, "seq": seq}
    return {**GPT, **sizes, "vocab": vocab}


def row(
    source: str, model: dict[str, Any], gpu: str, gpus: int, layout: str, **others: Any
) -> dict[str, Any]:
    """A row; the layout is given as ``tp2 pp4``."""
    degrees = {
        word.rstrip("0123456789"): int(word.lstrip("abcdefghijklmnopqrstuvwxyz")) for word in layout.split()
    }
    return {"source": source, "model": model, "gpu": gpu, "n_gpus": gpus, **degrees, **others}


LLAMA_405B = {
    **LLAMA,
    "layers": 126,
    "hidden": 16384,
    "heads": 128,
    "kv_heads": 16,
    "ffn": 53248,
    "seq": 8192,
}
LLAMA_70B = {**LLAMA, "layers": 80, "hidden": 8192, "heads": 64, "ffn": 28672, "seq": 8192}
LLAMA_8B = {**LLAMA, "layers": 32, "hidden": 4096, "heads": 32, "ffn": 14336, "seq": 8192}
DGXC = "dgxc-benchmarking 25.03"
TIMES = [
    # Bang et al., vTrain (MICRO 2024), artifact: measured step times.
    row(
        "vTrain ground truth (multi-node)", gpt(30, 3072, 32, 2048), f"{A100} (4xHDR IB/node = 800Gb/s)", 64,
        "tp1 pp1 dp64", micro_batch=8, global_batch=512, recompute="full", precision="fp16",
        measured={"step_time_s": 3.5665},
    ),
    row(
        "vTrain ground truth (multi-node)", gpt(48, 8192, 64, 2048), f"{A100} (4xHDR IB/node = 800Gb/s)", 512,
        "tp8 pp8 dp8", micro_batch=4, global_batch=1536, recompute="full", precision="fp16",
        measured={"step_time_s": 14.967},
    ),
    # Korthikanti et al. (arXiv 2205.05198), table 5: 22B, full recompute.
    row(
        "Korthikanti22 Table 5", gpt(48, 6144, 64, 2048, 51200), A100, 8, "tp8 pp1 dp1", micro_batch=4,
        global_batch=4, recompute="full", precision="fp16", measured={"step_time_s": 1.42},
    ),
    # Qi et al., Zero Bubble (arXiv 2401.10241), table 4: 6.2B, ZB-1p and 1F1B.
    row(
        "Zero Bubble Table 4", gpt(30, 4096, 32, 1024), f"{A100} (4 nodes RoCE)", 8, "tp1 pp8 dp1",
        micro_batch=3, global_batch=72, recompute="none", precision="fp16", schedule="ZB-1p",
        note="first and last stage hold one layer fewer", measured={"samples_per_s_per_gpu": 3.88},
    ),
    row(
        "Zero Bubble Table 4", gpt(30, 4096, 32, 1024), f"{A100} (4 nodes RoCE)", 8, "tp1 pp8 dp1",
        micro_batch=3, global_batch=72, recompute="none", precision="fp16", schedule="1F1B",
        note="first and last stage hold one layer fewer", measured={"samples_per_s_per_gpu": 3.5},
    ),
    # NVIDIA, dgxc-benchmarking 25.03 (1b9bb6b3), READMEs of Llama 3.1 8B, 70B and 405B, Nemotron-4 340B.
    row(
        DGXC, LLAMA_8B, H100, 8, "tp1 cp2 pp1 dp4", zero_fsdp=ZERO_1, micro_batch=1, global_batch=128,
        recompute="none", precision="bf16", measured={"step_time_s": 12.78},
    ),
    row(
        DGXC, LLAMA_70B, H100, 64, "tp4 cp2 pp4 vp5 dp2", zero_fsdp=ZERO_1, sp=True, micro_batch=1,
        global_batch=128, recompute="none", precision="bf16", measured={"step_time_s": 14.61},
    ),
    row(
        DGXC, LLAMA_405B, H100, 576, "tp8 cp2 pp9 vp7 dp4", zero_fsdp=ZERO_1, sp=True, micro_batch=1,
        global_batch=252, recompute="none", precision="bf16", measured={"step_time_s": 17.5},
    ),
    # The same, MaxText: FSDP, projections before attention kept.
    row(
        DGXC, LLAMA_70B, H100, 128, "tp1 cp1 pp1 dp128", zero_fsdp="FSDP 128", micro_batch=2,
        global_batch=256, recompute="selective: remat policy save_qkv_proj", precision="bf16",
        note="maxtext/README_70b.md; MaxText (JAX), FSDP 128", measured={"step_time_s": 15.563},
    ),
    # torchtitan, benchmarks/llama3_h100_202412_torchtitan.md: FSDP, compiled.
    row(
        "torchtitan benchmarks", LLAMA_8B, "H100-SXM-96GB HBM2e 2.4TB/s, 500W", 8, "tp1 pp1 dp8",
        zero_fsdp="FSDP2 8", micro_batch=2, global_batch=16, recompute="selective (op)", precision="bf16",
        note="FSDP+compile", measured={"tokens_per_s_per_gpu": 6667},
    ),
]  # fmt: skip


@pytest.mark.parametrize("quoted", TIMES, ids=lambda quoted: f"{quoted['source']}, {quoted['n_gpus']} GPUs")
def test_step_times_within_an_eighth(quoted: dict[str, Any]) -> None:
    """Of systems whose constants stand for mechanisms."""
    case = published(quoted)
    assert Predictor(case.job, case.cluster, case.system).step.total == pytest.approx(case.seconds, rel=0.125)


SMALL = gpt(12, 512, 8, 1024)
TESTS = "Megatron-LM functional tests (golden values)"
LAST = {"memory_rank": "last"}
MEMORIES = [
    # NVIDIA/Megatron-LM d98e8a64, tests/functional_tests: golden values, allocated peak of the last rank.
    row(
        TESTS, SMALL, H100, 8, "tp1 pp1 dp8", zero_fsdp=ZERO_1, micro_batch=4, global_batch=32,
        note="attention unfused; dropout 0.1/0.1 (hidden/attention); deterministic",
        measured={**LAST, "peak_mem_gb": 4.7024},
    ),
    row(
        TESTS, SMALL, H100, 8, "tp1 pp1 dp8", zero_fsdp=ZERO_1, micro_batch=4, global_batch=32,
        note="attention auto; dropout 0.1/0.1 (hidden/attention); deterministic",
        measured={**LAST, "peak_mem_gb": 2.6918},
    ),
    row(
        TESTS, SMALL, A100, 8, "tp1 pp1 dp8", micro_batch=4, global_batch=32, recompute="full",
        note="attention auto; dropout 0.1/0.1 (hidden/attention); deterministic",
        measured={**LAST, "peak_mem_gb": 2.5362},
    ),
    row(
        TESTS, SMALL, H100, 8, "tp1 pp4 vp3 dp2", micro_batch=4, global_batch=40, schedule="interleaved",
        note="attention unfused; dropout 0.1/0.1 (hidden/attention); deterministic",
        measured={**LAST, "peak_mem_gb": 4.6226},
    ),
    row(
        TESTS, SMALL, H100, 8, "tp2 pp2 dp2", micro_batch=4, global_batch=32,
        note="attention auto; dropout 0.1/0.1 (hidden/attention); deterministic",
        measured={**LAST, "peak_mem_gb": 1.4282},
    ),
    # SimuMax 1.2, real rows of a B200 node: 12 layers of Llama 3 70B, Megatron-LM 0.14.
    row(
        "SimuMax B200 v1.2 (real rows)", {**LLAMA_70B, "layers": 12, "seq": 4096}, "B200-SXM one node", 8,
        "tp2 pp1 dp4", zero_fsdp=ZERO_1, micro_batch=1, global_batch=16, note="CE fusion",
        measured={"peak_mem_gib": 60.68},
    ),
]  # fmt: skip


@pytest.mark.parametrize("quoted", MEMORIES, ids=lambda quoted: str(quoted["measured"]))
def test_peaks_within_a_twentieth(quoted: dict[str, Any]) -> None:
    """Tensors of Megatron-LM's ranks."""
    case = published({"precision": "bf16", "recompute": "none", **quoted})
    assert peak_bytes(case) == pytest.approx(case.memory, rel=0.05)


def test_a_layout_out_of_memory_does_not_fit() -> None:
    """BLOOM's tuning logs, 181B on 384 GPUs: tensor 2 fits with pipeline 12, not with 6."""
    model = gpt(72, 14336, 112, 2048, 250680)
    common = {"zero_fsdp": "ZeRO-1", "global_batch": 2048, "recompute": "full", "precision": "fp16"}
    for layout, expected in (("tp2 pp12 dp16", True), ("tp2 pp6 dp32", False)):
        quoted = row("BLOOM 176B tuning logs", model, A100, 384, layout, micro_batch=2, **common)
        assert fits(published(quoted)) is expected


def predicted(quoted: dict[str, Any], **changes: Any) -> float:
    """Step time of a changed row."""
    case = published({**quoted, **changes})
    return Predictor(case.job, case.cluster, case.system).step.total


def test_notes_change_what_is_predicted() -> None:
    """Each of them by its mechanism."""
    dense = next(quoted for quoted in TIMES if quoted["model"] is LLAMA_70B)
    times = {note: predicted(dense, note=note) for note in ("", "tp_comm_overlap=false", "cuda_graph=1")}
    assert times["tp_comm_overlap=false"] > times[""]
    assert times["cuda_graph=1"] <= times[""]
    assert predicted(dense, precision="fp8") < times[""]
    assert predicted(dense, precision="fp8", note="fp8_attention=1") < predicted(dense, precision="fp8")
    small = row(TESTS, SMALL, H100, 8, "tp1 pp1 dp8", micro_batch=4, global_batch=32, precision="bf16")
    fused, unfused = (
        peak_bytes(published({**small, "note": f"attention {kind}"})) for kind in ("flash", "unfused")
    )
    # Scores, probabilities and masks: five bytes for each pair of twelve layers' eight heads.
    assert unfused - fused == pytest.approx(5 * 12 * 8 * 4 * 1024**2, rel=0.02)


@pytest.mark.parametrize(
    "text, name, value",
    [
        ("attention unfused; deterministic", "deterministic", True),
        ("test x_nondeterministic", "deterministic", False),
        ("dropout 0.1/0.0 (hidden/attention)", "attention_dropout", 0.0),
        ("no dropout", "dropout", 0.0),
        ("vanilla TP, compile", "tensor_overlap", False),
        ("async TP, compile", "tensor_overlap", True),
        ("tp_comm_overlap=1, cuda_graph=false", "graphs", False),
        ("FSDP eager", "compiled", False),
        ("optimizer states sharded over 1/2 of the replicas", "scope", 0.5),
        ("decoder last pipeline num layers 3", "last_layers", 3),
    ],
)
def test_notes_are_read(text: str, name: str, value: object) -> None:
    """By general patterns."""
    assert getattr(Notes.of({"note": text}), name) == value


def test_experts_are_divided_like_other_weights_unless_stated() -> None:
    """Megatron-LM's default of the experts' tensor degree."""
    moe = {"experts": 8, "topk": 2, "moe_ffn": 32768}
    model = {**LLAMA, "layers": 8, "hidden": 6144, "heads": 48, "ffn": 32768, "seq": 8192, "moe": moe}
    quoted = row(
        DGXC, model, H100, 64, "tp4 cp2 pp1 ep4 dp8", micro_batch=1, global_batch=128, precision="bf16"
    )
    assert published(quoted).job.layout.expert_tensor == 4
    assert published({**quoted, "etp": 1}).job.layout.expert_tensor == 1


def test_throughput_needs_its_convention() -> None:
    """An MFU without one is not a time; with all pairs of attention counted the same MFU is a slower step."""
    small = next(quoted for quoted in TIMES if quoted["model"] is LLAMA_8B)
    quoted = {**small, "measured": {"mfu": 40.0}}
    assert published(quoted).seconds is None
    whole = published({**quoted, "note": "no causal halving"}).seconds
    half = published({**quoted, "note": "causal attention halved"}).seconds
    assert whole is not None and half is not None
    # 8.03e9 - 0.53e9 parameters; 32 layers of 4,096 features attend to 8,192 tokens.
    pairs = 32 * 4096 * 8192
    assert half == pytest.approx(128 * 8192 / 8 * 6 * (7.505e9 + pairs) / (0.4 * 989e12), rel=0.01)
    assert whole / half == pytest.approx((7.505e9 + 2 * pairs) / (7.505e9 + pairs), rel=0.01)


def test_layers_of_the_ends() -> None:
    """Stated numbers of layers of the first and last stage; what is left must fill the others."""
    quoted = row(TESTS, SMALL, H100, 8, "tp1 pp4 dp2", micro_batch=4, global_batch=32, precision="bf16")
    note = "decoder first pipeline num layers 2; decoder last pipeline num layers 2"
    stages = published({**quoted, "note": note}).job.stages
    assert [len(stage.layers) for stage in stages.values()] == [2, 4, 4, 2]
    with pytest.raises(Uncovered, match="leave none"):
        published({**quoted, "note": note.replace("layers 2", "layers 6")})
