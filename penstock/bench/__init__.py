"""What measures a server: load in, latencies and throughput out. `penstock bench serve` is its face.

    prompts -> load (open or closed loop) -> outcomes -> summary -> table, JSON, plot

It knows OpenAI's HTTP interface and nothing of the server behind it, so it measures any.
"""
