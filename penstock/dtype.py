"""Element types of tensors. Importing this module imports neither torch nor numpy.

>>> DType.bfloat16.size_in_bytes
2
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    import torch


class DType(str, Enum):
    """An element type of a tensor or buffer. Its value is the name in torch, and in numpy if numpy has it."""

    bool = "bool"
    int8 = "int8"
    int16 = "int16"
    int32 = "int32"
    int64 = "int64"
    uint8 = "uint8"
    float8_e4m3fn = "float8_e4m3fn"
    float16 = "float16"
    bfloat16 = "bfloat16"
    float32 = "float32"
    float64 = "float64"

    @property
    def size_in_bytes(self) -> int:
        """Bytes of one element."""
        return _SIZES[self]

    def is_float(self) -> bool:  # type: ignore[valid-type]  # `bool` above is a member
        """Whether elements are floating-point numbers."""
        return "float" in self.value

    def to_torch(self) -> torch.dtype:
        """Return the torch type of the same name."""
        import torch

        dtype = getattr(torch, self.value)
        assert isinstance(dtype, torch.dtype)
        return dtype

    def to_numpy(self) -> np.dtype[np.generic]:
        """Return the numpy type of the same name. Numpy has no bfloat16 and no 8-bit floats.

        Raises:
            TypeError: the type is ``bfloat16`` or ``float8_e4m3fn``.
        """
        if self in (DType.bfloat16, DType.float8_e4m3fn):
            raise TypeError(f"numpy has no {self.value}: convert to float32 first")
        import numpy as np

        dtype: np.dtype[np.generic] = np.dtype(self.value)
        return dtype

    @classmethod
    def from_torch(cls, dtype: torch.dtype) -> DType:
        """Return the ``DType`` of a torch type, e.g. ``torch.float32``.

        Raises:
            ValueError: no ``DType`` has the name of the type.
        """
        return cls(str(dtype).removeprefix("torch."))

    @classmethod
    def from_numpy(cls, dtype: np.dtype[np.generic]) -> DType:
        """Return the ``DType`` of a numpy type.

        Raises:
            ValueError: no ``DType`` has the name of the type.
        """
        return cls(dtype.name)


_ONE_BYTE_TYPES = (DType.bool, DType.int8, DType.uint8, DType.float8_e4m3fn)
_SIZES = {dtype: 1 if dtype in _ONE_BYTE_TYPES else int(dtype.value[-2:]) // 8 for dtype in DType}
