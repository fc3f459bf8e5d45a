"""Routes that are compatible with llama.cpp's server."""
