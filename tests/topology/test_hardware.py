"""Hardware files: what they say, what is derived, and errors in users' own."""

from pathlib import Path

import pytest

from hexad.config import HexadError
from hexad.topology.devices import known_gpu, named_gpu, named_gpus
from hexad.topology.hardware import (
    hardware_named,
    hardware_names,
    load_hardware,
    read_hardware,
    write_hardware,
)

TITAN = """\
names: [Titan, Titan XL]
source: measured at home
vendor: nvidia
capability: [9, 0]
multiprocessors: 66
peaks_tflops: {fp32: 33.5, bf16: 494.5}
memory_gib: {48: 47.0}
memory_gb_per_s: 1675
link_gb_per_s: 225
network_gb_per_s: 25
constants: {source: derived, of: h100}
"""
"""Half an H100."""


@pytest.mark.parametrize("kind", hardware_names())
def test_every_file_is_complete_and_found_by_its_names(kind: str) -> None:
    hardware = load_hardware(kind)
    assert all(hardware_named(f"NVIDIA {name} 80GB") == kind for name in (*hardware.names, kind))
    constants = hardware.constants
    assert "bf16" in constants.products and "bf16" in constants.attention
    assert set(constants.collectives) == {"all_reduce", "all_gather", "reduce_scatter", "all_to_all"}
    for dtype, product in constants.products.items():
        peak = hardware.peak(dtype)
        assert peak is not None and product.tflops * 1e12 <= peak
    # 8-bit rates need 8-bit units; no rate is far from the vendor's ratio of 2 between formats.
    for dtype in set(constants.products) & {"fp8", "fp8_block"}:
        assert 1.2 < constants.products[dtype].tflops / constants.products["bf16"].tflops < 2.4, dtype
    assert all(operation.gb_per_s <= hardware.link_gb_per_s for operation in constants.collectives.values())
    assert named_gpus()[kind] == named_gpu(kind)


def test_kinds_differ_as_their_vendors_say() -> None:
    domains = {kind: read_hardware(kind).domain for kind in ("h100", "gb200", "gb300")}
    assert domains == {"h100": 8, "gb200": 72, "gb300": 72}
    amd = known_gpu("AMD Instinct MI300X")
    assert amd is not None and amd.bf16 and not amd.fp8 and amd.vendor == "amd"
    assert known_gpu("NVIDIA B200") != known_gpu("NVIDIA GB200") != known_gpu("NVIDIA GB300")
    assert known_gpu("GRID GB2000") is known_gpu("NVIDIA H1000") is None


def test_a_user_s_file_serves_as_a_name_does(tmp_path: Path) -> None:
    path = tmp_path / "titan.yaml"
    path.write_text(TITAN)
    titan, whole = load_hardware(path), load_hardware("h100")
    ours, theirs = (hardware.constants.products["bf16"] for hardware in (titan, whole))
    assert ours.tflops == theirs.tflops / 2 and ours.depth == theirs.depth
    gather, whole_gather = (hardware.constants.collectives["all_gather"] for hardware in (titan, whole))
    assert gather.gb_per_s == whole_gather.gb_per_s / 2 and gather.hop_us == whole_gather.hop_us
    assert "fp8" not in titan.constants.products  # no such peak
    gpu = named_gpu(str(path))
    assert gpu is not None and gpu[0].half == 494.5e12 and gpu[1] == 47 * 2**30


def test_what_is_written_is_read_and_facts_stay_as_they_are(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    before = "# a comment\n" + TITAN.replace("bf16: 494.5", "bf16: 989, fp8: 1979")
    path.write_text(before)
    hardware = load_hardware("h100")
    write_hardware(path, hardware)
    assert path.read_text().startswith(before.partition("constants")[0])
    assert load_hardware(path).constants.products.keys() == hardware.constants.products.keys()
    write_hardware(tmp_path / "new.yaml", hardware)
    again = load_hardware(tmp_path / "new.yaml")
    assert again.model_copy(update={"constants": hardware.constants}) == hardware
    for dtype, product in hardware.constants.products.items():
        assert again.constants.products[dtype].tflops == pytest.approx(product.tflops, rel=1e-3)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("memory_gb_per_s: 1675\n", "", "memory_gb_per_s: is missing; give it"),
        ("vendor: nvidia", "vendor: intel", "vendor: found 'intel', expected 'nvidia', 'amd' or 'cpu'"),
        (
            "multiprocessors: 66",
            "multiprocessors: 0",
            "multiprocessors: found 0, expected greater than or equal to 1",
        ),
        ("link_gb_per_s: 225", "link_gb_per_s: fast", "link_gb_per_s: found 'fast', expected a number"),
        ("link_gb_per_s", "link_gbps", "link_gbps: unknown key (did you mean 'link_gb_per_s'?)"),
        ("bf16: 494.5", "bf17: 494.5", "peaks_tflops"),
        ("of: h100", "of: h1000", "found 'h1000', expected a name or the path of a hardware file"),
        (", of: h100", "", "constants.of: is missing with source derived"),
        ("source: derived, of: h100", "source: fitted", "constants.products: is missing with source fitted"),
        ("source: derived", "source: fitted", "constants.of: found 'h100' with source fitted"),
        (
            "of: h100}",
            "of: h100, products: {bf16: {tflops: 900, start_us: 2, bandwidth: 0.8}}}",
            "constants.products.bf16.tflops: found 900, expected at most the peak, 494.5",
        ),
        (
            "of: h100}",
            "of: h100, products: {fp8: {tflops: 900, start_us: 2, bandwidth: 0.8}}}",
            "constants.products.fp8: found a rate without peaks_tflops.fp8",
        ),
        (
            "of: h100}",
            "of: h100, products: {bf16: {tflops: 400, start_us: 2, bandwidth: 1.5}}}",
            "found 1.5, expected less than or equal to 1",
        ),
        ("names:", "names: [", "not valid YAML"),
        (TITAN, "a word", "found 'a word', expected a mapping"),
    ],
)
def test_errors_name_file_field_value_and_what_is_expected(
    tmp_path: Path, old: str, new: str, message: str
) -> None:
    path = tmp_path / "titan.yaml"
    assert old in TITAN
    path.write_text(TITAN.replace(old, new))
    with pytest.raises(HexadError) as raised:
        load_hardware(path)
    text = str(raised.value)
    assert message in text and "\n" not in text
    assert text.startswith(str(path)) or "h1000" in text


def test_files_that_are_missing_unreadable_or_circular(tmp_path: Path) -> None:
    with pytest.raises(HexadError, match="no such hardware file"):
        load_hardware(tmp_path / "none.yaml")
    with pytest.raises(HexadError, match="cannot be read"):
        load_hardware(_written(tmp_path / "bytes.yaml", b"\xff\xfe\x00"))
    first, second = tmp_path / "first.yaml", tmp_path / "second.yaml"
    first.write_text(TITAN.replace("h100", str(second)))
    second.write_text(TITAN.replace("h100", str(first)))
    with pytest.raises(HexadError, match="derived from itself"):
        load_hardware(first)
    with pytest.raises(HexadError, match="did you mean 'h100'"):
        load_hardware("h10")


def _written(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path
