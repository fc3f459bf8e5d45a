"""The marker `families`: by default, a marked test runs on one family of each kind of block."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

REPRESENTATIVES = frozenset(
    (
        "cohere2",  # parallel blocks, interleaved rotary embedding, sliding windows
        "gemma2",  # soft caps, norms before and after each layer
        "gemma3_text",  # two rotary bases, norms of query and key heads
        "glm4_moe",  # expert groups, correction bias, partial rotary embedding
        "gpt2",  # learned positions, transposed weights
        "gpt_neox",  # QKV fused head by head, another name for the output head
        "gpt_oss",  # attention sinks, biases of experts
        "granite",  # multipliers of embeddings, residuals and logits
        "llama",
        "llama4_text",  # chunked attention, layers without positions, scaled inputs of experts
        "mixtral",  # mixture of experts
        "olmo2",  # norms after each layer, norms over all heads
        "phi3",  # fused matrices, LongRoPE
        "phimoe",  # layer norms, sparse mixer
        "qwen2",  # biases of queries, keys and values
        "qwen3",  # norms of query and key heads, tied output head
        "starcoder2",  # non-gated feed-forward layers with biases
    )
)
"""The families that the default run tests: one for each kind of block."""


def items_of_redundant_families(items: Iterable[pytest.Item]) -> list[pytest.Item]:
    """Return the tests marked `families` that use a family outside `REPRESENTATIVES`."""
    return [
        item
        for item in items
        if isinstance(item, pytest.Function)
        and hasattr(item, "callspec")
        and item.get_closest_marker("families")
        and _item_families(item) - REPRESENTATIVES
    ]


def _item_families(item: pytest.Function) -> set[str]:
    params = item.callspec.params.values()
    return {param.name for param in params if hasattr(param, "tiny_config")}
