"""Comparison of Penstock with other engines on the same workloads: ``python -m benchmarks.peers --help``."""
