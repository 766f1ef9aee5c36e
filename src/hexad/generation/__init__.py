"""Generation: key/value cache, sampling, scoring, over tensor, context and pipeline ranks."""
