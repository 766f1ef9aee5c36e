"""Times of kernels: order, bounds, what is published, grouped products, attention's pairs, formats."""

from itertools import pairwise
from math import prod
from pathlib import Path
from statistics import median

import numpy as np
import pytest

from hexad.config import HexadError
from hexad.planning.kernels import Kernels, _pairs
from hexad.topology.hardware import hardware_names, load_hardware

SIZES = (1, 7, 64, 100, 129, 256, 1000, 1024, 1025, 4096, 8192, 8200, 30000, 131072)


def kernels(kind: str) -> Kernels:
    return Kernels(load_hardware(kind))


def formats(kind: str) -> list[str]:
    hardware = load_hardware(kind)
    names = ("fp32", "bf16", "fp8", "fp8_block", "nvfp4")
    return [name for name in names if hardware.peak(name) is not None]


@pytest.mark.parametrize("kind", hardware_names())
def test_products_grow_with_every_size_and_stay_below_the_peak(kind: str) -> None:
    device = kernels(kind)
    random = np.random.default_rng(0)
    for dtype in formats(kind):
        peak = device.hardware.peak(dtype)
        assert peak is not None
        for _ in range(4):
            shape = [int(random.choice(SIZES)) for _ in range(3)]
            for place in range(3):
                shapes = [[*shape[:place], size, *shape[place + 1 :]] for size in SIZES]
                for groups, divided in ((1, "m"), (8, "m"), (8, "k")):
                    times = [
                        device.product(*sizes, dtype, groups=groups, divided=divided) for sizes in shapes
                    ]
                    assert all(before <= after for before, after in pairwise(times)), (dtype, shape, place)
                    assert all(2 * prod(sizes) / time <= peak * 1.0001 for sizes, time in zip(shapes, times))
                    assert times[0] > 0


@pytest.mark.parametrize("kind", hardware_names())
def test_attention_grows_with_every_size_and_stays_below_the_peak(kind: str) -> None:
    device = kernels(kind)
    peak = device.hardware.peak("bf16")
    assert peak is not None
    sizes = [1, 100, 128, 512, 1000, 4096, 8192, 32768, 131072]
    for action, factor in (("forward", 1.0), ("backward", 2.5)):
        for width in (32, 64, 96, 128, 192, 256, 512):
            times = [device.attention(action, 32, length, width, "bf16") for length in sizes]
            assert times == sorted(times) and times[0] > 0
            for length, time in zip(sizes, times):
                assert factor * 4 * 32 * width * length**2 / 2 / time <= peak * 1.0001
        widths = [device.attention(action, 32, 4096, width, "bf16") for width in range(16, 520, 8)]
        assert widths == sorted(widths)
        for_heads = [
            device.attention(action, heads, 4096, 128, "bf16") for heads in (1, 2, 8, 16, 40, 64, 512)
        ]
        assert for_heads == sorted(for_heads)
        for_keys = [device.attention(action, 32, 4096, 128, "bf16", keys=keys) for keys in sizes]
        assert for_keys == sorted(for_keys)


@pytest.mark.parametrize("causal", [True, False])
def test_pairs_are_those_of_a_mask(causal: bool) -> None:
    for length, keys, window in (
        (1, 1, None),
        (40, 40, None),
        (40, 40, 7),
        (24, 64, None),
        (24, 64, 16),
        (24, 64, 50),
    ):
        query, key = np.arange(length)[:, None] + keys - length, np.arange(keys)[None, :]
        mask = (key <= query) if causal else np.ones((length, keys), bool)
        if window is not None and causal:
            mask &= key > query - window
        counted = _pairs(length, keys, causal, window if causal else None)
        assert counted == pytest.approx(mask.sum(), abs=0.5 * length)  # the diagonal counts half


PRODUCTS = """
a100 160 51200 65536 162|256 2048 51200 218|256 8192 6144 201|256 65536 1536 236|256 65536 6144 264
a100 384 7168 16384 230|384 16384 2560 240|384 65536 512 186|768 8192 2560 238|1024 51200 256 164
a100 1280 2560 51200 244|2048 16384 65536 255|2560 6144 4096 242|3072 4096 16384 239|4096 2048 3072 219
a100 4096 6144 1024 219|8192 4096 65536 259|8192 51200 768 215|16384 2560 16384 254|32768 1024 2048 248
h100 160 65536 51200 443|192 6144 16384 422|256 2560 65536 590|256 4096 16384 538|512 65536 2048 722
h100 768 768 51200 686|1024 65536 8192 728|1025 1024 51200 716|2048 1536 51200 794|3072 1024 16384 768
h100 4096 768 16384 785|4096 1024 51200 831|8192 51200 8192 726|8192 65536 3072 714|16384 256 2560 546
h100 16384 1024 2048 741|16384 2048 512 592|16384 2048 6144 812|16384 16384 10240 702
h100 16384 51200 512 638
h200 256 4096 10240 548|256 5120 65536 682|512 4096 16384 748|512 7168 16384 740|512 51200 4096 720
h200 768 4096 16384 774|1024 1024 65536 761|1024 2560 65536 765|2048 6144 10240 781|2560 8192 51200 720
h200 8192 51200 64 197|8192 51200 65536 679|16384 256 4096 680|16384 512 2048 707|16384 1024 2560 747
h200 16384 2560 1024 658|16384 16384 4096 708|32768 64 10240 264|32768 4096 4096 706
h200 32768 16384 8192 686
b200 256 65536 6144 1184|1024 1024 16384 1010|1024 8192 51200 1539|1280 4096 6144 1404
b200 1280 6144 8192 1350|2048 2048 8192 1398|2048 2048 16384 1479|2048 6144 8192 1489
b200 2560 2560 2560 1385|4096 768 65536 1401|4096 6144 1024 1405|4096 10240 51200 1431
b200 4097 65536 16384 1372|8192 64 65536 402|8192 4096 6144 1516|8192 6144 6144 1551|16384 256 5120 1155
b200 16384 1024 2560 1411|32768 2048 256 949|32768 4096 6144 1489
gb200 160 51200 65536 934|256 16384 65536 1375|256 51200 51200 1253|512 51200 8192 1609
gb200 768 8192 6144 1494|768 51200 16384 1614|2048 512 10240 1002|2048 6144 8192 1557
gb200 2048 65536 10240 1423|2049 128 65536 705|3072 65536 51200 1435|4096 256 65536 1218
gb200 4096 4096 51200 1689|4097 51200 256 1046|8192 2560 512 1163|8192 51200 65536 1434
gb200 16384 256 16384 1176|16384 6144 4096 1634|32768 1024 4096 1574|32768 51200 2560 1461
gb300 256 6144 16384 1133|256 8192 16384 1222|256 16384 4096 1178|512 4096 6144 1462
gb300 1536 1024 16384 1420|2048 6144 2048 1732|2048 65536 6144 2024|2560 512 8192 1244
gb300 4096 7168 16384 2026|4096 51200 2560 2012|8192 256 16384 1224|16384 512 65536 1804
gb300 16384 1024 1024 1629|16384 2560 6144 1889|16384 65536 7168 1755|32768 512 6144 1603
gb300 32768 4096 2560 2011|32768 4096 6144 1961|32768 5120 16384 1826|32768 51200 2560 1921
"""
"""Kind, then m, n, k and TFLOP/s of bf16 products: ai-dynamo/aiconfigurator's tables."""
ATTENTION = """
a100 2 6144 64 64 7.223|4 2048 8 1 0.2607|4 4096 40 2 3.738|8 8192 24 24 18.51|8 12288 16 1 26.07
a100 16 6144 8 2 6.892
h100 1 3072 4 2 0.04929|2 3072 12 1 0.1212|4 6144 40 1 2.843|4 8192 2 2 0.2724|8 3072 64 8 2.625
h100 32 4096 12 2 3.076
h200 1 8192 2 2 0.1183|1 16384 2 2 0.2491|2 8192 1 1 0.1209|4 2048 8 1 0.08166|8 6144 8 4 1.242
h200 16 6144 4 1 1.052
b200 1 10240 32 1 0.8142|1 16384 96 8 5.569|2 12288 16 1 1.108|4 12288 1 1 0.2232|4 12288 8 8 1.167
b200 8 6144 96 8 6.907
gb200 1 12288 12 12 0.4552|2 2048 4 4 0.03934|2 10240 64 1 2.789|4 6144 12 2 0.4323|4 12288 8 2 0.9965
gb200 8 4096 48 48 1.587
gb300 2 8192 48 2 1.066|4 3072 24 8 0.2207|4 6144 96 8 2.471|4 8192 96 96 5.11|8 3072 48 4 0.7152
gb300 16 6144 2 1 0.284
"""
"""Kind, then sequences, length, heads, KV heads and ms of causal bf16 attention, width 128: the same."""


def rows_of(text: str) -> dict[str, list[list[float]]]:
    measured: dict[str, list[list[float]]] = {}
    for line in text.strip().splitlines():
        kind, rows = line.split(" ", 1)
        measured.setdefault(kind, []).extend([float(word) for word in row.split()] for row in rows.split("|"))
    return measured


@pytest.mark.parametrize("kind", rows_of(PRODUCTS))
def test_published_products(kind: str) -> None:
    device = kernels(kind)
    errors = [
        device.product(int(m), int(n), int(k), "bf16") * tflops * 1e12 / (2 * m * n * k) - 1
        for m, n, k, tflops in rows_of(PRODUCTS)[kind]
    ]
    # The published values are single runs: one may be off. A constant rate at these shapes errs by more.
    assert median(map(abs, errors)) < 0.08 and abs(median(errors)) < 0.06
    assert sorted(map(abs, errors))[-3] < 0.25


@pytest.mark.parametrize("kind", rows_of(ATTENTION))
def test_published_attention(kind: str) -> None:
    device = kernels(kind)
    errors = [
        device.attention(
            "forward", int(batch * heads), int(length), 128, "bf16", kv_heads=int(batch * kv_heads)
        )
        * 1e3
        / ms
        - 1
        for batch, length, heads, kv_heads, ms in rows_of(ATTENTION)[kind]
    ]
    assert median(map(abs, errors)) < 0.15


def test_own_measurements_on_an_h100() -> None:
    device = kernels("h100")

    def rate(operations: float, seconds: float) -> float:
        return operations / seconds / 1e12

    # A layer of an 8B model with 16,384 tokens: benchmarks/results/gpu/rates.json, TFLOP/s.
    for o, i, forward, gradient, weight in (
        (6144, 4096, 797, 784, 798),
        (4096, 4096, 669, 669, 736),
        (28672, 4096, 754, 723, 721),
    ):
        t = 16384
        operations = 2.0 * t * o * i
        assert rate(operations, device.product(t, o, i, "bf16")) == pytest.approx(forward, rel=0.2)
        assert rate(operations, device.product(t, i, o, "bf16")) == pytest.approx(gradient, rel=0.2)
        weights = device.product(o, i, t, "bf16", result_bytes=8)
        assert rate(operations, weights) == pytest.approx(weight, rel=0.2)
    # 16,384 tokens in one sequence of 16,384, 32 heads of 128: forward and backward 14.3 ms.
    both = sum(device.attention(action, 32, 16384, 128, "bf16") for action in ("forward", "backward"))
    assert both == pytest.approx(14.3e-3, rel=0.12)


def test_grouped_products_on_an_h100() -> None:
    device = kernels("h100")
    # benchmarks/results/gpu/rates.json, balanced: experts, hidden, width, rows; TFLOP/s forward, and of the
    # weight gradient in bf16.
    for experts, hidden, width, rows, forward, weight in (
        (8, 4096, 14336, 16384, 779, 673),
        (64, 2048, 1408, 49152, 532, 454),
        (128, 2048, 768, 65536, 569, 453),
        (256, 7168, 2048, 65536, 591, 361),
    ):
        operations = 2.0 * rows * hidden * width
        seconds = device.product(rows, width, hidden, "bf16", groups=experts)
        assert operations / seconds / 1e12 == pytest.approx(forward, rel=0.4)
        seconds = device.product(width, hidden, rows, "bf16", groups=experts, divided="k")
        assert operations / seconds / 1e12 == pytest.approx(weight, rel=0.5)


def test_groups_cost_what_as_many_products_compute_and_one_start() -> None:
    device = kernels("h100")
    whole = device.product(65536, 4096, 4096, "bf16")
    assert device.product(65536, 4096, 4096, "bf16", groups=8) >= whole
    one = device.product(64, 4096, 4096, "bf16")
    together = device.product(64 * 64, 4096, 4096, "bf16", groups=64)
    assert together < 64 * one
    # 64 matrices are read, however few rows each multiplies.
    assert together > 64 * 2 * 4096**2 / 3.35e12


def test_a_step_is_slower_and_collectives_take_multiprocessors() -> None:
    hardware = load_hardware("h100")
    alone = Kernels(hardware)
    shape = (8192, 8192, 8192, "bf16")
    assert Kernels(hardware, in_step=True).product(*shape) == pytest.approx(1.03 * alone.product(*shape))
    beside = alone.beside_collective()
    assert 1.05 < beside.product(*shape) / alone.product(*shape) < 1.4
    assert beside.passes(1e9, 3) == alone.passes(1e9, 3) == pytest.approx(9e-6 + 1e9 / (0.9 * 3.35e12))


CPU = """\
names: [a laptop]
source: measured here
vendor: cpu
multiprocessors: 1
tiles: [[8, 16]]
peaks_tflops: {fp32: 0.2, fp64: 0.1}
memory_gb_per_s: 20
domain: 1
link_gb_per_s: 2
network_gb_per_s: 2
constants:
  source: calibrated
  products: {fp32: {tflops: 0.15, start_us: 5, bandwidth: 0.8}}
  attention: {fp32: {tpairs: {64: 0.0003}, start_us: 50, bandwidth: 0.8}}
  memory: {bandwidth: 0.5, launch_us: 5}
"""


def test_a_calibrated_cpu(tmp_path: Path) -> None:
    path = tmp_path / "laptop.yaml"
    path.write_text(CPU)
    device = Kernels(load_hardware(path))
    assert device.product(512, 512, 512, "fp32") == pytest.approx(5e-6 + 2 * 512**3 / 0.15e12)
    # What has no constants has the rate of fp32 by the ratio of the peaks.
    assert device.product(512, 512, 512, "fp64") == pytest.approx(5e-6 + 2 * 512**3 / 0.075e12)
    assert device.passes(1e8, 2) == pytest.approx(2 * 5e-6 + 0.01)
    assert device.attention("forward", 8, 512, 64, "fp32", causal=False) == pytest.approx(
        50e-6 + 8 * 512**2 / 0.0003e12
    )
    with pytest.raises(
        HexadError, match="a laptop: found format bf16, of which no peak is known; known: fp32, fp64"
    ):
        device.product(1, 1, 1, "bf16")


def test_nothing_takes_no_time() -> None:
    device = kernels("a100")
    assert device.product(0, 128, 128, "bf16") == 0 == device.attention("forward", 0, 128, 128, "bf16")
    with pytest.raises(HexadError, match="A100: found format fp8, of which no peak is known"):
        device.product(1, 1, 1, "fp8")


def test_part_of_a_head_takes_its_part() -> None:
    """Of 4 heads, 8 context ranks have the pairs of half a head each."""
    device = kernels("h100")
    for action in ("forward", "backward"):
        half, one, two = (device.attention(action, heads, 131072, 128, "bf16") for heads in (0.5, 1, 2))
        assert half > 0 and one - half == pytest.approx((two - one) / 2)
