"""The native routes of llama.cpp's server."""
