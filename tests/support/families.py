"""The marker `families`: tests that do not differ between similar families run on one family of each kind."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

KINDS = frozenset(
    (
        "cohere2",  # parallel blocks, interleaved rotary embedding, windows
        "gemma2",  # soft caps, norms before and after
        "gemma3_text",  # two rotary bases, norms of heads
        "glm4_moe",  # groups of experts, correction bias, partial rotary embedding
        "gpt2",  # learned positions, transposed weights
        "gpt_neox",  # fused by head, another name of the head
        "gpt_oss",  # sinks, biases of experts
        "granite",  # multipliers
        "llama",
        "llama4_text",  # chunks, layers without positions, scaled inputs of experts
        "mixtral",  # experts
        "olmo2",  # norms after, norms of whole rows
        "phi3",  # fused matrices, LongRoPE
        "phimoe",  # layer norms, sparse mixer
        "qwen2",  # biases
        "qwen3",  # norms of heads, tied head
        "starcoder2",  # plain feed-forward layers with biases
    )
)
"""Families that together contain each kind of block."""


def items_of_similar_families(items: Iterable[pytest.Item]) -> list[pytest.Item]:
    """Return the items with the marker `families` whose family is not among `KINDS`."""
    return [
        item
        for item in items
        if isinstance(item, pytest.Function)
        and hasattr(item, "callspec")
        and item.get_closest_marker("families")
        and _families_of(item) - KINDS
    ]


def _families_of(item: pytest.Function) -> set[str]:
    params = item.callspec.params.values()
    return {param.name for param in params if hasattr(param, "tiny_config")}
