"""Plain torch: right on every device, and the definition of correct for all other back ends."""

from penstock.kernels.reference.ops import ReferenceOps

__all__ = ["ReferenceOps"]
