"""The drivers, one file per engine. Each runs in the engine's virtual environment.

Only the module `penstock` imports Penstock.
"""
