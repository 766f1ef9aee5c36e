"""Reads and writes hardware files, and finds them by name."""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from hexad.config import ConfigError, HexadError, Wording, did_you_mean, key_names, one_line
from hexad.config.load import read_yaml

from .constants import AttentionConstants, CollectiveConstants, Constants, ProductConstants
from .kind import PEAK_OF, Hardware

_FILES = Path(__file__).parent
_CONSTANTS = re.compile(r"^constants:.*", re.MULTILINE | re.DOTALL)
_ROUNDED = 4
"""Significant digits of constants that are written."""


def hardware_names() -> list[str]:
    """The kinds that this package has a file of: ``a100``, ``h100-nvl``."""
    return sorted(path.stem for path in _FILES.glob("*.yaml"))


def hardware_named(name: str) -> str | None:
    """The kind of a GPU by the name that its driver reports, such as ``NVIDIA H100 80GB HBM3``; None if
    unknown. Files are read only if no file's own name is in it."""
    stems = hardware_names()
    kind = _contained(name, ((stem, stem) for stem in stems))
    return kind or _contained(name, ((alias, stem) for stem in stems for alias in read_hardware(stem).names))


def _contained(name: str, kinds: Iterable[tuple[str, str]]) -> str | None:
    """The kind with the longest word that stands in a name."""
    for word, kind in sorted(kinds, key=lambda pair: len(pair[0]), reverse=True):
        parts = "[ _-]".join(map(re.escape, re.split("[ _-]", word)))
        if re.search(rf"(?<![A-Za-z0-9]){parts}(?![A-Za-z0-9])", name, re.IGNORECASE):
            return kind
    return None


def load_hardware(name: str | Path) -> Hardware:
    """A kind of hardware, by name or by the path of a user's own file, with all constants that follow.

    Args:
        name: one of :func:`hardware_names`, a longer name with one of them in it, or a path that ends in
            ``.yaml`` or ``.yml``.

    Raises:
        HexadError: an unknown name, or a file that is damaged or incomplete: file, field, value, expected.
    """
    return _complete(read_hardware(name), ())


def _complete(hardware: Hardware, through: tuple[str, ...]) -> Hardware:
    """A file's tree, with the constants that are derived from another kind."""
    of = hardware.constants.of
    if of is None:
        return hardware
    if of in through or len(through) > 4:
        raise HexadError(f"constants.of: found '{of}', which is derived from itself: {', '.join(through)}")
    return _derived(hardware, _complete(read_hardware(of), (*through, of)))


def read_hardware(name: str | Path) -> Hardware:
    """:func:`load_hardware`, with the constants as the file states them: none that are derived."""
    text = str(name)
    if text.endswith((".yaml", ".yml")):
        return _parse(Path(text))
    word = "-".join(text.lower().replace("_", " ").replace("-", " ").split())
    known = hardware_names()
    kind = word if word in known else hardware_named(text)
    if kind is None:
        hint = did_you_mean(word, known) or f"; known: {', '.join(known)}"
        raise HexadError(
            f"hardware: found '{text}', expected a name or the path of a hardware file (*.yaml){hint}"
        )
    return _parse(_FILES / f"{kind}.yaml")


class _HardwareWording(Wording):
    forms = {
        "names": ("[name, ...]", "a name"),
        "capability": ("[major, minor]", "an integer"),
        "tiles": ("[[rows, columns], ...]", "[rows, columns]"),
    }


def _parse(path: Path) -> Hardware:
    try:
        tree = read_yaml(path)
    except FileNotFoundError:
        raise HexadError(f"{path}: no such hardware file") from None
    except (OSError, ValueError) as error:
        raise HexadError(f"{path}: cannot be read: {one_line(error)}") from None
    if not isinstance(tree, dict):
        raise HexadError(f"{path}: found {tree!r:.40}, expected a mapping with names, peaks_tflops, ...")
    try:
        _check_keys(tree)
        hardware = Hardware.model_validate(tree)
        _check(hardware)
    except ValidationError as error:
        raise HexadError(f"{path}: {_HardwareWording().readable(error, Hardware)}") from None
    except ConfigError as error:
        raise HexadError(f"{path}: {error}") from None
    return hardware


def _check_keys(tree: dict[str, Any]) -> None:
    """Refuse an unknown key before the one that it may stand for is missed."""
    known = key_names(Hardware)
    for key in tree:
        if key not in known:
            hint = did_you_mean(key, known) or f"; known: {', '.join(known)}"
            raise ConfigError(key, f"unknown key{hint}")


def _check(hardware: Hardware) -> None:
    """Refuse a file whose parts do not fit each other."""
    if not hardware.peaks_tflops:
        raise ConfigError("peaks_tflops", "found no format, expected at least one, such as {fp32: 67}")
    constants = hardware.constants
    if constants.of is None:
        if constants.source == "derived":
            raise ConfigError("constants.of", "is missing with source derived; give a kind, such as h100")
        if not constants.products:
            raise ConfigError(
                "constants.products", f"is missing with source {constants.source}; give it, or use derived"
            )
    elif constants.source != "derived":
        raise ConfigError(
            "constants.of",
            f"found '{constants.of}' with source {constants.source}; leave it out, or use derived",
        )
    for dtype, product in constants.products.items():
        peak = hardware.peak(dtype)
        if peak is None:
            raise ConfigError(
                f"constants.products.{dtype}",
                f"found a rate without peaks_tflops.{PEAK_OF[dtype]}; give the peak",
            )
        if product.tflops * 1e12 > peak * 1.0001:
            raise ConfigError(
                f"constants.products.{dtype}.tflops",
                f"found {product.tflops:g}, expected at most the peak, {peak / 1e12:g}",
            )


def _derived(hardware: Hardware, base: Hardware) -> Hardware:
    """A file's tree, completed with the constants of another kind, scaled by the ratio of peaks and links."""
    constants, other = hardware.constants, base.constants
    ratio = {
        dtype: hardware.peaks_tflops[PEAK_OF[dtype]] / base.peaks_tflops[PEAK_OF[dtype]]
        for dtype in PEAK_OF
        if PEAK_OF[dtype] in hardware.peaks_tflops and PEAK_OF[dtype] in base.peaks_tflops
    }
    link = hardware.link_gb_per_s / base.link_gb_per_s
    products: dict[Any, ProductConstants] = {
        dtype: entry.model_copy(update={"tflops": entry.tflops * ratio[dtype]})
        for dtype, entry in other.products.items()
        if dtype in ratio
    }
    attention: dict[Any, AttentionConstants] = {
        dtype: entry.model_copy(
            update={"tpairs": {width: rate * ratio[dtype] for width, rate in entry.tpairs.items()}}
        )
        for dtype, entry in other.attention.items()
        if dtype in ratio
    }
    collectives: dict[Any, CollectiveConstants] = {
        operation: entry.model_copy(update={"gb_per_s": entry.gb_per_s * link})
        for operation, entry in other.collectives.items()
    }
    update = {
        "products": products | constants.products,
        "attention": attention | constants.attention,
        "collectives": collectives | constants.collectives,
    }
    for group in ("memory", "network", "overlap", "host"):
        update[group] = getattr(constants if group in constants.model_fields_set else other, group)
    return hardware.model_copy(update={"constants": constants.model_copy(update=update)})


def with_constants(text: str, constants: Constants) -> str:
    """The text of a hardware file with other constants; the rest of it stays as it is. ``constants`` is the
    last key of these files."""
    plain = constants.model_dump(exclude_unset=True, exclude_none=True)
    written = yaml.safe_dump(
        {"constants": _rounded(plain)}, sort_keys=False, default_flow_style=None, width=104
    )
    return _CONSTANTS.sub("", text).rstrip("\n") + "\n" + written


def write_hardware(path: Path, hardware: Hardware) -> None:
    """Write a hardware file; :func:`load_hardware` reads it. An existing file keeps all but its constants."""
    if path.exists():
        text = path.read_text(encoding="utf-8")
    else:
        facts = hardware.model_dump(exclude={"constants"}, exclude_none=True, exclude_unset=True, mode="json")
        text = yaml.safe_dump(facts, sort_keys=False, default_flow_style=None, width=104)
    path.write_text(with_constants(text, hardware.constants), encoding="utf-8")


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _rounded(inner) for name, inner in value.items()}
    return float(f"{value:.{_ROUNDED}g}") if isinstance(value, float) else value
