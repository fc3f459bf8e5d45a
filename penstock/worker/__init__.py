"""The worker process that runs the model, its messages, and the client that the server uses."""
