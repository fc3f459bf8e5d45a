"""Layers shared by two or more architectures.

A layer is read from a checkpoint by a `Loader` and holds packed weights. A call takes activations and a
`StepInputs`. Layers keep no state between calls.
"""

from penstock.nn.attention import Attention
from penstock.nn.blueprint import (
    FULL,
    MAX_LAYERS,
    SLIDING,
    Blueprint,
    BlueprintFields,
    activation_named,
    layer_types,
    num_layers,
    same_windows,
    windows_of,
)
from penstock.nn.config_values import ConfigValues
from penstock.nn.decoder import (
    Branch,
    DecoderBlock,
    DecoderNetwork,
    DecoderTrunk,
    FeedForward,
    LoadFeedForward,
    gated_mlps,
    load_attention,
)
from penstock.nn.embedding import Embedding
from penstock.nn.encoder import EncoderAttention, PostNormBlock
from penstock.nn.encoder_heads import (
    ClassificationHead,
    ClassifierNames,
    VocabularyHead,
    VocabularyNames,
    load_classifier,
    load_vocabulary_head,
    num_labels,
)
from penstock.nn.experts import (
    Experts,
    SharedExperts,
    load_correction_bias,
    load_experts,
    load_router,
    load_stacked_experts,
    num_experts_per_token,
)
from penstock.nn.head import Head
from penstock.nn.linear import Linear
from penstock.nn.loader import Loader, TensorSource
from penstock.nn.mlp import MLP, GatedMLP
from penstock.nn.norm import LayerNorm, RMSNorm
from penstock.nn.outputs import ReturnHiddenStates, ReturnLogits
from penstock.nn.post_norm_encoder import EncoderNames, PostNormEncoder, PostNormSizes
from penstock.nn.rotary import Rotary, RotaryConfig, RotaryRows, rope_values
from penstock.nn.tensor_names import LLAMA_NAMES, TensorNames, TensorRole

__all__ = [
    "FULL",
    "LLAMA_NAMES",
    "MAX_LAYERS",
    "MLP",
    "SLIDING",
    "Attention",
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
    "GatedMLP",
    "Head",
    "LayerNorm",
    "Linear",
    "LoadFeedForward",
    "Loader",
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
    "VocabularyHead",
    "VocabularyNames",
    "activation_named",
    "gated_mlps",
    "layer_types",
    "load_attention",
    "load_classifier",
    "load_correction_bias",
    "load_experts",
    "load_router",
    "load_stacked_experts",
    "load_vocabulary_head",
    "num_experts_per_token",
    "num_labels",
    "num_layers",
    "rope_values",
    "same_windows",
    "windows_of",
]
