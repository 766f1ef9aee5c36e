"""What serves the interface of any foreign system: its world, its checkpoints, its engine."""
