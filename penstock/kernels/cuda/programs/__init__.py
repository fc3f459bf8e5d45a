"""The Triton programs of the back end. Each runs once per element of a grid and computes one tile.

Arguments in capitals are compile-time constants. Strides are in elements. Programs run on a GPU, or with
``TRITON_INTERPRET=1`` on CPU tensors. They require triton 3.6 or later.
"""
