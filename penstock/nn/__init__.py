"""Layers shared by two or more architectures. A layer is built from a checkpoint and holds packed weights;
called with activations and a `StepInputs`, it holds no state of a step."""

from penstock.nn.attention import Attention
from penstock.nn.embedding import Embedding
from penstock.nn.linear import Linear
from penstock.nn.loading import Loader, TensorSource
from penstock.nn.mlp import GatedMLP
from penstock.nn.norm import RMSNorm
from penstock.nn.outputs import ReturnHiddenStates, ReturnLogits
from penstock.nn.rotary import Rotary, RotaryConfig, RotaryRows

__all__ = [
    "Attention",
    "Embedding",
    "GatedMLP",
    "Linear",
    "Loader",
    "RMSNorm",
    "ReturnHiddenStates",
    "ReturnLogits",
    "Rotary",
    "RotaryConfig",
    "RotaryRows",
    "TensorSource",
]
