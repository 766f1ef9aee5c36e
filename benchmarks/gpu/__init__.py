"""The steps of ``benchmarks/gpu_report.py``, one module each, and what they share."""
