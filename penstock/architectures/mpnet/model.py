"""MPNet (Song et al. 2020, arXiv:2004.09297): RoBERTa with a relative attention bias."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from penstock.architectures.post_norm import PostNormModel, prefix_remover
from penstock.errors import ConfigError
from penstock.nn import EncoderNames, Loader, PostNormSizes

if TYPE_CHECKING:
    from penstock.config import HuggingFaceConfig

NUM_BUCKETS = 32
"""Number of buckets of distances that the family uses; half of them for each direction."""
MAX_DISTANCE = 128
"""All distances of at least this number of tokens share the last bucket of their direction."""


class MPNetModel(PostNormModel):
    """Reads the configuration of MPNet and builds its network."""

    weights_adapter = prefix_remover("mpnet.")
    ignored_weights = ("embeddings.position_ids", "pooler.*", "lm_head.*")
    names = EncoderNames(
        token_types=None,
        qkv=("attention.attn.q", "attention.attn.k", "attention.attn.v"),
        output="attention.attn.o",
        attention_norm="attention.LayerNorm",
    )

    @classmethod
    def sizes(cls, config: HuggingFaceConfig) -> PostNormSizes:
        return replace(super().sizes(config), first_position=2)  # positions start after the padding id, 1

    @classmethod
    def attention_bias(
        cls, load: Loader, huggingface_config: HuggingFaceConfig, sizes: PostNormSizes
    ) -> Callable[[int], Tensor]:
        buckets = huggingface_config.integer("relative_attention_num_buckets", NUM_BUCKETS)
        if buckets < NUM_BUCKETS:
            raise ConfigError(
                "relative_attention_num_buckets",
                f"is {buckets}, but this family needs at least {NUM_BUCKETS} buckets of distances",
            )
        table = load.source.tensor("encoder.relative_attention_bias.weight", (buckets, sizes.heads))
        bucket_biases = table.float().to(load.device)  # [buckets, H]
        longest = sizes.max_length
        distances = torch.arange(1 - longest, longest)  # key position - query position, in tokens
        bias = bucket_biases[relative_buckets(distances).to(load.device)].T.contiguous()  # [H, 2P - 1]
        return lambda length: bias[:, longest - length : longest + length - 1]


def relative_buckets(distances: Tensor) -> Tensor:
    """Return the bucket of each signed distance, as in T5.

    Each direction has half of the buckets. Small distances have a bucket each. Larger distances share buckets
    of logarithmic width.
    """
    num_per_direction = NUM_BUCKETS // 2
    num_exact = num_per_direction // 2
    magnitude = distances.abs()
    log_fractions = (magnitude.clamp_min(1).float() / num_exact).log() / math.log(MAX_DISTANCE / num_exact)
    logarithmic = num_exact + (log_fractions * (num_per_direction - num_exact)).long()
    buckets = torch.where(magnitude < num_exact, magnitude, logarithmic.clamp_max(num_per_direction - 1))
    return buckets + num_per_direction * (distances > 0)
