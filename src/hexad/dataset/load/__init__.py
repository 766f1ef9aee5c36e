"""From token files to microbatches."""
