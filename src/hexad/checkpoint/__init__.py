"""Checkpoints without a layout."""
