"""HTTP: the server, middleware, request bodies, server-sent events, time limits, authentication, errors."""
