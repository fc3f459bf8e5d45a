"""Client of tool servers (Model Context Protocol), whose tools the server calls on behalf of the model."""
