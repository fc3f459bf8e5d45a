"""Client of tool servers (Model Context Protocol). The server calls their tools for the model."""
