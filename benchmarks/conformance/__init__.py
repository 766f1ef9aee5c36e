"""Ten failures of mixtures of experts as checks for any framework; see ``moe_conformance.py``."""
