"""The HTTP routes: one module per route family, and modules that several route families use."""
