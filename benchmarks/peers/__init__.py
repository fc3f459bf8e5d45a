"""Penstock and the other engines at the same work, in turn: ``python -m benchmarks.peers --help``."""
