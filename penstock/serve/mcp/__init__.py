"""Client of tool servers (Model Context Protocol). Penstock calls the servers' tools for the model."""
