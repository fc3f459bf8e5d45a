"""One engine a file, run by the Python of its own virtual environment; only `penstock` imports Penstock."""
