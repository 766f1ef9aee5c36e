"""Dry runs: one rank of a job of any size, with the engine that trains, on tensors without values."""
