"""Users' modules, and those of ``transformers``, made parallel."""
