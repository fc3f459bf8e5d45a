"""ModernBERT (Warner et al. 2024, arXiv:2412.13663): pre-norm blocks, most of them with a window."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from penstock.architectures.encoder import EncoderModel, has_head
from penstock.architectures.post_norm import prefix_remover
from penstock.errors import ConfigError
from penstock.host.heartbeat import beat
from penstock.kernels import Activation, StepInputs
from penstock.nn import (
    FULL,
    SLIDING,
    ClassificationHead,
    EncoderAttention,
    GatedMLP,
    LayerNorm,
    Loader,
    MaskedLMHead,
    Rotary,
    RotaryConfig,
    RotaryRows,
    TensorNames,
    activation_named,
    layer_types,
    num_labels,
    num_layers,
)
from penstock.nn.encoder_heads import head_activation, plain_linear
from penstock.pipelines.core import PoolingType

if TYPE_CHECKING:
    from penstock.config import HuggingFaceConfig

_ROTARY_LAYER_TYPES = (FULL, SLIDING)
"""The layer type of each rotary embedding."""
_OLDER_ROPE_THETAS = {FULL: ("global_rope_theta", 160_000.0), SLIDING: ("local_rope_theta", 10_000.0)}
"""For each layer type: the key of the RoPE base in older ``config.json`` files, and its default."""
_POOLINGS: dict[str, PoolingType] = {"cls": "cls", "mean": "mean"}


@dataclass(frozen=True, slots=True)
class ModernBertBlock:
    """Attention and a gated feed-forward layer, each after a norm. In block 0, attention has no norm."""

    attention_norm: LayerNorm | None
    attention: EncoderAttention
    mlp_norm: LayerNorm
    mlp: GatedMLP

    def __call__(
        self, x: Tensor, residual: Tensor | None, step: StepInputs, rows: Sequence[RotaryRows]
    ) -> tuple[Tensor, Tensor]:
        """Return the output of the feed-forward layer, and the residual to which the caller must add it.

        ``x [T, E]`` is the output of the previous block, not yet added to ``residual [T, E]``. In block 0,
        ``residual`` is None.
        """
        if self.attention_norm is None or residual is None:
            normalized, total = x, x
        else:
            normalized, total = self.attention_norm.add(x, residual, step)
        normalized, total = self.mlp_norm.add(self.attention(normalized, step, rows), total, step)
        return self.mlp(normalized, step), total


@dataclass(frozen=True, slots=True)
class ModernBertNetwork:
    """Embeddings, their norm, pre-norm blocks and a final norm."""

    embedding_table: Tensor  # [V, E]
    norm: LayerNorm
    rotaries: tuple[Rotary, ...]
    blocks: tuple[ModernBertBlock, ...]
    final_norm: LayerNorm
    classifier: ClassificationHead | None = None
    masked_lm_head: MaskedLMHead | None = None

    @property
    def is_length_dependent(self) -> bool:
        """Whether the angles of a rotary embedding depend on the sequence length."""
        return any(rotary.is_length_dependent for rotary in self.rotaries)

    def __call__(self, tokens: Tensor, step: StepInputs, token_types: Tensor | None = None) -> Tensor:
        """``tokens [T]`` -> hidden states ``[T, E]``; the family has no token types."""
        x, residual = self.norm(step.ops.embedding(tokens, self.embedding_table), step), None
        rows = [rotary.rows(step) for rotary in self.rotaries]
        for block in self.blocks:
            x, residual = block(x, residual, step, rows)
            beat()
        assert residual is not None
        return self.final_norm.add(x, residual, step)[0]


class ModernBertModel(EncoderModel):
    """The `PipelineModel` of ModernBERT."""

    weights_adapter = prefix_remover("model.")
    ignored_weights = ("head.*", "decoder.*", "*rotary_emb*inv_freq")

    @property
    def classifier_pooling(self) -> PoolingType:
        kind = self.huggingface_config.text("classifier_pooling", "cls")
        if kind not in _POOLINGS:
            raise ConfigError("classifier_pooling", f"{kind!r} is not known: use {', '.join(_POOLINGS)}")
        return _POOLINGS[kind]

    @classmethod
    def tensor_names(cls, huggingface_config: HuggingFaceConfig) -> TensorNames:
        return TensorNames(prefix="", embedding="embeddings.tok_embeddings", head="decoder")

    @classmethod
    def max_positions(cls, huggingface_config: HuggingFaceConfig) -> int:
        return min(rotary.max_length for rotary in _rotaries(huggingface_config))

    @classmethod
    def build(cls, load: Loader, huggingface_config: HuggingFaceConfig, max_length: int) -> ModernBertNetwork:
        config = huggingface_config
        hidden = config.integer("hidden_size")
        tokens = load.table("embeddings.tok_embeddings", config.integer("vocab_size"), hidden)
        types = _layer_types(config)
        network = ModernBertNetwork(
            tokens,
            _norm(load, config, "embeddings.norm"),
            tuple(Rotary(rotary, max_length, load.device) for rotary in _rotaries(config)),
            tuple(_load_block(load, config, layer, kind) for layer, kind in enumerate(types)),
            _norm(load, config, "final_norm"),
            _classifier(load, config) if has_head(config, "ForSequenceClassification") else None,
            _masked_lm_head(load, config, tokens) if has_head(config, "ForMaskedLM") else None,
        )
        return network


def _layer_types(config: HuggingFaceConfig) -> tuple[str, ...]:
    period = config.integer("global_attn_every_n_layers", 3)
    default = tuple(SLIDING if layer % period else FULL for layer in range(num_layers(config)))
    return layer_types(config, default)


def _head_dim(config: HuggingFaceConfig) -> int:
    hidden, heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    if hidden % heads:
        raise ConfigError("num_attention_heads", f"{heads} heads do not divide hidden_size {hidden}")
    return hidden // heads


def _rotaries(config: HuggingFaceConfig) -> tuple[RotaryConfig, ...]:
    """Return the rotary configurations of the types `FULL` and `SLIDING`.

    ``rope_parameters`` takes precedence over the keys of older ``config.json`` files.
    """
    rope_section = config.section("rope_parameters")

    def rotary(layer_type: str) -> RotaryConfig:
        key, default = _OLDER_ROPE_THETAS[layer_type]
        parameters = {"rope_theta": config.number(key, default)} | dict(rope_section.section(layer_type))
        return RotaryConfig.from_huggingface(config, _head_dim(config), parameters=parameters)

    return tuple(rotary(layer_type) for layer_type in _ROTARY_LAYER_TYPES)


def _norm(load: Loader, config: HuggingFaceConfig, name: str) -> LayerNorm:
    size, eps = config.integer("hidden_size"), config.number("norm_eps", 1e-5)
    return load.layer_norm(name, size, eps, bias=config.flag("norm_bias"), is_float32=True)


def _load_block(load: Loader, config: HuggingFaceConfig, layer: int, layer_type: str) -> ModernBertBlock:
    name, hidden, dim = f"layers.{layer}", config.integer("hidden_size"), _head_dim(config)
    heads = config.integer("num_attention_heads")
    attention_bias = config.flag("attention_bias")
    attention = EncoderAttention(
        load.linear(f"{name}.attn.Wqkv", 3 * hidden, hidden, bias=attention_bias),
        load.linear(f"{name}.attn.Wo", hidden, hidden, bias=attention_bias),
        heads,
        heads,
        dim,
        dim**-0.5,
        window=config.integer("local_attention", 128) // 2 if layer_type == SLIDING else None,
        rotary_index=_ROTARY_LAYER_TYPES.index(layer_type),
    )
    mlp = GatedMLP.load(
        load,
        f"{name}.mlp",
        hidden,
        config.integer("intermediate_size"),
        activation_named(config.get("hidden_activation") or "gelu", "hidden_activation"),
        bias=config.flag("mlp_bias"),
        gate_up=("Wi",),
        down="Wo",
    )
    attention_norm = _norm(load, config, f"{name}.attn_norm") if layer else None
    return ModernBertBlock(attention_norm, attention, _norm(load, config, f"{name}.mlp_norm"), mlp)


def _head_activation(config: HuggingFaceConfig) -> Activation:
    return activation_named(config.get("classifier_activation") or "gelu", "classifier_activation")


def _classifier(load: Loader, config: HuggingFaceConfig) -> ClassificationHead:
    hidden = config.integer("hidden_size")
    return ClassificationHead(
        plain_linear(load, "classifier", num_labels(config), hidden),
        plain_linear(load, "head.dense", hidden, hidden, bias=config.flag("classifier_bias")),
        head_activation(_head_activation(config)),
        _norm(load, config, "head.norm"),
    )


def _masked_lm_head(load: Loader, config: HuggingFaceConfig, tokens: Tensor) -> MaskedLMHead:
    vocab_size, hidden = tokens.shape
    is_tied = "decoder.weight" not in load.source
    weight = tokens if is_tied else load.source.tensor("decoder.weight", (vocab_size, hidden))
    bias = load.source.tensor("decoder.bias", (vocab_size,)) if config.flag("decoder_bias", True) else None
    return MaskedLMHead(
        plain_linear(load, "head.dense", hidden, hidden, bias=config.flag("classifier_bias")),
        _head_activation(config),
        _norm(load, config, "head.norm"),
        load.pack(weight, {"decoder": vocab_size}, bias=bias),
    )
