"""`PostNormEncoder`: the network of BERT, and of families that differ from BERT only in names and options."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from penstock.host.heartbeat import beat
from penstock.kernels import Activation, StepInputs
from penstock.nn.embedding import adapted_rows
from penstock.nn.encoder import EncoderAttention, PostNormBlock
from penstock.nn.encoder_heads import ClassificationHead, MaskedLMHead
from penstock.nn.linear import Linear
from penstock.nn.loader import Loader
from penstock.nn.mlp import MLP, GatedMLP
from penstock.nn.norm import LayerNorm
from penstock.nn.outlier_splitting import load_split_mlp
from penstock.nn.rotary import Rotary, RotaryConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderNames:
    """The tensor names of a family, without ``.weight`` and ``.bias``. The defaults are those of BERT."""

    tokens: str = "embeddings.word_embeddings"
    positions: str | None = "embeddings.position_embeddings"
    """The table of learned positions; None for a family without one."""
    token_types: str | None = "embeddings.token_type_embeddings"
    norm: str = "embeddings.LayerNorm"
    block: str = "encoder.layer.{layer}"

    # Names within a block.
    qkv: tuple[str, ...] = ("attention.self.query", "attention.self.key", "attention.self.value")
    """The query, key and value matrices. One name if the checkpoint stores them as one matrix."""
    output: str = "attention.output.dense"
    attention_norm: str = "attention.output.LayerNorm"
    gate: str | None = None
    """The gate matrix of a gated feed-forward layer; None without a gate. It is the same name as `up` if the
    checkpoint stores one matrix with the up rows first and the gate rows last."""
    up: str = "intermediate.dense"
    down: str = "output.dense"
    mlp_norm: str = "output.LayerNorm"


@dataclass(frozen=True, slots=True, kw_only=True)
class PostNormSizes:
    """The sizes and options of a `PostNormEncoder`."""

    vocab_size: int  # V
    positions: int
    """Number of rows of the position table; with a rotary embedding, the longest sequence in tokens."""
    first_position: int = 0
    """The row of the position table that the first token of a sequence uses."""
    rotary: RotaryConfig | None = None
    token_types: int
    """Number of rows of the token type table; 0 if the family has none."""
    layers: int  # L
    hidden: int  # E
    inner: int  # F
    heads: int  # H
    norm_eps: float
    activation: Activation
    attention_bias: bool = True
    up_bias: bool = True
    down_bias: bool = True

    @property
    def max_length(self) -> int:
        """The longest sequence in tokens."""
        return self.positions - self.first_position


@dataclass(frozen=True, slots=True)
class PostNormEncoder:
    """The sum of token, position and token type embeddings, then a norm, then post-norm blocks."""

    tokens: Tensor  # [V, E]
    positions: Tensor | None  # [max_length, E]
    rotary: Rotary | None
    token_types: Tensor | None  # [types, E]
    norm: LayerNorm
    blocks: tuple[PostNormBlock, ...]
    names: EncoderNames
    """The tensor names, by which adapters refer to the tables."""
    classifier: ClassificationHead | None = None
    masked_lm_head: MaskedLMHead | None = None
    attention_bias: Callable[[int], Tensor] | None = None
    """Returns the bias ``[H, 2P - 1]`` of all blocks for sequences of up to P tokens."""
    token_weights: ClassificationHead | None = None
    """The token-weight head of sparse embeddings, ``[T, E] -> [T, 1]``."""

    @classmethod
    def load(
        cls,
        load: Loader,
        sizes: PostNormSizes,
        names: EncoderNames,
        *,
        max_length: int,
        classifier: ClassificationHead | None = None,
        masked_lm_head: Callable[[Tensor], MaskedLMHead] | None = None,
        attention_bias: Callable[[int], Tensor] | None = None,
    ) -> PostNormEncoder:
        """Read a network.

        Args:
            load: reads and packs the tensors.
            sizes: sizes and options.
            names: the names of the tensors.
            max_length: the number of positions in the tables of the rotary embedding.
            classifier: the head of a sequence classifier.
            masked_lm_head: reads the head of a masked language model, given the token table ``[V, E]``.
            attention_bias: see `PostNormEncoder.attention_bias`.
        """
        hidden = sizes.hidden
        tokens = load.table(names.tokens, sizes.vocab_size, hidden)
        positions = types = None
        if names.positions is not None:
            table = load.tensor(f"{names.positions}.weight", sizes.positions, hidden)
            positions = table[sizes.first_position :]
        if names.token_types is not None and sizes.token_types:
            types = load.tensor(f"{names.token_types}.weight", sizes.token_types, hidden)
        return cls(
            tokens,
            positions,
            None if sizes.rotary is None else Rotary(sizes.rotary, max_length, load.device),
            types,
            load.layer_norm(names.norm, hidden, sizes.norm_eps, is_float32=True),
            tuple(_load_block(load, sizes, names, layer) for layer in range(sizes.layers)),
            names,
            classifier,
            None if masked_lm_head is None else masked_lm_head(tokens),
            attention_bias,
        )

    @property
    def is_length_dependent(self) -> bool:
        """Whether the angles of the rotary embedding depend on the sequence length."""
        return self.rotary is not None and self.rotary.is_length_dependent

    def __call__(self, tokens: Tensor, step: StepInputs, token_types: Tensor | None = None) -> Tensor:
        """``tokens [T]`` -> hidden states ``[T, E]``; ``token_types [T]`` are 0 by default."""
        ops = step.ops
        x = adapted_rows(tokens, self.tokens, self.names.tokens, step)
        if self.positions is not None:
            x = ops.add(x, ops.embedding(step.positions, self.positions))
        if self.token_types is not None:
            if token_types is None:
                token_types = tokens.new_zeros(tokens.shape)
            x = ops.add(x, adapted_rows(token_types, self.token_types, self.names.token_types, step))
        x = self.norm(x, step)
        bias = None
        if self.attention_bias is not None:
            bias = self.attention_bias(int(step.row_offsets.diff().max()))
        rows = () if self.rotary is None else (self.rotary.rows(step),)
        for block in self.blocks:
            x = block(x, step, rows, bias)
            beat()
        return x


def _load_block(load: Loader, sizes: PostNormSizes, names: EncoderNames, layer: int) -> PostNormBlock:
    name, hidden = names.block.format(layer=layer), sizes.hidden
    dim = hidden // sizes.heads
    parts = {names.qkv[0]: 3 * hidden} if len(names.qkv) == 1 else dict.fromkeys(names.qkv, hidden)
    return PostNormBlock(
        EncoderAttention(
            load.fused(name, parts, hidden, bias=sizes.attention_bias),
            load.linear(f"{name}.{names.output}", hidden, hidden, bias=sizes.attention_bias),
            sizes.heads,
            sizes.heads,
            dim,
            dim**-0.5,
            rotary_index=None if sizes.rotary is None else 0,
        ),
        load.layer_norm(f"{name}.{names.attention_norm}", hidden, sizes.norm_eps, is_float32=True),
        _load_mlp(load, sizes, names, name),
        load.layer_norm(f"{name}.{names.mlp_norm}", hidden, sizes.norm_eps, is_float32=True),
    )


def _load_mlp(load: Loader, sizes: PostNormSizes, names: EncoderNames, name: str) -> MLP | GatedMLP:
    hidden, inner = sizes.hidden, sizes.inner
    if names.gate != names.up:
        up_names = [(f"{name}.{part}", inner) for part in (names.gate, names.up) if part is not None]
        split_mlp = load_split_mlp(
            load,
            up_names,
            f"{name}.{names.down}",
            (hidden, inner),
            up_bias=sizes.up_bias,
            down_bias=sizes.down_bias,
        )
        if split_mlp is not None:
            return (MLP if names.gate is None else GatedMLP)(*split_mlp, sizes.activation)
    down = load.linear(f"{name}.{names.down}", hidden, inner, bias=sizes.down_bias)
    if names.gate is None:
        up = load.linear(f"{name}.{names.up}", inner, hidden, bias=sizes.up_bias)
        return MLP(up, down, sizes.activation)
    if names.gate == names.up:
        gate_up = _load_up_gate(load, f"{name}.{names.up}", inner, hidden, sizes.up_bias)
    else:
        gate_up = load.fused(name, {names.gate: inner, names.up: inner}, hidden, bias=sizes.up_bias)
    return GatedMLP(gate_up, down, sizes.activation)


def _load_up_gate(load: Loader, name: str, inner: int, hidden: int, has_bias: bool) -> Linear:
    """Return the fused layer ``[gate | up]`` of a checkpoint that stores ``[up | gate]``."""
    weight = load.source.tensor(f"{name}.weight", (2 * inner, hidden)).roll(inner, 0)
    bias = None
    if has_bias:
        bias = load.source.tensor(f"{name}.bias", (2 * inner,)).roll(inner)
    return load.pack(weight, {name: 2 * inner}, bias=bias)
