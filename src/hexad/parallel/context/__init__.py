"""Context parallel: every rank holds some of the tokens of each microbatch, and attention reaches across."""
