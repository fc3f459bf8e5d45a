"""The HTTP server. It translates HTTP requests to model requests and does not import torch."""
