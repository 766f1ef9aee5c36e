"""The places of our global tensors in published (Hugging Face) checkpoints, by the family's names."""

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from hexad.config import HexadError
from hexad.config.model import ModelSettings
from hexad.model.families import Family, family
from hexad.model.inventory import ModelInventory
from hexad.parallel.inventory import Weight
from hexad.parallel.rectangle import Rectangle

HEAD = "lm_head.weight"
"""The published name of the weight that ``tie_word_embeddings`` makes the embedding's."""


@dataclass(frozen=True)
class PublishedTensor:
    """The place of a part of one of our global tensors in a published state dict.

    Attributes:
        name: its key.
        part: which part of ours.
        stored_shape: of the published tensor.
        first: where ours begins in it, in every dim, before it is transposed.
        transposed: stored as ``[in, out]``.
    """

    name: str
    part: Rectangle
    stored_shape: tuple[int, ...]
    first: tuple[int, ...]
    transposed: bool = False

    def place(self, rectangle: Rectangle) -> tuple[slice, ...]:
        """The index in the published tensor of a rectangle inside the part."""
        dims = min(2, len(self.part.shape))  # of a vector or matrix; those before are numbers of experts
        begins = (
            first + offset - part
            for first, offset, part in zip(
                self.first[-dims:], rectangle.offset[-dims:], self.part.offset[-dims:]
            )
        )
        place = tuple(slice(b, b + size) for b, size in zip(begins, rectangle.sizes[-dims:]))
        if self.transposed:
            place = place[::-1]
        return (*(slice(number, number + 1) for number in self.first[:-dims]), *place)

    def ours(self, values: Tensor, rectangle: Rectangle) -> Tensor:
        """Values from there in the dims of a rectangle of ours, as a view if possible."""
        return (values.t() if self.transposed else values).reshape(rectangle.sizes)


PublishedForm = tuple[PublishedTensor, ...]
"""The parts of one of our tensors, which make it up."""


@dataclass(frozen=True)
class PublishedWeight:
    """The place of one of our global tensors in a published state dict.

    Attributes:
        shape: of ours.
        forms: its parts in each of the forms that are read; the first is written.
    """

    shape: tuple[int, ...]
    forms: tuple[PublishedForm, ...]

    def read(self, state: Mapping[str, Tensor]) -> Tensor:
        """Our tensor, as a view into theirs if it is one part. Raises KeyError naming a missing key."""
        form = next((form for form in self.forms if all(part.name in state for part in form)), self.forms[0])
        whole = Rectangle.whole("", self.shape)

        def read(part: PublishedTensor, rectangle: Rectangle) -> Tensor:
            return part.ours(state[part.name][part.place(rectangle)], rectangle)

        return assembled(form, whole, read, state[form[0].name].dtype)


def assembled(
    form: Iterable[PublishedTensor],
    rectangle: Rectangle,
    read: Callable[[PublishedTensor, Rectangle], Tensor],
    dtype: torch.dtype,
) -> Tensor:
    """A rectangle of one of our tensors, from what ``read`` returns of its parts."""
    pieces = [(part, common) for part in form if (common := part.part.intersection(rectangle)) is not None]
    if len(pieces) == 1:
        return read(*pieces[0]).to(dtype)
    values = torch.empty(rectangle.sizes, dtype=dtype)
    for part, common in pieces:
        begins = [offset - begin for offset, begin in zip(common.offset, rectangle.offset)]
        place = tuple(slice(begin, begin + size) for begin, size in zip(begins, common.sizes))
        values[place] = read(part, common).to(dtype)
    return values


def published_tensors(model: ModelSettings, kind: Family | None = None) -> dict[str, PublishedWeight]:
    """The place of each global tensor, by our name, in a published state dict of a family, by default the
    model's own. ``model`` is resolved: its sizes are numbers.

    Raises:
        HexadError: the family's names do not give each of our values one place, and each place one value.
    """
    kind = kind or family(model.family)
    weights = ModelInventory(model).weights()
    fused: dict[str, list[Weight]] = {}
    places = {}
    for weight in weights.values():
        if kind.of_experts(weight.name):
            places[weight.name] = PublishedWeight(weight.shape, tuple(_of_experts(weight, kind)))
        else:
            fused.setdefault(kind.published(weight.name), []).append(weight)
    for parts in fused.values():
        rows = 0
        for part in parts:
            places[part.name] = PublishedWeight(part.shape, tuple(_fused(part, parts, rows, kind)))
            rows += part.shape[0]
    for number in range(max(len(place.forms) for place in places.values())):
        _check_complete(
            {ours: place.forms[min(number, len(place.forms) - 1)] for ours, place in places.items()}
        )
    return {name: places[name] for name in weights}


def _fused(weight: Weight, parts: Sequence[Weight], row: int, kind: Family) -> Iterable[PublishedForm]:
    """The forms of one of several weights that are one published tensor, one after the other."""
    transposed = kind.transposed and weight.name.startswith("layers.") and len(weight.shape) == 2
    stored = (sum(part.shape[0] for part in parts), *weight.shape[1:])
    first = (row, *(0 for _ in weight.shape[1:]))
    whole = Rectangle.whole(weight.name, weight.shape)
    for name in kind.spellings(weight.name):
        yield (PublishedTensor(name, whole, stored[::-1] if transposed else stored, first, transposed),)


def _of_experts(weight: Weight, kind: Family) -> Iterable[PublishedForm]:
    """The forms of a stack of experts' matrices: a published tensor for each expert and matrix, or one in
    which the matrices of an expert are one after the other."""
    experts, *between, rows, width = weight.shape
    count = prod(between)
    places = [(expert, index) for expert in range(experts) for index in range(count)]
    names = kind.expert_names(weight.name)
    stack = (experts, count * rows, width)

    def part(expert: int, index: int) -> Rectangle:
        offset = (expert, *([index] if between else []), 0, 0)
        return Rectangle(weight.name, weight.shape, offset, (*(1 for _ in offset[:-2]), rows, width))

    yield tuple(
        PublishedTensor(names[index].format(expert), part(expert, index), (rows, width), (0, 0))
        for expert, index in places
    )
    name = kind.published(weight.name)
    yield tuple(
        PublishedTensor(name, part(expert, index), stack, (expert, index * rows, 0))
        for expert, index in places
    )


def _check_complete(forms: Mapping[str, PublishedForm]) -> None:
    """Refuse parts that do not make up our tensors, or the published ones: something would not be read or
    not be written."""
    covered: dict[tuple[bool, str], list[tuple[tuple[int, ...], int]]] = {}
    sizes: dict[tuple[bool, str], int] = {}
    for ours, form in forms.items():
        sizes[True, ours] = prod(form[0].part.shape)
        for part in form:
            size = part.part.numel
            covered.setdefault((True, ours), []).append((part.part.offset, size))
            covered.setdefault((False, part.name), []).append((part.first, size))
            sizes.setdefault((False, part.name), prod(part.stored_shape))
    for key, places in covered.items():
        if len({begin for begin, _ in places}) < len(places) or sum(size for _, size in places) != sizes[key]:
            raise HexadError(f"{key[1]}: its parts in a published model do not make it up")


def located(
    tensors: Mapping[str, PublishedWeight],
    present: Collection[str],
    model: ModelSettings,
    where: Path,
    left_out: str = "",
) -> dict[str, PublishedForm]:
    """The form in which each tensor is there, by our name, with the names that its parts have there: with or
    without the prefix of a model with a head. ``present``: the names of the tensors ``where`` they are;
    ``left_out``: pattern of those that are not read.

    Raises:
        HexadError: one is missing, or there is one that the model does not have.
    """
    kind = family(model.family)
    forms, used = {}, {HEAD} if model.tied_embeddings else set()
    for ours, place in tensors.items():
        named = [[_name(part.name, present, kind) for part in form] for form in place.forms]
        index = max(range(len(named)), key=lambda number: sum(name is not None for name in named[number]))
        form, names = place.forms[index], named[index]
        if ours == "embedding.weight" and model.tied_embeddings and names == [None] and HEAD in present:
            names = [HEAD]  # one matrix under either of its names
        missing = next((part.name for part, name in zip(form, names) if name is None), None)
        if missing is not None:
            raise HexadError(f"{where}: tensor {missing} (model.{ours}) is missing")
        forms[ours] = tuple(replace(part, name=str(name)) for part, name in zip(form, names))
        used.update(part.name for part in forms[ours])
    allowed = f"{kind.buffers}|{left_out}" if left_out else kind.buffers  # buffers follow from the settings
    for name in present:
        if name not in used and not re.fullmatch(allowed, name.removeprefix(kind.base)):
            raise HexadError(
                f"{where}: found tensor {name}, which a {model.family} model with the settings of "
                "config.json does not have"
            )
    return forms


def _name(name: str, present: Collection[str], kind: Family) -> str | None:
    """A published name as it is among those present, or None."""
    return next((other for other in (name, name.removeprefix(kind.base)) if other in present), None)
