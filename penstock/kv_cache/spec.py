"""The shape of a model's KV cache."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Container
from dataclasses import dataclass, replace

from penstock.dtype import DType
from penstock.errors import ConfigError


@dataclass(frozen=True, slots=True)
class KVGroup:
    """Layers that share one block table.

    The keys of these layers have the same shape, and their attention has the same window.
    """

    layers: tuple[int, ...]
    kv_heads: int
    head_dim: int
    dtype: DType
    window: int | None = None
    """The maximum number of keys that a query sees, including its own key; None for no maximum."""
    is_chunked: bool = False
    """Whether attention is chunked: the query at position p sees only the keys from the last multiple of
    ``window`` to p."""
    has_fixed_scales: bool = False
    """Whether the scales of a quantized cache come from the checkpoint, one per head. Otherwise each row of
    a quantized cache stores its own scale."""

    def __post_init__(self) -> None:
        if not self.layers:
            raise ConfigError("layers", "a group of KV layers must have at least one layer")
        for name in ("kv_heads", "head_dim"):
            if getattr(self, name) < 1:
                raise ConfigError(name, f"must be at least 1, was {getattr(self, name)}")
        if self.window is not None and self.window < 1:
            raise ConfigError("window", f"must be at least 1, was {self.window}: None stands for no window")
        if self.is_chunked and self.window is None:
            raise ConfigError("window", "must be a number: it is the size of the chunks")
        if not (self.dtype.is_float() or self.dtype is DType.int8):
            raise ConfigError("dtype", f"a KV cache holds floats or int8, not {self.dtype.value}")
        if self.has_fixed_scales and not self.is_quantized:
            raise ConfigError("has_fixed_scales", f"a cache of {self.dtype.value} has no scales")

    @property
    def is_quantized(self) -> bool:
        """Whether the cache stores int8 or float8 numbers, which are multiplied by scales."""
        return self.dtype in (DType.int8, DType.float8_e4m3fn)

    @property
    def input_options(self) -> tuple[int | None, bool, bool]:
        """``window``, ``is_chunked`` and ``has_fixed_scales``: arguments of `KVGroupInputs`."""
        return self.window, self.is_chunked, self.has_fixed_scales

    @property
    def has_row_scales(self) -> bool:
        """Whether the cache stores a scale for each row: the key or value of a token in one head."""
        return self.is_quantized and not self.has_fixed_scales

    def bytes_per_block(self, block_size: int) -> int:
        """Return the bytes of one block of ``block_size`` tokens: keys, values and scales of all layers."""
        num_rows = 2 * len(self.layers) * self.kv_heads * block_size
        scale = DType.float32.size_in_bytes if self.has_row_scales else 0
        return num_rows * (self.head_dim * self.dtype.size_in_bytes + scale)

    def first_visible(self, position: int) -> int:
        """Return the first position that the query at ``position`` sees."""
        if self.window is None:
            return 0
        if self.is_chunked:
            return position // self.window * self.window
        return max(0, position - self.window + 1)

    def max_blocks(self, num_tokens: int, block_size: int, chunk_size: int | None = None) -> int:
        """Return the maximum number of blocks that a sequence holds at once.

        Args:
            num_tokens: the final length of the sequence.
            block_size: tokens per block.
            chunk_size: the maximum number of tokens that a step computes; None for no limit.
        """
        num_blocks = -(-num_tokens // block_size)
        if self.window is None or chunk_size is None:
            return num_blocks
        # The number of positions that a step reads or writes. The first one can be anywhere in a block.
        span = self.window - 1 + chunk_size
        return min(num_blocks, (span + block_size - 2) // block_size + 1)


@dataclass(frozen=True, slots=True)
class StateSpec:
    """The recurrent state of layers with linear attention. It has the same size for every sequence."""

    num_layers: int
    heads: int
    key_dim: int
    value_dim: int
    channels: int
    """The channels of the convolution: queries, keys and values."""
    kernel: int
    """The width of the convolution. The state has the last ``kernel - 1`` inputs."""
    dtype: DType
    """The type of the inputs of the convolution. The recurrent state is float32."""

    @property
    def num_bytes(self) -> int:
        """The bytes of the state of one sequence, for all layers."""
        inputs = (self.kernel - 1) * self.channels * self.dtype.size_in_bytes
        recurrent = self.heads * self.key_dim * self.value_dim * DType.float32.size_in_bytes
        return self.num_layers * (inputs + recurrent)


@dataclass(frozen=True, slots=True)
class KVCacheSpec:
    """The groups of layers of a model and of its draft model, if any."""

    groups: tuple[KVGroup, ...]
    key_limits: tuple[int, ...] = ()
    """Ascending sequence lengths at which LongRoPE changes its factors.

    When a sequence exceeds a limit, all its keys must be computed again. The limits divide the lengths into
    ranges, called regimes, which are numbered from 0.
    """
    shares_prefixes: bool = True
    """Whether a common prefix of two sequences of one regime has the same keys in both sequences.

    False for dynamic RoPE, whose keys depend on the length of the prompt.
    """

    max_bidirectional_tokens: int = 0
    """Maximum number of tokens that must be computed in one step, because they attend to each other in both
    directions (an image); 0 if a step can end after any token."""
    states: StateSpec | None = None
    """The recurrent states of layers with linear attention, which are not in `groups`. Contexts of such a
    model share a prefix only up to a position whose state was saved."""

    def __post_init__(self) -> None:
        layers = sorted(layer for group in self.groups for layer in group.layers)
        if not layers or layers != list(range(len(layers))):
            raise ConfigError(
                "groups", f"each of the layers 0..L-1 must be in exactly one group; the groups hold {layers}"
            )
        if list(self.key_limits) != sorted(limit for limit in set(self.key_limits) if limit > 0):
            raise ConfigError("key_limits", f"must ascend from 1 on, were {self.key_limits}")

    def regime(self, length: int) -> int:
        """Return the regime of a sequence of ``length`` tokens: the number of limits that it exceeds."""
        return bisect_left(self.key_limits, length)

    def min_regime_length(self, length: int) -> int:
        """Return the smallest length in the regime of a sequence with ``length`` tokens; 0 for regime 0."""
        regime = self.regime(length)
        return self.key_limits[regime - 1] + 1 if regime else 0

    def steps_left(self, length: int) -> int | None:
        """Return how many tokens a sequence can generate with its cached keys; None if unlimited.

        With the last of these tokens, the sequence exceeds a limit. The next step then computes all tokens of
        the sequence again.
        """
        regime = self.regime(length)
        return self.key_limits[regime] - length + 1 if regime < len(self.key_limits) else None

    def with_fixed_scales(self, layers: Container[int]) -> KVCacheSpec:
        """Return the spec with fixed scales in groups of 8-bit floats whose layers are all in ``layers``."""
        groups = (
            replace(group, has_fixed_scales=True)
            if group.dtype is DType.float8_e4m3fn and all(layer in layers for layer in group.layers)
            else group
            for group in self.groups
        )
        return replace(self, groups=tuple(groups))

    def with_kv_heads(self, kv_heads: Callable[[int], int]) -> KVCacheSpec:
        """Return the spec of one rank's cache.

        Args:
            kv_heads: maps the number of kv heads of a group to the number on the rank.
        """
        groups = (replace(group, kv_heads=kv_heads(group.kv_heads)) for group in self.groups)
        return replace(self, groups=tuple(groups))

    @property
    def num_layers(self) -> int:
        """L: the total number of layers of all groups."""
        return sum(len(group.layers) for group in self.groups)

    @property
    def group_of_layer(self) -> tuple[int, ...]:
        """The index of each layer's group, ``[L]``."""
        groups_by_layer = {layer: index for index, group in enumerate(self.groups) for layer in group.layers}
        return tuple(groups_by_layer[layer] for layer in range(self.num_layers))

    def bytes_per_block(self, block_size: int) -> tuple[int, ...]:
        """Return the bytes of one block of ``block_size`` tokens, for each group."""
        return tuple(group.bytes_per_block(block_size) for group in self.groups)
