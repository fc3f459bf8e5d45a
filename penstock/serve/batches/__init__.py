"""Batches of requests: files of JSON lines that run with lower priority than other requests."""
