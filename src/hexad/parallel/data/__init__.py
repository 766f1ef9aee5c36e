"""Data parallelism over flat buckets, with sharded state or not (ZeRO 0 to 3)."""
