"""A training run: the loop, saves, records, callbacks."""
