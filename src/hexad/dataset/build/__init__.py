"""From raw text to token files."""
