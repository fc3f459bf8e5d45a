"""Several models behind one server: which are loaded, and which one a request names."""
