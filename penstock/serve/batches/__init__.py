"""OpenAI's Batch API. It runs files of requests in JSON lines with a lower priority than other requests."""
