"""The host process: memory, container limits, signals, garbage collection, progress bars.

Importing these modules does not import torch.
"""
