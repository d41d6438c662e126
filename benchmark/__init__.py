"""Benchmarks of the fused operations and of whole VAEs: ``python -m benchmark.…`` in the project's root."""
