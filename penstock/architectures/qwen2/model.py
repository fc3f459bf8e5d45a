"""Qwen 2 (Yang et al. 2024, arXiv:2407.10671): Llama with biases of queries, keys and values."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.architectures.transformer import TransformerModel
from penstock.nn import FULL, SLIDING, Blueprint, layer_types, layer_windows, num_layers

if TYPE_CHECKING:
    from penstock.config import HuggingFaceConfig


class Qwen2Model(TransformerModel):
    """Reads the configuration of Qwen 2 and builds its network."""

    @classmethod
    def blueprint(cls, huggingface_config: HuggingFaceConfig) -> Blueprint:
        return Blueprint.from_huggingface(
            huggingface_config, qkv_bias=True, windows=upper_layer_windows(huggingface_config)
        )


def upper_layer_windows(config: HuggingFaceConfig) -> tuple[int | None, ...]:
    """Return the window of each layer; None for full attention.

    ``layer_types`` determines the layers with a window. If it is absent, the layers from index
    ``max_window_layers`` on have a window. If it is absent and ``use_sliding_window`` is false or
    ``sliding_window`` is null, no layer has a window.

    Raises:
        ConfigError: ``layer_types`` has sliding attention, but no window is configured.
    """
    first_window_layer = config.integer("max_window_layers", 28, minimum=0)
    layers = num_layers(config)
    has_windows = (
        config.flag("use_sliding_window")
        and config.optional_integer("sliding_window", _DEFAULT_WINDOW) is not None
    )
    default = tuple(
        SLIDING if has_windows and layer >= first_window_layer else FULL for layer in range(layers)
    )
    types = layer_types(config, default)
    return layer_windows(config, types, _DEFAULT_WINDOW, has_windows=has_windows)


_DEFAULT_WINDOW = 4096
