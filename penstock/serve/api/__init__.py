"""The HTTP routes: one module per route family, and the modules that they share."""
