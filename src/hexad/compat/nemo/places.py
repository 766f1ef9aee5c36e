"""Where NeMo 2 keeps models and data sets on a host."""

from __future__ import annotations

import os
from pathlib import Path

DEFAULT_NEMO_CACHE_HOME = Path.home() / ".cache" / "nemo"
DEFAULT_NEMO_DATASETS_CACHE = DEFAULT_NEMO_CACHE_HOME / "datasets"
DEFAULT_NEMO_MODELS_CACHE = DEFAULT_NEMO_CACHE_HOME / "models"


def _home() -> Path:
    return Path(os.environ.get("NEMO_HOME", DEFAULT_NEMO_CACHE_HOME))


def models_directory() -> Path:
    """Where imported models are: ``$NEMO_HOME/models``, by default below the cache of the user."""
    return Path(os.environ.get("NEMO_MODELS_CACHE", _home() / "models"))


def datasets_directory() -> Path:
    """Where downloaded data sets are: ``$NEMO_HOME/datasets``, by default below the cache of the user."""
    return Path(os.environ.get("NEMO_DATASETS_CACHE", _home() / "datasets"))


NEMO_CACHE_HOME = _home()
NEMO_DATASETS_CACHE = datasets_directory()
NEMO_MODELS_CACHE = models_directory()
