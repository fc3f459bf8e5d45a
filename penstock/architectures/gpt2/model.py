"""GPT-2 (Radford et al. 2019): learned positions, layer norms, ungated MLPs, biases in attention and MLP."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from penstock.architectures.decoder import DecoderModel, kv_dtype
from penstock.architectures.gpt2.config import NAMES, GPT2Config
from penstock.config import upper_bounded_default
from penstock.distributed import Part
from penstock.host.heartbeat import beat
from penstock.kernels import StepInputs
from penstock.kv_cache import KVCacheSpec, KVGroup
from penstock.nn import (
    MLP,
    Attention,
    Embedding,
    Head,
    LayerNorm,
    Linear,
    Loader,
    TensorNames,
    load_embedding,
)

if TYPE_CHECKING:
    from penstock.config import HuggingFaceConfig, PipelineConfig


@dataclass(frozen=True, slots=True)
class GPT2Block:
    """Attention, then the feed-forward layer. Each has a norm before it and a residual connection."""

    attention_norm: LayerNorm
    attention: Attention
    mlp_norm: LayerNorm
    mlp: MLP

    @classmethod
    def load(cls, load: Loader, config: GPT2Config, layer: int) -> GPT2Block:
        """Read block ``layer``. Weights of its linear layers are stored ``[in, out]``."""
        name, hidden, inner = NAMES.block_path(layer), config.hidden, config.inner
        heads = load.shard.attention(config.heads, config.heads).heads
        inner_part = load.inner_part(f"{name}.mlp.c_proj", inner)
        rows = heads.times(config.head_dim)
        is_whole = load.shard.is_whole

        def linear(
            part: str,
            out_features: int,
            in_features: int,
            *,
            outputs: Sequence[Part] = (),
            inputs: Part | None = None,
        ) -> Linear:
            return load.linear(
                f"{name}.{part}",
                out_features,
                in_features,
                bias=True,
                transposed=True,
                outputs=load.rank_outputs(outputs),
                inputs=None if is_whole else inputs,
            )

        qkv = [rows.shifted(start) for start in (0, hidden, 2 * hidden)]

        return cls(
            load.layer_norm(f"{name}.ln_1", hidden, config.norm_eps),
            Attention(
                linear(f"{NAMES.attention}.{NAMES.qkv[0]}", 3 * hidden, hidden, outputs=qkv),
                linear(f"{NAMES.attention}.{NAMES.output}", hidden, hidden, inputs=rows),
                layer,
                heads.size,
                heads.size,
                config.head_dim,
                config.attention_scales[layer],
                rotary_index=None,
            ),
            load.layer_norm(f"{name}.ln_2", hidden, config.norm_eps),
            MLP(
                linear("mlp.c_fc", inner, hidden, outputs=[inner_part]),
                linear("mlp.c_proj", hidden, inner, inputs=inner_part),
                config.activation,
            ),
        )

    def __call__(self, x: Tensor, step: StepInputs) -> Tensor:  # [T, E] -> [T, E]
        x = step.ops.add(x, self.attention(self.attention_norm(x, step), (), step))
        return step.ops.add(x, self.mlp(self.mlp_norm(x, step), step))


@dataclass(frozen=True, slots=True)
class GPT2Network:
    """Embeddings of tokens and of positions, blocks, final norm and head."""

    embedding: Embedding
    positions: Embedding
    blocks: tuple[GPT2Block, ...]
    norm: LayerNorm
    head: Head
    is_length_dependent: bool = False

    @classmethod
    def load(cls, load: Loader, config: GPT2Config) -> GPT2Network:
        """Read the network."""
        vocab_size, hidden = config.vocab_size, config.hidden
        tied_head = NAMES.head if config.tied_head else None
        table = load.table(NAMES.embedding_path, vocab_size, hidden, tied_head=tied_head)
        tied_to = table if config.tied_head else None
        return cls(
            load_embedding(load, table, vocab_size),
            Embedding(load.tensor(f"{NAMES.prefix}wpe.weight", config.positions, hidden)),
            tuple(GPT2Block.load(load, config, layer) for layer in range(config.layers)),
            load.layer_norm(NAMES.norm_path, hidden, config.norm_eps),
            Head(load.head(NAMES.head, vocab_size, hidden, tied_to=tied_to)),
        )

    def __call__(
        self, tokens: Tensor, step: StepInputs, input_embeds: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, Tensor]:
        """``tokens [T]`` -> hidden states ``[T, E]`` before and after the final norm."""
        x = self.embedding(tokens, step, input_embeds)
        x = step.ops.add(x, self.positions(step.positions, step))
        for block in self.blocks:
            x = block(x, step)
            beat()
        return x, self.norm(x, step)


def with_prefix(name: str) -> str:
    """Return a tensor name with the prefix ``transformer.``, which OpenAI's checkpoints omit.

    Names of the head do not get the prefix.
    """
    return name if name.startswith((NAMES.prefix, f"{NAMES.head}.")) else f"{NAMES.prefix}{name}"


class GPT2Model(DecoderModel):
    """Reads the configuration of GPT-2 and builds its network."""

    ignored_weights = ("*.attn.bias", "*.attn.masked_bias")  # attention masks
    weights_adapter = with_prefix
    supports_tensor_parallelism = True

    @classmethod
    def tensor_names(cls, huggingface_config: HuggingFaceConfig) -> TensorNames:
        return NAMES

    @classmethod
    def calculate_max_seq_len(
        cls, pipeline_config: PipelineConfig, huggingface_config: HuggingFaceConfig
    ) -> int:
        positions = GPT2Config.from_huggingface(huggingface_config).positions
        return upper_bounded_default(positions, pipeline_config.model.max_length)

    @classmethod
    def kv_spec(cls, pipeline_config: PipelineConfig, huggingface_config: HuggingFaceConfig) -> KVCacheSpec:
        config = GPT2Config.from_huggingface(huggingface_config)
        layers, dtype = tuple(range(config.layers)), kv_dtype(pipeline_config)
        return KVCacheSpec((KVGroup(layers, config.heads, config.head_dim, dtype),))

    @classmethod
    def build(cls, load: Loader, huggingface_config: HuggingFaceConfig, max_length: int) -> GPT2Network:
        return GPT2Network.load(load, GPT2Config.from_huggingface(huggingface_config))
