"""What crosses a stage's boundary: a tensor, or several in one message."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from hexad.config import HexadError


@dataclass(frozen=True)
class Part:
    """A tensor of a result.

    Attributes:
        shape, dtype: of it.
        trained: a gradient is sent back for it.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    trained: bool

    @property
    def elements(self) -> int:
        """Of the tensor."""
        return prod(self.shape)


@dataclass(frozen=True)
class Form:
    """The form of a stage's result, and of the message that carries it.

    A message is one flat tensor, in the widest format of those with gradients: these first,
    converted, and then the bytes of the others. A single tensor with a gradient is sent as it is.

    Attributes:
        parts: its tensors.
        single: it is one tensor, not a tuple of them.
    """

    parts: tuple[Part, ...]
    single: bool

    @classmethod
    def of(cls, result: Any, trained: bool) -> Form:
        """The form of a result.

        Args:
            result: a tensor or a tuple of tensors.
            trained: gradients are sent back for floating-point tensors.

        Raises:
            HexadError: it is something else.
        """
        single = isinstance(result, torch.Tensor)
        tensors = (result,) if single else result
        if not isinstance(tensors, list | tuple) or not all(
            isinstance(each, torch.Tensor) for each in tensors
        ):
            raise HexadError(
                f"PipelineModule: found a {type(result).__name__} as the result of a stage's last layer, "
                "expected a tensor or a tuple of tensors"
            )
        parts = [Part(tuple(t.shape), t.dtype, trained and t.is_floating_point()) for t in tensors]
        return cls(tuple(parts), single)

    @property
    def plain(self) -> bool:
        """Whether the message is the tensor itself."""
        return self.single and self.parts[0].trained

    @property
    def dtype(self) -> torch.dtype:
        """Of the message."""
        kinds = [part.dtype for part in self.parts if part.trained]
        return max(kinds, key=lambda kind: kind.itemsize) if kinds else torch.float32

    def message(self, result: Any) -> torch.Tensor:
        """The message of a result, with its graph."""
        if self.plain:
            tensor: torch.Tensor = result
            return tensor
        tensors = (result,) if self.single else result
        kept = [each.reshape(-1).to(self.dtype) for each, part in zip(tensors, self.parts) if part.trained]
        raw = [_raw(each, self.dtype) for each, part in zip(tensors, self.parts) if not part.trained]
        return torch.cat([*kept, *raw])

    def empty(self, device: torch.device) -> torch.Tensor:
        """An empty tensor like the message."""
        if self.plain:
            return torch.empty(self.parts[0].shape, dtype=self.dtype, device=device)
        return torch.empty(sum(map(self._size, self.parts)), dtype=self.dtype, device=device)

    def result(self, message: torch.Tensor) -> Any:
        """The result in a message."""
        if self.plain:
            return message
        found: dict[int, torch.Tensor] = {}
        order = sorted(range(len(self.parts)), key=lambda number: not self.parts[number].trained)
        sizes = [self._size(self.parts[number]) for number in order]
        for number, piece in zip(order, message.split(sizes)):
            part = self.parts[number]
            if part.trained:
                found[number] = piece.view(part.shape).to(part.dtype)
            else:
                raw = piece.detach().clone().view(torch.uint8)[: part.elements * part.dtype.itemsize]
                found[number] = raw.view(part.dtype).view(part.shape)
        if self.single:
            return found[0]
        return tuple(found[number] for number in range(len(self.parts)))

    def _size(self, part: Part) -> int:
        """Elements of the message."""
        if part.trained:
            return part.elements
        return -(-part.elements * part.dtype.itemsize // self.dtype.itemsize)


def _raw(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A tensor's bytes as elements of a format."""
    raw = tensor.detach().reshape(-1).contiguous().view(torch.uint8)
    padding = -raw.numel() % dtype.itemsize
    return torch.nn.functional.pad(raw, (0, padding)).view(dtype)
