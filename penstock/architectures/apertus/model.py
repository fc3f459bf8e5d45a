"""Apertus (Project Apertus 2025, arXiv:2509.14233): norms of queries and keys, and xIELU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import softplus

from penstock.architectures.transformer import TransformerModel
from penstock.errors import ConfigError
from penstock.kernels import XIELU, StepInputs
from penstock.nn import Blueprint, Linear, Loader, LoadFeedForward, TensorNames

if TYPE_CHECKING:
    from penstock.config import HuggingFaceConfig

_ROPE_THETA = 12_000_000.0
_DEFAULT_ROPE = {
    "rope_type": "llama3",
    "rope_theta": _ROPE_THETA,
    "factor": 8.0,
    "original_max_position_embeddings": 8192,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}
"""The RoPE parameters if ``config.json`` has neither ``rope_parameters`` nor ``rope_scaling``."""

_XIELU_PARAMETERS = ("alpha_p", "alpha_n", "beta", "eps")


@dataclass(frozen=True, slots=True)
class XIELUMLP:
    """``down(xielu(up(x)))``. Each layer has its own parameters of xIELU."""

    up: Linear
    down: Linear
    activation: XIELU

    @classmethod
    def load(
        cls, load: Loader, blueprint: Blueprint, name: str, stored_parameters: Mapping[str, float] | None
    ) -> XIELUMLP:
        """Read the layer called ``name``.

        Args:
            load: reads and packs the tensors.
            blueprint: the sizes of the network.
            name: the full name of the layer in the checkpoint.
            stored_parameters: the layer's parameters of xIELU from the configuration. If None, the parameters
                are read from tensors of the checkpoint.
        """

        def read_parameter(parameter: str, *shape: int) -> Tensor:
            if stored_parameters is not None:
                return torch.full(shape, stored_parameters[parameter])
            return load.source.tensor(f"{name}.act_fn.{parameter}", shape).float()

        positive, negative = softplus(read_parameter("alpha_p", 1)), softplus(read_parameter("alpha_n", 1))
        slope, eps = read_parameter("beta"), read_parameter("eps")
        values = (positive, slope + negative, slope, eps)
        # A network that is loaded with meta tensors is used only for its shapes, so the values do not matter.
        floats = (0.0 if value.is_meta else float(value) for value in values)
        return cls(
            load.linear(f"{name}.up_proj", blueprint.inner, blueprint.hidden),
            load.linear(f"{name}.down_proj", blueprint.hidden, blueprint.inner),
            XIELU(*floats),
        )

    def __call__(self, x: Tensor, step: StepInputs) -> Tensor:  # [T, E] -> [T, E]
        return self.down(step.ops.xielu(self.up(x, step), self.activation), step)


class ApertusModel(TransformerModel):
    """Reads the configuration of Apertus and builds its network."""

    @classmethod
    def blueprint(cls, huggingface_config: HuggingFaceConfig) -> Blueprint:
        config = huggingface_config
        if config.get("hidden_act") not in (None, "xielu"):
            raise ConfigError("hidden_act", f"must be xielu in this family, was {config.get('hidden_act')!r}")
        if config.flag("mlp_bias"):
            raise ConfigError("mlp_bias", "is true: the feed-forward layers of this family have no biases")
        if not config.flag("qk_norm", True):
            raise ConfigError("qk_norm", "is false: this family has norms of queries and keys")
        if config.flag("post_norm"):
            raise ConfigError("post_norm", "is true: norms after the layers are not supported")
        has_rope = bool(config.section("rope_parameters") or config.section("rope_scaling"))
        if not has_rope and config.number("rope_theta", _ROPE_THETA) != _ROPE_THETA:
            raise ConfigError(
                "rope_theta",
                f"must be {_ROPE_THETA:g} without rope_parameters and rope_scaling, "
                f"was {config['rope_theta']!r}",
            )
        attention_bias = config.flag("attention_bias")
        return Blueprint.from_huggingface(
            config,
            activation_key=None,
            default_rope_theta=_ROPE_THETA,
            rope_parameters=None if has_rope else _DEFAULT_ROPE,
            names=TensorNames(norms_before=("attention_layernorm", "feedforward_layernorm")),
            norm_eps=config.number("rms_norm_eps", 1e-5),
            head_norms="each",
            qkv_bias=attention_bias,
            output_bias=attention_bias,
        )

    @classmethod
    def feed_forward(
        cls, load: Loader, blueprint: Blueprint, huggingface_config: HuggingFaceConfig
    ) -> LoadFeedForward:
        stored_parameters = stored_xielu_parameters(huggingface_config, blueprint.layers)
        return lambda name, layer: XIELUMLP.load(
            load, blueprint, name, stored_parameters[layer] if stored_parameters else None
        )


def stored_xielu_parameters(config: HuggingFaceConfig, num_layers: int) -> list[dict[str, float]] | None:
    """Return the parameters of xIELU of each layer from GGUF metadata; None if there are none.

    Raises:
        ConfigError: ``xielu`` does not contain a list with one number per layer for each parameter.
    """
    section = config.section("xielu")
    if not section:
        return None
    layers: list[dict[str, float]] = [{} for _ in range(num_layers)]
    for parameter in _XIELU_PARAMETERS:
        values = section.get(parameter)
        if not isinstance(values, list) or len(values) != num_layers:
            raise ConfigError(
                f"xielu.{parameter}", f"must be a list of {num_layers} numbers, was {values!r:.100}"
            )
        for layer, value in zip(layers, values, strict=True):
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise ConfigError(f"xielu.{parameter}", f"must be a list of numbers, has {value!r:.100}")
            layer[parameter] = float(value)
    return layers
