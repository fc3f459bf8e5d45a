"""OpenAI's Batch API: files of requests as JSON lines, which run with lower priority than other requests."""
