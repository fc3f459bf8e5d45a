"""EXAONE 4 (LG AI Research 2025, arXiv:2507.11407): norms after attention and feed-forward layers.

In models with sliding windows, the layers of full attention have no RoPE.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.architectures.transformer import TransformerModel
from penstock.errors import ConfigError
from penstock.nn import FULL, SLIDING, Blueprint, layer_types, layer_windows, num_layers

if TYPE_CHECKING:
    from penstock.config import HuggingFaceConfig


class Exaone4Model(TransformerModel):
    """Reads the configuration of EXAONE 4 and builds its network."""

    @classmethod
    def blueprint(cls, huggingface_config: HuggingFaceConfig) -> Blueprint:
        config = huggingface_config
        has_windows = config.optional_integer("sliding_window", _DEFAULT_WINDOW) is not None
        types = layer_types(config, _default_layer_types(config, has_windows))
        return Blueprint.from_huggingface(
            config,
            norm_eps=config.number("rms_norm_eps", 1e-5),
            block_norms="after",
            head_norms="each",
            windows=layer_windows(config, types, _DEFAULT_WINDOW, has_windows=has_windows),
            rotary_indices=tuple(0 if kind == SLIDING or not has_windows else None for kind in types),
        )


def _default_layer_types(config: HuggingFaceConfig, has_windows: bool) -> tuple[str, ...]:  # [L]
    """Return the types of the layers for a file without ``layer_types``.

    Without windows, all layers have full attention. ``sliding_window_pattern`` is a number n or a string.
    With a number, each n-th layer has full attention. A string such as LLLG repeats over the layers: L is a
    layer with a window, G a layer with full attention.

    Raises:
        ConfigError: ``sliding_window_pattern`` is an empty string or has letters other than L and G.
        CheckpointError: ``sliding_window_pattern`` is neither a whole number nor a string.
    """
    layers, pattern = range(num_layers(config)), config.get("sliding_window_pattern")
    if not has_windows:
        return (FULL,) * len(layers)
    if isinstance(pattern, str):
        if not pattern or set(pattern) - set("LG"):
            raise ConfigError(
                "sliding_window_pattern",
                f"must be a number or a string of the letters L and G, was {pattern!r}",
            )
        return tuple(SLIDING if pattern[layer % len(pattern)] == "L" else FULL for layer in layers)
    period = config.integer("sliding_window_pattern", 4)
    return tuple(SLIDING if (layer + 1) % period else FULL for layer in layers)


_DEFAULT_WINDOW = 4096
