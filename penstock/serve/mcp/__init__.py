"""Tool servers of the Model Context Protocol, whose tools the server calls itself."""
