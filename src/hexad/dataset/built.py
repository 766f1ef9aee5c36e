"""Data sets as they were built: opened for a run, and compared with what was written."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hexad.config.errors import HexadError

from .files import checksum, reporting, sampled_hash
from .indexed import IndexedDataset
from .masks import mask_path
from .sidecar import Sidecar, identity, read_sidecar, sidecar_path, stored_sidecar


def check_mask(data: IndexedDataset, built: Sidecar) -> None:
    """Refuse data whose loss mask is not the one it was built with.

    Raises:
        HexadError: it is missing, or another one.
    """
    path = mask_path(data.prefix)
    if built.mask is None:
        return
    if data.mask is None:
        raise HexadError(
            f"{path}: missing: {data.prefix} was built with a loss mask "
            f"({sidecar_path(data.prefix).name}); copy it too, or build the data again"
        )
    if sampled_hash(path) != built.mask:
        raise HexadError(f"{path}: damaged: not what was written; build the data again, or copy it again")


def open_built(
    prefix: str,
    vocab: int | None,
    eod: int | None,
    bos: Sequence[int] | None,
    part: tuple[float, float] | None = None,
) -> IndexedDataset:
    """A dataset that fits a run by what its sidecar records; without one, only damage is found here. What is
    None is not checked.

    Args:
        prefix: of the dataset.
        vocab: refuse a token id that is not below this.
        eod: of the run's tokenizer; data built with another is refused.
        bos: ids before each document in the run; data built with others is refused.
        part: which documents to take, as fractions; None: all.

    Raises:
        HexadError: it cannot be opened, or does not fit.
    """
    data = IndexedDataset(prefix)
    if (built := read_sidecar(prefix)) is not None:
        check_mask(data, built)
        if eod is not None and built.eod not in (None, eod):
            raise HexadError(
                f"{prefix} was built with tokenizer {built.tokenizer}, whose end of document is {built.eod}, "
                f"but that of data.tokenizer is {eod}; set data.tokenizer to the same one or build the data "
                "again"
            )
        if vocab is not None and built.max_token >= vocab:
            with_ = f", built with {built.tokenizer}, vocabulary {built.vocab}" if built.tokenizer else ""
            raise HexadError(
                f"{prefix} holds token id {built.max_token} ({sidecar_path(prefix).name}{with_}), expected 0 "
                f"to {vocab - 1}; set data.tokenizer (or model.vocab) to what the data was built with"
            )
        if bos is not None and built.bos is not None and list(bos) != list(built.bos):
            raise HexadError(
                f"{prefix} was built with the ids {list(built.bos)} before each document, but data.bos and "
                f"data.tokenizer give {list(bos)}; set data.bos to {'auto' if built.bos else 'no'} or build "
                "the data again"
            )
    return data if part is None else data.part(*part)


def check_targets(data: Sequence[IndexedDataset]) -> None:
    """Refuse data sets without a trained token in any of them.

    Raises:
        HexadError: naming them.
    """
    if not any(dataset.mask is None or dataset.mask.any(len(dataset.tokens)) for dataset in data):
        names = ", ".join(dataset.prefix for dataset in data)
        raise HexadError(
            f"{names}: no token is trained, according to {mask_path(data[0].prefix).name}; build the data "
            "again, or choose other documents (data.split)"
        )


Identity = Sequence[str]
"""Identity of a data set: its :func:`~.sidecar.identity`, and its tokens' checksum (empty if it is not
recorded)."""


def identities(prefixes: Iterable[str]) -> dict[str, Identity]:
    """Identities of the data sets that :func:`open_built` has opened, by absolute prefix, in JSON's types.

    Raises:
        HexadError: one cannot be read.
    """

    def of(prefix: str) -> Identity:
        with reporting(prefix):
            sidecar = stored_sidecar(prefix)
            return [identity(prefix), ((sidecar and sidecar.checksums) or {}).get(".bin", "")]

    return {str(Path(prefix).absolute()): of(prefix) for prefix in prefixes}


def check_same_data(recorded: Mapping[str, Identity], data: Mapping[str, Identity], where: str) -> None:
    """Refuse to continue with data that were rebuilt or replaced under their prefix: samples are counted in
    the order of the data that were there. Both arguments are :func:`identities`.

    Raises:
        HexadError: naming the data set, and ``where`` it is recorded.
    """
    for prefix, earlier in recorded.items():
        pairs = zip(earlier, data.get(prefix, earlier))
        if any(before != now for before, now in pairs if before and now):
            raise HexadError(
                f"data: found {prefix}, which was rebuilt or replaced since {where} was saved; restore its "
                "files, or to continue with other data give them another prefix and name it in data.train"
            )


@dataclass(frozen=True)
class Verified:
    """The result of :func:`verify`.

    Attributes:
        problems: a line each; empty for data that are intact.
        files, size: those that were read, and their bytes.
        checksums: whether they were compared with checksums; data of other tools, and of earlier versions of
            Hexad, have none.
    """

    problems: list[str]
    files: int
    size: int
    checksums: bool


_CHUNK = 1 << 24
"""Tokens read at a time."""


def verify(prefix: str) -> Verified:
    """Read all files of a data set and compare them with the checksums made when it was written; without
    those with each other, and with what an earlier version of Hexad has recorded.

    Raises:
        HexadError: there is no data set.
    """
    paths = {ending: Path(f"{prefix}{ending}") for ending in (".bin", ".idx", ".mask", ".hexad.json")}
    present = [path for path in paths.values() if path.is_file()]
    if not {paths[".bin"], paths[".idx"]} & {*present}:
        IndexedDataset(prefix)  # names what there is instead
    problems: list[str] = []
    sidecar = None
    try:
        sidecar = stored_sidecar(prefix)
        for ending, recorded in ((sidecar and sidecar.checksums) or {}).items():
            with reporting(paths[ending]):
                if checksum(paths[ending]) != recorded:
                    problems.append(f"{paths[ending]}: damaged or replaced: not what was written")
        if not problems:
            _verify_content(prefix, sidecar)
    except HexadError as error:
        problems.append(str(error))
    checked = sidecar is not None and sidecar.checksums is not None
    return Verified(problems, len(present), sum(path.stat().st_size for path in present), checked)


def _verify_content(prefix: str, sidecar: Sidecar | None) -> None:
    """Compare the files of a data set with each other, and with counts that are recorded."""
    data = IndexedDataset(prefix)
    data.verify()
    if data.mask is not None:
        data.mask.verify()
    if sidecar is None:
        return
    check_mask(data, sidecar)
    read_sidecar(prefix)
    chunks = (data.tokens[start : start + _CHUNK] for start in range(0, len(data.tokens), _CHUNK))
    highest = max(int(np.max(chunk)) for chunk in chunks)
    counts = data.documents, len(data.tokens), highest
    if counts != (recorded := (sidecar.documents, sidecar.tokens, sidecar.max_token)):
        raise HexadError(
            f"{prefix}: damaged: its numbers of documents and tokens and its largest id are {counts}, but "
            f"{sidecar_path(prefix).name} records {recorded}"
        )
