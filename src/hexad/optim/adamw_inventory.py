"""What AdamW keeps of every value that it updates. No torch."""

MOMENTS = ("exp_avg", "exp_avg_sq")
"""By their names in PyTorch's optimizer; each as large as the master values, and in their format."""
