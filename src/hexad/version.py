"""The version of Hexad, for the package's metadata (pyproject.toml), checkpoints and the command line."""

__version__ = "0.1.0"
