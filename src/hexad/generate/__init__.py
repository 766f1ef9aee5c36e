"""Generation: key/value cache, sampling, tensor-parallel ranks."""
