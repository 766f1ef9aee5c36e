"""One step of any modules on one rank: accumulate, reduce, update; the language model; evaluation."""
