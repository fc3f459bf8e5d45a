"""Benchmarks of a model in this process, and load tests of a server (`penstock bench`).

    prompts -> load (open or closed loop) -> outcomes -> summary -> table, JSON, plot

The load generator uses only OpenAI's HTTP API, so it can measure any compatible server.
"""
