"""Simulates a cluster with the real scheduler, KV cache and router. Step times come from measurements."""
