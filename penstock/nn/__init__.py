"""Layers shared by two or more architectures. A layer is built from a checkpoint and holds packed weights;
called with activations and a `StepInputs`, it holds no state of a step."""

from penstock.nn.attention import Attention
from penstock.nn.blueprint import (
    FULL,
    SLIDING,
    Blueprint,
    activation_named,
    layer_types,
    num_layers,
    same_windows,
    windows_of,
)
from penstock.nn.decoder import (
    Branch,
    DecoderBlock,
    DecoderNetwork,
    FeedForward,
    LoadFeedForward,
    gated_mlps,
    load_attention,
)
from penstock.nn.embedding import Embedding
from penstock.nn.experts import Experts, load_experts, load_router, num_chosen
from penstock.nn.head import Head
from penstock.nn.linear import Linear
from penstock.nn.loader import Loader, TensorSource, encoding_of_head, encoding_of_linear, encoding_of_values
from penstock.nn.mlp import GatedMLP
from penstock.nn.norm import LayerNorm, RMSNorm
from penstock.nn.outputs import ReturnHiddenStates, ReturnLogits
from penstock.nn.rotary import Rotary, RotaryConfig, RotaryRows

__all__ = [
    "FULL",
    "SLIDING",
    "Attention",
    "Blueprint",
    "Branch",
    "DecoderBlock",
    "DecoderNetwork",
    "Embedding",
    "Experts",
    "FeedForward",
    "GatedMLP",
    "Head",
    "LayerNorm",
    "Linear",
    "LoadFeedForward",
    "Loader",
    "RMSNorm",
    "ReturnHiddenStates",
    "ReturnLogits",
    "Rotary",
    "RotaryConfig",
    "RotaryRows",
    "TensorSource",
    "activation_named",
    "encoding_of_head",
    "encoding_of_linear",
    "encoding_of_values",
    "gated_mlps",
    "layer_types",
    "load_attention",
    "load_experts",
    "load_router",
    "num_chosen",
    "num_layers",
    "same_windows",
    "windows_of",
]
