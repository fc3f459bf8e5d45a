"""The HTTP server: translates HTTP requests to model requests. Nothing here loads torch."""
