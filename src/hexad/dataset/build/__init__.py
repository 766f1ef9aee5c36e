"""Build token files from raw text."""
