"""`TensorNames`: the tensor names in the checkpoints of a model family."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal, TypeAlias

TensorRole: TypeAlias = Literal["table", "head", "router", "values", "expert", "linear"]
"""The role of a matrix in the model. It determines the encoding of the matrix in memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorNames:
    """The tensor names of a family, for the loader and the memory planner.

    Names are dotted paths without the final ``.weight`` or ``.bias``. The defaults are Llama's names.
    """

    prefix: str = "model."
    """The prefix of all names except the name of the head."""
    embedding: str = "embed_tokens"
    head: str = "lm_head"
    norm: str = "norm"
    """The final norm."""
    block: str = "layers.{layer}"

    # Names within a block.
    attention: str = "self_attn"
    qkv: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    """The query, key and value matrices. One name if the checkpoint stores them as one matrix."""
    output: str = "o_proj"
    query_norm: str = "q_norm"
    key_norm: str = "k_norm"
    sinks: str = "sinks"
    feed_forward: str = "mlp"
    gate_up: tuple[str, ...] = ("gate_proj", "up_proj")
    """The gate and up matrices. One name if the checkpoint stores them as one matrix."""
    down: str = "down_proj"
    router: str = "gate"
    is_router_float32: bool = False
    """Whether routers compute in float32, independently of the model's encoding."""
    experts: str = "experts"
    norms_before: tuple[str, str] = ("input_layernorm", "post_attention_layernorm")
    """The norms before attention and before the feed-forward layer."""
    norms_after: tuple[str, str] = ("post_attention_layernorm", "post_feedforward_layernorm")
    """The norms after attention and after the feed-forward layer."""

    unquantized: tuple[str, ...] = ()
    """Patterns (`fnmatch`) for the ends of the tensor names, including ``.weight``, of linear layers that are
    never quantized, besides routers. They have the role of a router."""
    replicated: tuple[str, ...] = ()
    """Patterns (`fnmatch`) for the ends of the tensor names, including ``.weight``, of linear layers in
    blocks, besides routers, of which every rank has a whole copy."""
    token_tables: tuple[str, ...] = ()
    """Patterns (`fnmatch`) for the ends of the tensor names, including ``.weight``, of further tables with
    one row per token id. They have the role ``table`` and are divided among ranks like the embedding table.
    """
    unread: tuple[str, ...] = ()
    """Patterns (`fnmatch`) of the names of checkpoint tensors that the model does not load."""
    other_tables: tuple[str, ...] = ()
    """Patterns (`fnmatch`) for the ends of the tensor names, including ``.weight``, of matrices that are no
    linear layers, such as learned positions. They have the role ``table``.
    """

    @property
    def embedding_path(self) -> str:
        """The full name of the embedding table."""
        return self.prefix + self.embedding

    @property
    def norm_path(self) -> str:
        """The full name of the final norm."""
        return self.prefix + self.norm

    def block_path(self, layer: int) -> str:
        """Return the full name of block ``layer``."""
        return self.prefix + self.block.format(layer=layer)

    @property
    def values(self) -> str | None:
        """The name of the value projection; None if it is a part of a fused matrix."""
        return self.qkv[2] if len(self.qkv) == 3 else None

    def is_embedding(self, tensor: str) -> bool:
        """Return whether a tensor is the embedding table."""
        return _ends_with(tensor, f"{self.embedding}.weight")

    def is_token_table(self, tensor: str) -> bool:
        """Return whether a tensor is the embedding table or another table with one row per token id."""
        return self.is_embedding(tensor) or _matches_end(tensor, self.token_tables)

    def is_replicated(self, tensor: str) -> bool:
        """Return whether each rank has a whole copy of a linear layer, although it is in a block."""
        return _matches_end(tensor, self.replicated)

    def is_unread(self, tensor: str) -> bool:
        """Return whether the model does not load a tensor of a checkpoint."""
        return any(fnmatchcase(tensor, pattern) for pattern in self.unread)

    def role(self, tensor: str) -> TensorRole:
        """Return the role of a matrix from the full name of its tensor, including ``.weight``.

        The prefix is not compared, because checkpoints without a head often omit it.
        """
        if _ends_with(tensor, f"{self.head}.weight"):
            return "head"
        if self.is_token_table(tensor) or _matches_end(tensor, self.other_tables):
            return "table"
        if _ends_with(tensor, f".{self.router}.weight"):
            return "router"
        if _matches_end(tensor, self.unquantized):
            return "router"
        if self.values is not None and _ends_with(tensor, f".{self.values}.weight"):
            return "values"
        if fnmatchcase(tensor, f"*.{self.experts}.*.weight"):
            return "expert"
        return "linear"


LLAMA_NAMES = TensorNames()
"""The tensor names of Llama's checkpoints."""


def _matches_end(tensor: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(tensor, f"*{pattern}") for pattern in patterns)


def _ends_with(tensor: str, name: str) -> bool:
    return tensor == name.removeprefix(".") or tensor.endswith(name)
