"""Whether tensors share memory. Addresses cannot tell: tensors without values (``meta``) have none."""

from torch import Tensor


def memory_of(tensor: Tensor) -> int:
    """A number that tensors of the same memory have in common, and no others that exist at the same time."""
    return int(tensor.untyped_storage()._cdata)


def same_place(tensor: Tensor, other: Tensor) -> bool:
    """Whether two tensors of one format begin at the same place of the same memory."""
    return tensor.storage_offset() == other.storage_offset() and memory_of(tensor) == memory_of(other)
