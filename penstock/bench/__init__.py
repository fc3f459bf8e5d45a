"""Benchmarks of a model in this process, and load tests of a server (`penstock bench`).

    prompts -> load (open or closed loop) -> outcomes -> summary -> table, JSON, plot

The requests of a load test use only OpenAI's HTTP API, so any compatible server can be measured. Random
prompts also need the server's ``/tokenize``, and ``/detokenize`` for chats.
"""
