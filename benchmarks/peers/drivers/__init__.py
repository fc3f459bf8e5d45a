"""The drivers of the engines, one module per engine. A driver runs in the engine's virtual environment.

Only the driver `penstock` may import Penstock, because the environments of the other engines lack Penstock.
"""
