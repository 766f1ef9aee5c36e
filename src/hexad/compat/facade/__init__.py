"""Parts that the compatibility layers share: world, checkpoints, engine."""
