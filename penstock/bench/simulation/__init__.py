"""Simulation of a cluster: the real scheduler, KV cache and router, and measured step times."""
