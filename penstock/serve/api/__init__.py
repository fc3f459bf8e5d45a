"""The routes: one module per route family, and what the text generation routes share."""
