"""Hugging Face models: weights under our names, import and export."""
