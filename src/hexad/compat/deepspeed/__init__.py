"""The face of DeepSpeed."""
