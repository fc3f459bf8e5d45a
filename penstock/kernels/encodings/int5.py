"""int5: 5-bit integers in groups of 32 inputs, for the narrow layers of int4 models."""

from __future__ import annotations

from penstock.kernels.encodings._grouped import GroupedEncoding


class Int5Encoding(GroupedEncoding):
    """Weights as 5-bit integers with a scale per group."""

    is_internal = True


ENCODING = Int5Encoding(5)
