"""`HybridModel`: a decoder of layers with linear attention and layers with full attention."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar, cast

from penstock.architectures.decoder import kv_dtype
from penstock.architectures.transformer import TransformerModel
from penstock.config import HuggingFaceConfig
from penstock.errors import ConfigError
from penstock.kernels.encodings import encoding_named
from penstock.kv_cache import KVCacheSpec, KVGroup, StateSpec
from penstock.nn import (
    FULL,
    Attention,
    BlockParts,
    Blueprint,
    GatedAttention,
    LinearAttention,
    LinearAttentionSizes,
    Loader,
    llama_parts,
    num_layers,
)

if TYPE_CHECKING:
    from penstock.config import PipelineConfig

LINEAR = "linear_attention"
"""The type of a layer with linear attention."""

CONVOLUTION_SUFFIX = ".conv1d.weight"
"""The end of the tensor name of the convolution of linear attention, see `TensorNames.other_tables`."""
GATE_SUFFIXES = (".in_proj_a.weight", ".in_proj_b.weight", ".in_proj_ba.weight")
"""The ends of the tensor names of the gates of linear attention, see `TensorNames.unquantized`."""


class HybridModel(TransformerModel):
    """A decoder of layers with linear attention and layers with gated full attention.

    A layer with linear attention has a state of constant size for each sequence, see `KVCacheSpec.states`.
    """

    supports_tensor_parallelism = False
    ignored_weights = (*TransformerModel.ignored_weights, "mtp.*")  # multi-token prediction layers
    is_by_key_head: ClassVar[bool] = False
    """Whether the checkpoints store the projections of linear attention by key head, as Qwen3-Next does."""

    @classmethod
    def parts(cls, load: Loader, blueprint: Blueprint, huggingface_config: HuggingFaceConfig) -> BlockParts:
        types, names = hybrid_layer_types(huggingface_config), blueprint.names
        sizes = LinearAttentionSizes.from_huggingface(huggingface_config)

        def read(name: str, layer: int) -> Attention:
            index = types[:layer].count(types[layer])
            if types[layer] == FULL:
                return GatedAttention.load(load, blueprint, name, cache_layer=index)
            linear_attention = LinearAttention.load(
                load,
                name.removesuffix(names.attention) + "linear_attn",
                blueprint.hidden,
                sizes,
                blueprint.norm_eps,
                layer=index,
                is_by_key_head=cls.is_by_key_head,
            )
            return cast(Attention, linear_attention)  # a block only calls its attention

        feed_forward = cls.feed_forward(load, blueprint, huggingface_config)
        return replace(llama_parts(load, blueprint), attention=read, feed_forward=feed_forward)

    @classmethod
    def kv_spec(cls, pipeline_config: PipelineConfig, huggingface_config: HuggingFaceConfig) -> KVCacheSpec:
        blueprint = cls.blueprint(huggingface_config)
        types = hybrid_layer_types(huggingface_config)
        sizes = LinearAttentionSizes.from_huggingface(huggingface_config)
        group = KVGroup(
            tuple(range(types.count(FULL))), blueprint.kv_heads, blueprint.head_dim, kv_dtype(pipeline_config)
        )
        states = StateSpec(
            num_layers=types.count(LINEAR),
            heads=sizes.heads,
            key_dim=sizes.key_dim,
            value_dim=sizes.value_dim,
            channels=sizes.channels,
            kernel=sizes.kernel,
            dtype=encoding_named(pipeline_config.model.encoding).compute_dtype,
        )
        return KVCacheSpec((group,), states=states)


def hybrid_layer_types(config: HuggingFaceConfig) -> tuple[str, ...]:
    """Return `LINEAR` or `FULL` for each layer, as in ``layer_types``.

    Without ``layer_types``, each n-th layer has full attention; n is ``full_attention_interval``, or 4.

    Raises:
        ConfigError: ``layer_types`` does not name one of the two types for each layer, or lacks a type.
    """
    count, types = num_layers(config), config.get("layer_types")
    if types is None:
        interval = config.integer("full_attention_interval", 4)
        types = [LINEAR if (layer + 1) % interval else FULL for layer in range(count)]
    if not isinstance(types, list) or len(types) != count:
        raise ConfigError("layer_types", f"must be a list of {count} names, was {types!r}")
    unknown = [name for name in types if name not in (FULL, LINEAR)]
    if unknown:
        raise ConfigError("layer_types", f"{unknown[0]!r} is not known: use {FULL} or {LINEAR}")
    if len(set(types)) == 1:
        raise ConfigError("layer_types", f"must have layers of {FULL} and of {LINEAR}, all are {types[0]}")
    return tuple(types)
