"""The Llama network (Touvron et al. 2023, arXiv:2302.13971)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from penstock.kernels import StepInputs
from penstock.nn import Attention, Embedding, GatedMLP, Linear, Loader, RMSNorm, Rotary, RotaryRows
from penstock.pipelines.architectures.llama.config import LlamaConfig
from penstock.pipelines.config import upper_bounded_default
from penstock.pipelines.decoder import DecoderModel, kv_dtype
from penstock.pipelines.kv_cache import KVCacheSpec, KVGroup

if TYPE_CHECKING:
    from penstock.pipelines.config import HuggingFaceConfig, PipelineConfig


@dataclass(frozen=True, slots=True)
class LlamaBlock:
    """Attention, then the feed-forward layer, each behind a norm and added to what it read."""

    attention_norm: RMSNorm
    attention: Attention
    mlp_norm: RMSNorm
    mlp: GatedMLP

    @classmethod
    def load(cls, load: Loader, config: LlamaConfig, layer: int) -> LlamaBlock:
        name = f"model.layers.{layer}"
        return cls(
            load.norm(f"{name}.input_layernorm", config.hidden, config.norm_eps),
            Attention.load(
                load,
                f"{name}.self_attn",
                layer=layer,
                hidden=config.hidden,
                heads=config.heads,
                kv_heads=config.kv_heads,
                head_dim=config.head_dim,
                bias=config.attention_bias,
                output_bias=config.attention_bias,
            ),
            load.norm(f"{name}.post_attention_layernorm", config.hidden, config.norm_eps),
            GatedMLP.load(
                load, f"{name}.mlp", config.hidden, config.inner, config.activation, config.mlp_bias
            ),
        )

    def __call__(
        self,
        x: Tensor,  # [T, E]: what the block before added
        residual: Tensor | None,  # [T, E]: the sum before that
        rows: RotaryRows,
        step: StepInputs,
    ) -> tuple[Tensor, Tensor]:
        x, residual = self.attention_norm.add(x, residual, step)
        x = self.attention(x, rows, step)
        x, residual = self.mlp_norm.add(x, residual, step)
        return self.mlp(x, step), residual


@dataclass(frozen=True, slots=True)
class LlamaNetwork:
    """Embedding, blocks, final norm and head."""

    embedding: Embedding
    rotary: Rotary
    blocks: tuple[LlamaBlock, ...]
    norm: RMSNorm
    head: Linear

    @classmethod
    def load(cls, load: Loader, config: LlamaConfig, max_length: int) -> LlamaNetwork:
        table = load.tensor("model.embed_tokens.weight", config.vocabulary, config.hidden)
        return cls(
            Embedding(table),
            Rotary(config.rotary, max_length, load.device),
            tuple(LlamaBlock.load(load, config, layer) for layer in range(config.layers)),
            load.norm("model.norm", config.hidden, config.norm_eps),
            load.head(
                "lm_head", config.vocabulary, config.hidden, tied_to=table if config.tied_head else None
            ),
        )

    @property
    def length_dependent(self) -> bool:
        return self.rotary.length_dependent

    def __call__(
        self, tokens: Tensor, step: StepInputs, input_embeds: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, Tensor]:
        x, residual = self.embedding(tokens, step, input_embeds), None  # [T, E]
        rows = self.rotary.rows(step)
        for block in self.blocks:
            x, residual = block(x, residual, rows, step)
        normed, hidden = self.norm.add(x, residual, step)
        return hidden, normed


class LlamaModel(DecoderModel):
    """Llama as a pipeline model."""

    ignored_weights = ("*rotary_emb.inv_freq", "lm_head.weight")  # a tied head may be in the file twice

    @classmethod
    def calculate_max_seq_len(
        cls, pipeline_config: PipelineConfig, huggingface_config: HuggingFaceConfig
    ) -> int:
        rotary = LlamaConfig.from_huggingface(huggingface_config).rotary
        return upper_bounded_default(rotary.max_length, pipeline_config.model.max_length)

    @classmethod
    def kv_spec(cls, pipeline_config: PipelineConfig, huggingface_config: HuggingFaceConfig) -> KVCacheSpec:
        config = LlamaConfig.from_huggingface(huggingface_config)
        dtype = kv_dtype(pipeline_config)
        layers = tuple(range(config.layers))
        return KVCacheSpec((KVGroup(layers, config.kv_heads, config.head_dim, dtype),))

    @classmethod
    def build(cls, load: Loader, huggingface_config: HuggingFaceConfig, max_length: int) -> LlamaNetwork:
        return LlamaNetwork.load(load, LlamaConfig.from_huggingface(huggingface_config), max_length)
