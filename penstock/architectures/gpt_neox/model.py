"""GPT-NeoX (Black et al. 2022, arXiv:2204.06745): parallel attention and feed-forward layers.

Each of the two layers has its own norm. The feed-forward layer is ungated and has biases. If
``use_parallel_residual`` is false, the feed-forward layer follows attention.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from penstock.architectures.transformer import TransformerModel
from penstock.errors import ConfigError
from penstock.kernels import StepInputs
from penstock.nn import (
    Attention,
    BlockParts,
    Blueprint,
    LoadBlock,
    Loader,
    ParallelBlock,
    TensorNames,
    attentions,
    check_head_dim,
    layer_norms,
    plain_mlps,
)

if TYPE_CHECKING:
    from penstock.config import HuggingFaceConfig

_NAMES = TensorNames(
    prefix="gpt_neox.",
    embedding="embed_in",
    head="embed_out",
    norm="final_layer_norm",
    attention="attention",
    qkv=("query_key_value",),
    output="dense",
    gate_up=("dense_h_to_4h",),
    down="dense_4h_to_h",
)


@dataclass(frozen=True, slots=True)
class GPTNeoXAttention(Attention):
    """Attention whose fused matrix stores query, key and value of head 0, then of head 1, and so on."""

    is_qkv_per_head = True

    def _project(self, x: Tensor, step: StepInputs) -> tuple[Tensor, Tensor, Tensor]:
        heads = self.qkv(x, step).view(-1, self.heads, 3, self.head_dim)  # [T, H, 3, D]
        return heads[:, :, 0], heads[:, :, 1], heads[:, :, 2]


def rename_head(name: str) -> str:
    """Return a tensor name as in EleutherAI's files. Some other files call the head ``lm_head``."""
    return name.replace("lm_head.", "embed_out.") if name.startswith("lm_head.") else name


class GPTNeoXModel(TransformerModel):
    """Reads the configuration of GPT-NeoX and builds its network."""

    ignored_weights = (
        "*rotary_emb.inv_freq",
        "*.attention.bias",  # attention masks
        "*.attention.masked_bias",
    )
    weights_adapter = rename_head

    @classmethod
    def blueprint(cls, huggingface_config: HuggingFaceConfig) -> Blueprint:
        config = huggingface_config
        check_head_dim(config)
        heads = config.integer("num_attention_heads")
        if config.get("num_key_value_heads") not in (None, heads):
            raise ConfigError(
                "num_key_value_heads",
                f"is {config.get('num_key_value_heads')!r}, but this family has a key for each of its "
                f"{heads} heads",
            )
        attention_bias = config.flag("attention_bias", True)
        return Blueprint.from_huggingface(
            config,
            default_activation="gelu",
            default_rope_theta=config.number("rotary_emb_base", 10000.0),
            default_partial_rotary_factor=config.number("rotary_pct", 0.25),
            names=_NAMES,
            norm_eps=config.number("layer_norm_eps", 1e-5),
            qkv_bias=attention_bias,
            output_bias=attention_bias,
            mlp_bias=True,
        )

    @classmethod
    def parts(cls, load: Loader, blueprint: Blueprint, huggingface_config: HuggingFaceConfig) -> BlockParts:
        return BlockParts(
            attentions(load, blueprint, GPTNeoXAttention),
            plain_mlps(load, blueprint),
            layer_norms(load, blueprint),
        )

    @classmethod
    def block(
        cls, load: Loader, blueprint: Blueprint, huggingface_config: HuggingFaceConfig, parts: BlockParts
    ) -> LoadBlock:
        if not huggingface_config.flag("use_parallel_residual", True):
            return super().block(load, blueprint, huggingface_config, parts)
        return lambda layer: ParallelBlock.load(load, blueprint, layer, parts, num_norms=2)
