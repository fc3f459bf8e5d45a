"""int4: 4-bit integers in groups of 32 inputs. Layers that need more bits use int5 or int8."""

from __future__ import annotations

from penstock.kernels.encodings import LayerRole
from penstock.kernels.encodings._grouped import GroupedEncoding

SMALL_LAYER_SIZE = 64
"""Layers with fewer inputs or outputs than this are packed in int8. They do not benefit from 4 bits."""

NARROW_LAYER_SIZE = 2048
"""Layers with fewer inputs or outputs than this are packed in int5; experts only if both numbers are smaller.

Small models lose much quality with 4 bits. The perplexity of a model with 135 M parameters rises by 15 % with
4 bits and by 4 % with 5 bits."""


class Int4Encoding(GroupedEncoding):
    """Weights as 4-bit integers with a scale per group."""

    @property
    def bits_per_weight(self) -> float:
        return 5  # an int4 layer has 4.5 bits per weight, an int5 layer 5.5

    def for_layer(self, role: LayerRole, out_features: int, in_features: int) -> str:
        """Return int8 for the value projection and the head, else int8, int5 or int4 by the layer's size.

        Errors of the value projection reach the residual stream undamped. With grouped-query attention the
        value projections have a few percent of the weights, and int8 for them removes a third of the quality
        loss of 4 bits in a trained model. Of all layers, the output head affects quality most. An expert uses
        int5 only if its numbers of inputs and of outputs are both small, because many narrow experts make a
        large model.
        """
        narrowest, widest = sorted((out_features, in_features))
        if role in ("values", "head") or narrowest < SMALL_LAYER_SIZE:
            return "int8"
        return "int5" if (widest if role == "expert" else narrowest) < NARROW_LAYER_SIZE else self.name


ENCODING = Int4Encoding(4)
