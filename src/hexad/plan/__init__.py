"""What a run will need, computed without starting it: plain Python, no torch."""
