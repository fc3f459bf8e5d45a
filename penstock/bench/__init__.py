"""Benchmarks of a model in this process, and of a server under load (`penstock bench`).

    prompts -> load (open or closed loop) -> outcomes -> summary -> table, JSON, plot

The load generator uses only OpenAI's HTTP interface, so it measures any compatible server.
"""
