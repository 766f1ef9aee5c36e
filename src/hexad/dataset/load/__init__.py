"""Load microbatches from token files."""
