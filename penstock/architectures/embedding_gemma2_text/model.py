"""The text model of EmbeddingGemma 2: Gemma's blocks with bidirectional attention.

Layers with and without a window can differ in the number of kv heads and in the head size. Each block gets an
additional input: a projection of the embeddings (per-layer embeddings, as in Gemma 3n and Gemma 4).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from penstock.architectures.embedder import remove_model_prefix
from penstock.architectures.embedding_gemma2_text.network import EmbeddingGemma2Network, NormedAttention
from penstock.architectures.encoder import EncoderModel
from penstock.architectures.gemma4_text.config import LAYER_TYPES, gemma4_layer_types, layer_head_sizes
from penstock.architectures.gemma4_text.network import Gemma4Block, LayerInput
from penstock.kernels import Activation
from penstock.nn import (
    FULL,
    SLIDING,
    GatedMLP,
    Loader,
    RMSNorm,
    Rotary,
    RotaryConfig,
    TensorNames,
    activation_named,
    load_embedding,
    num_layers,
)

if TYPE_CHECKING:
    from penstock.config import HuggingFaceConfig

_DEFAULT_ROPE_THETAS = {FULL: 1_000_000.0, SLIDING: 10_000.0}
_FULL_HEAD_DIM, _FULL_NUM_KV_HEADS = 512, 1
"""Head size and number of kv heads of full-attention layers if there is no ``per_layer_config``."""


class EmbeddingGemma2TextModel(EncoderModel):
    """Reads the configuration of EmbeddingGemma 2's text model and builds its network."""

    weights_adapter = remove_model_prefix

    @classmethod
    def text_config(cls, config: HuggingFaceConfig) -> HuggingFaceConfig:
        """Return the configuration of the text model."""
        return config

    @classmethod
    def output_size(cls, huggingface_config: HuggingFaceConfig) -> int:
        return cls.text_config(huggingface_config).integer("embedding_dim", 768)

    @classmethod
    def tensor_names(cls, huggingface_config: HuggingFaceConfig) -> TensorNames:
        return TensorNames(prefix="")

    @classmethod
    def max_positions(cls, huggingface_config: HuggingFaceConfig) -> int:
        config = cls.text_config(huggingface_config)
        return min(rotary.max_length for rotary in _rotaries(config).values())

    @classmethod
    def build(
        cls, load: Loader, huggingface_config: HuggingFaceConfig, max_length: int
    ) -> EmbeddingGemma2Network:
        config = cls.text_config(huggingface_config)
        vocab_size, hidden = config.integer("vocab_size"), config.integer("hidden_size")
        per_layer_size, layers = config.integer("hidden_size_per_layer_input", 512), num_layers(config)
        scale = float(torch.tensor(hidden**0.5, dtype=load.dtype))
        rotaries = _rotaries(config)
        types = gemma4_layer_types(config)
        return EmbeddingGemma2Network(
            load_embedding(load, load.table("embed_tokens", vocab_size, hidden), vocab_size, scale),
            load.linear("ple.per_layer_model_projection", layers * per_layer_size, hidden),
            hidden**-0.5,
            _norm(load, config, "ple.per_layer_projection_norm", per_layer_size),
            tuple(Rotary(rotaries[layer_type], max_length, load.device) for layer_type in LAYER_TYPES),
            tuple(_block(load, config, layer, layer_type) for layer, layer_type in enumerate(types)),
            _norm(load, config, "norm", hidden),
            load.linear("embedding_projection", cls.output_size(huggingface_config), hidden),
        )


def _head_sizes(config: HuggingFaceConfig, layer: int, layer_type: str) -> tuple[int, int, int]:
    """Return the number of heads, the number of kv heads and the head size of a layer."""
    kv_heads, head_dim = config.integer("num_key_value_heads", 2), config.integer("head_dim", 256)
    if "per_layer_config" not in config and layer_type == FULL:
        kv_heads, head_dim = _FULL_NUM_KV_HEADS, _FULL_HEAD_DIM
    return layer_head_sizes(config, layer, kv_heads, head_dim)


def _rotaries(config: HuggingFaceConfig) -> Mapping[str, RotaryConfig]:
    """Return the configuration of the rotary embedding of each layer type.

    A layer type that does not occur in the model gets the head size of the last layer.
    """
    rope_section, types = config.section("rope_parameters"), gemma4_layer_types(config)
    configs = {}
    for layer_type in LAYER_TYPES:
        layer = types.index(layer_type) if layer_type in types else len(types) - 1
        parameters = {
            "rope_theta": _DEFAULT_ROPE_THETAS[layer_type],
            **rope_section.section(layer_type).to_dict(),
        }
        head_dim = _head_sizes(config, layer, types[layer])[2]
        configs[layer_type] = RotaryConfig.from_huggingface(
            config, head_dim, parameters=parameters, supports_partial=False
        )
    return configs


def _norm(load: Loader, config: HuggingFaceConfig, name: str, size: int) -> RMSNorm:
    return load.norm(name, size, config.number("rms_norm_eps", 1e-6))


def _attention(load: Loader, config: HuggingFaceConfig, layer: int, layer_type: str) -> NormedAttention:
    name, hidden = f"layers.{layer}.self_attn", config.integer("hidden_size")
    heads, kv_heads, dim = _head_sizes(config, layer, layer_type)
    bias = config.flag("attention_bias")
    parts = {"q_proj": heads * dim, "k_proj": kv_heads * dim, "v_proj": kv_heads * dim}
    unit_weights = torch.ones(dim, dtype=load.dtype, device=load.device)
    return NormedAttention(
        load.fused(name, parts, hidden, bias=bias),
        load.linear(f"{name}.o_proj", hidden, heads * dim, bias=bias),
        heads,
        kv_heads,
        dim,
        _norm(load, config, f"{name}.q_norm", dim),
        _norm(load, config, f"{name}.k_norm", dim),
        RMSNorm(unit_weights, config.number("rms_norm_eps", 1e-6)),
        LAYER_TYPES.index(layer_type),
        config.integer("sliding_window", 512) if layer_type == SLIDING else None,
    )


def _block(load: Loader, config: HuggingFaceConfig, layer: int, layer_type: str) -> Gemma4Block:
    name, hidden = f"layers.{layer}", config.integer("hidden_size")
    per_layer_size = config.integer("hidden_size_per_layer_input", 512)
    activation = _activation(config)

    def norms(before: str, after: str) -> tuple[RMSNorm, RMSNorm]:
        return _norm(load, config, f"{name}.{before}", hidden), _norm(load, config, f"{name}.{after}", hidden)

    return Gemma4Block(
        norms("input_layernorm", "post_attention_layernorm"),
        _attention(load, config, layer, layer_type),
        norms("pre_feedforward_layernorm", "post_feedforward_layernorm"),
        GatedMLP.load(load, f"{name}.mlp", hidden, config.integer("intermediate_size"), activation),
        None,
        LayerInput(
            load.linear(f"{name}.ple_block.per_layer_input_gate", per_layer_size, hidden),
            load.linear(f"{name}.ple_block.per_layer_projection", hidden, per_layer_size),
            _norm(load, config, f"{name}.ple_block.post_per_layer_input_norm", hidden),
            activation,
        ),
        load.number(f"{name}.layer_scalar", 1),
    )


def _activation(config: HuggingFaceConfig) -> Activation:
    return activation_named(config.get("hidden_activation") or "gelu_pytorch_tanh", "hidden_activation")
