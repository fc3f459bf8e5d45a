"""Several models behind one server: loading and unloading, and dispatch of requests by model name."""
