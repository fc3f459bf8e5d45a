"""Layers shared by two or more architectures.

A layer is read from a checkpoint by a `Loader` and holds packed weights. A call takes activations and a
`StepInputs`. Layers keep no state between calls.
"""

from penstock.nn.attention import Attention
from penstock.nn.block_parts import (
    BlockParts,
    FeedForward,
    LoadAttention,
    LoadFeedForward,
    attentions,
    gated_mlps,
    layer_norms,
    llama_parts,
    load_attention,
    plain_mlps,
    rms_norms,
)
from penstock.nn.blueprint import (
    FULL,
    MAX_LAYERS,
    SLIDING,
    Blueprint,
    BlueprintFields,
    activation_named,
    check_head_dim,
    interleaved,
    layer_types,
    layer_windows,
    num_layers,
    uniform_windows,
)
from penstock.nn.config_values import ConfigValues
from penstock.nn.decoder import (
    Block,
    Branch,
    DecoderBlock,
    DecoderNetwork,
    DecoderTrunk,
    LoadBlock,
    ParallelBlock,
    load_embedding,
)
from penstock.nn.embedding import Embedding
from penstock.nn.encoder import EncoderAttention, PostNormBlock
from penstock.nn.encoder_heads import (
    ClassificationHead,
    ClassifierNames,
    MaskedLMHead,
    MaskedLMNames,
    load_classifier,
    load_masked_lm_head,
    num_labels,
)
from penstock.nn.experts import (
    Experts,
    SharedExperts,
    find_local_experts,
    load_correction_bias,
    load_experts,
    load_router,
    load_stacked_experts,
    num_experts_per_token,
)
from penstock.nn.gated_attention import GatedAttention
from penstock.nn.head import Head
from penstock.nn.linear import Linear
from penstock.nn.linear_attention import LinearAttention, LinearAttentionSizes
from penstock.nn.loader import Loader
from penstock.nn.mlp import MLP, GatedMLP
from penstock.nn.norm import LayerNorm, LoadNorm, Norm, RMSNorm
from penstock.nn.outputs import ReturnHiddenStates, ReturnLogits
from penstock.nn.post_norm_encoder import EncoderNames, PostNormEncoder, PostNormSizes
from penstock.nn.rotary import Rotary, RotaryConfig, RotaryRows, rope_values, rotary_configs_by_type
from penstock.nn.tensor_names import LLAMA_NAMES, TensorNames, TensorRole
from penstock.nn.tensor_source import TensorSource

__all__ = [
    "FULL",
    "LLAMA_NAMES",
    "MAX_LAYERS",
    "MLP",
    "SLIDING",
    "Attention",
    "Block",
    "BlockParts",
    "Blueprint",
    "BlueprintFields",
    "Branch",
    "ClassificationHead",
    "ClassifierNames",
    "ConfigValues",
    "DecoderBlock",
    "DecoderNetwork",
    "DecoderTrunk",
    "Embedding",
    "EncoderAttention",
    "EncoderNames",
    "Experts",
    "FeedForward",
    "GatedAttention",
    "GatedMLP",
    "Head",
    "LayerNorm",
    "Linear",
    "LinearAttention",
    "LinearAttentionSizes",
    "LoadAttention",
    "LoadBlock",
    "LoadFeedForward",
    "LoadNorm",
    "Loader",
    "MaskedLMHead",
    "MaskedLMNames",
    "Norm",
    "ParallelBlock",
    "PostNormBlock",
    "PostNormEncoder",
    "PostNormSizes",
    "RMSNorm",
    "ReturnHiddenStates",
    "ReturnLogits",
    "Rotary",
    "RotaryConfig",
    "RotaryRows",
    "SharedExperts",
    "TensorNames",
    "TensorRole",
    "TensorSource",
    "activation_named",
    "attentions",
    "check_head_dim",
    "find_local_experts",
    "gated_mlps",
    "interleaved",
    "layer_norms",
    "layer_types",
    "layer_windows",
    "llama_parts",
    "load_attention",
    "load_classifier",
    "load_correction_bias",
    "load_embedding",
    "load_experts",
    "load_masked_lm_head",
    "load_router",
    "load_stacked_experts",
    "num_experts_per_token",
    "num_labels",
    "num_layers",
    "plain_mlps",
    "rms_norms",
    "rope_values",
    "rotary_configs_by_type",
    "uniform_windows",
]
