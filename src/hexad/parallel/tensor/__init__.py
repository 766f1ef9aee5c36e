"""Tensor and sequence parallelism over local tensors, with explicit collectives."""
