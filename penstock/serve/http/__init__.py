"""The HTTP layer: server, middleware, request bodies, server-sent events, time limits, keys and errors."""
