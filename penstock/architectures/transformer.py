"""`TransformerModel`: a decoder that a `Blueprint` describes.

An architecture is a subclass that reads a blueprint from ``config.json``. The default blocks are Llama's. An
architecture overrides `feed_forward` for another feed-forward layer, `parts` for other norms or another
attention, and `block` for another order of these parts.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

from penstock.architectures.decoder import DecoderModel, Network, kv_dtype
from penstock.config import upper_bounded_default
from penstock.kv_cache import KVCacheSpec, KVGroup
from penstock.nn import (
    BlockParts,
    Blueprint,
    DecoderBlock,
    DecoderNetwork,
    LoadBlock,
    Loader,
    LoadFeedForward,
    TensorNames,
    gated_mlps,
    llama_parts,
)

if TYPE_CHECKING:
    from penstock.config import HuggingFaceConfig, PipelineConfig


class TransformerModel(DecoderModel):
    """A decoder-only transformer that a `Blueprint` describes."""

    supports_tensor_parallelism = True
    head_bias: ClassVar[bool] = False
    """Whether the output head has a bias."""

    @classmethod
    @abstractmethod
    def blueprint(cls, huggingface_config: HuggingFaceConfig) -> Blueprint:
        """Read the blueprint from a checkpoint's configuration.

        Raises:
            ConfigError: the configuration has a feature that this family does not support.
            CheckpointError: a value is missing or has the wrong type.
        """

    @classmethod
    def feed_forward(
        cls, load: Loader, blueprint: Blueprint, huggingface_config: HuggingFaceConfig
    ) -> LoadFeedForward:
        """Return a function that reads the feed-forward layer of a block."""
        return gated_mlps(load, blueprint)

    @classmethod
    def parts(cls, load: Loader, blueprint: Blueprint, huggingface_config: HuggingFaceConfig) -> BlockParts:
        """Return functions that read the parts of a block; by default Llama's attention and norms."""
        feed_forward = cls.feed_forward(load, blueprint, huggingface_config)
        return replace(llama_parts(load, blueprint), feed_forward=feed_forward)

    @classmethod
    def block(
        cls, load: Loader, blueprint: Blueprint, huggingface_config: HuggingFaceConfig, parts: BlockParts
    ) -> LoadBlock:
        """Return a function that reads a block; by default a `DecoderBlock`."""
        return lambda layer: DecoderBlock.load(load, blueprint, layer, parts)

    @classmethod
    def tensor_names(cls, huggingface_config: HuggingFaceConfig) -> TensorNames:
        return cls.blueprint(huggingface_config).names

    @classmethod
    def calculate_max_seq_len(
        cls, pipeline_config: PipelineConfig, huggingface_config: HuggingFaceConfig
    ) -> int:
        longest = cls.blueprint(huggingface_config).max_length
        return upper_bounded_default(longest, pipeline_config.model.max_length)

    @classmethod
    def kv_spec(cls, pipeline_config: PipelineConfig, huggingface_config: HuggingFaceConfig) -> KVCacheSpec:
        blueprint = cls.blueprint(huggingface_config)
        dtype = kv_dtype(pipeline_config)
        layers_by_window: dict[int | None, list[int]] = {}
        for layer, window in enumerate(blueprint.windows):
            layers_by_window.setdefault(window, []).append(layer)
        max_lengths = {rotary.short_factor_max_length for rotary in blueprint.rotaries}
        return KVCacheSpec(
            tuple(
                KVGroup(tuple(layers), blueprint.kv_heads, blueprint.head_dim, dtype, window)
                for window, layers in layers_by_window.items()
            ),
            key_limits=tuple(sorted(length for length in max_lengths if length is not None)),
            shares_prefixes=all(rotary.kind != "dynamic" for rotary in blueprint.rotaries),
        )

    @classmethod
    def build(cls, load: Loader, huggingface_config: HuggingFaceConfig, max_length: int) -> Network:
        blueprint = cls.blueprint(huggingface_config)
        parts = cls.parts(load, blueprint, huggingface_config)
        block = cls.block(load, blueprint, huggingface_config, parts)
        return DecoderNetwork.load(load, blueprint, max_length, parts, block, head_bias=cls.head_bias)
