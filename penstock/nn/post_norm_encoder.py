"""`PostNormEncoder`: the network of BERT and of the families that differ in names and tables only."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from penstock.host.heartbeat import beat
from penstock.kernels import Activation, StepInputs
from penstock.nn.encoder import MLP, EncoderAttention, PostNormBlock
from penstock.nn.encoder_heads import ClassificationHead, VocabularyHead
from penstock.nn.loader import Loader
from penstock.nn.norm import LayerNorm


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderNames:
    """The names of a family's tensors, without ``.weight`` and ``.bias``. The defaults are those of BERT."""

    tokens: str = "embeddings.word_embeddings"
    positions: str = "embeddings.position_embeddings"
    token_types: str | None = "embeddings.token_type_embeddings"
    norm: str = "embeddings.LayerNorm"
    block: str = "encoder.layer.{layer}"

    # Names within a block.
    qkv: tuple[str, str, str] = ("attention.self.query", "attention.self.key", "attention.self.value")
    output: str = "attention.output.dense"
    attention_norm: str = "attention.output.LayerNorm"
    up: str = "intermediate.dense"
    down: str = "output.dense"
    mlp_norm: str = "output.LayerNorm"


@dataclass(frozen=True, slots=True, kw_only=True)
class PostNormSizes:
    """The sizes and options of a `PostNormEncoder`."""

    vocabulary: int  # V
    positions: int
    """Rows of the position table."""
    first_position: int = 0
    """The row of the position table for the first token of a sequence."""
    token_types: int
    """Rows of the table of token types; 0 for none."""
    layers: int  # L
    hidden: int  # E
    inner: int  # F
    heads: int  # H
    norm_eps: float
    activation: Activation

    @property
    def max_length(self) -> int:
        """The longest sequence in tokens."""
        return self.positions - self.first_position


@dataclass(frozen=True, slots=True)
class PostNormEncoder:
    """Embeddings of tokens, positions and token types, a norm, and post-norm blocks."""

    tokens: Tensor  # [V, E]
    positions: Tensor  # [P, E]
    token_types: Tensor | None  # [types, E]
    norm: LayerNorm
    blocks: tuple[PostNormBlock, ...]
    classifier: ClassificationHead | None = None
    vocabulary: VocabularyHead | None = None
    attention_bias: Callable[[int], Tensor] | None = None
    """Returns the bias ``[H, 2P - 1]`` of all blocks for sequences of up to P tokens."""
    length_dependent: bool = False

    @classmethod
    def load(
        cls,
        load: Loader,
        sizes: PostNormSizes,
        names: EncoderNames,
        *,
        classifier: ClassificationHead | None = None,
        vocabulary: Callable[[Tensor], VocabularyHead] | None = None,
        attention_bias: Callable[[int], Tensor] | None = None,
    ) -> PostNormEncoder:
        """Read a network.

        Args:
            load: reads and packs the tensors.
            sizes: sizes and options.
            names: the names of the tensors.
            classifier: the head of a sequence classifier, already read.
            vocabulary: reads the head of a masked language model, given the token table.
            attention_bias: see the field.
        """
        hidden = sizes.hidden
        tokens = load.table(names.tokens, sizes.vocabulary, hidden)
        positions = load.tensor(f"{names.positions}.weight", sizes.positions, hidden)
        types = None
        if names.token_types is not None and sizes.token_types:
            types = load.tensor(f"{names.token_types}.weight", sizes.token_types, hidden)
        return cls(
            tokens,
            positions[sizes.first_position :],
            types,
            load.layer_norm(names.norm, hidden, sizes.norm_eps),
            tuple(_load_block(load, sizes, names, layer) for layer in range(sizes.layers)),
            classifier,
            None if vocabulary is None else vocabulary(tokens),
            attention_bias,
        )

    def __call__(self, tokens: Tensor, step: StepInputs, token_types: Tensor | None = None) -> Tensor:
        """``tokens [T]`` -> hidden states ``[T, E]``; ``token_types [T]`` are 0 by default."""
        ops = step.ops
        x = ops.add(ops.embedding(tokens, self.tokens), ops.embedding(step.positions, self.positions))
        if self.token_types is not None:
            kinds = tokens.new_zeros(tokens.shape) if token_types is None else token_types
            x = ops.add(x, ops.embedding(kinds, self.token_types))
        x = self.norm(x, step)
        bias = None
        if self.attention_bias is not None:
            bias = self.attention_bias(int(step.row_offsets.diff().max()))
        for block in self.blocks:
            x = block(x, step, bias)
            beat()
        return x


def _load_block(load: Loader, sizes: PostNormSizes, names: EncoderNames, layer: int) -> PostNormBlock:
    name, hidden, inner = names.block.format(layer=layer), sizes.hidden, sizes.inner
    dim = hidden // sizes.heads
    return PostNormBlock(
        EncoderAttention(
            load.fused(name, dict.fromkeys(names.qkv, hidden), hidden, bias=True),
            load.linear(f"{name}.{names.output}", hidden, hidden, bias=True),
            sizes.heads,
            sizes.heads,
            dim,
            dim**-0.5,
        ),
        load.layer_norm(f"{name}.{names.attention_norm}", hidden, sizes.norm_eps),
        MLP(
            load.linear(f"{name}.{names.up}", inner, hidden, bias=True),
            load.linear(f"{name}.{names.down}", hidden, inner, bias=True),
            sizes.activation,
        ),
        load.layer_norm(f"{name}.{names.mlp_norm}", hidden, sizes.norm_eps),
    )
