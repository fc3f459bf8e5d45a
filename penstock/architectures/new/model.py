"""GTE with the ``config.json`` keys of its custom code (https://huggingface.co/Alibaba-NLP/new-impl)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.architectures.gte.model import GteModel
from penstock.errors import ConfigError
from penstock.nn import PostNormSizes, RotaryConfig

if TYPE_CHECKING:
    from penstock.config import HuggingFaceConfig

_REQUIRED_VALUES = {
    "position_embedding_type": "rope",
    "layer_norm_type": "layer_norm",
    "logn_attention_scale": False,
    "logn_attention_clip1": False,
    "pack_qkv": True,
}
"""The only supported value of each option of the custom code. All published checkpoints use these values."""


class NewModel(GteModel):
    """Reads the configuration of GTE checkpoints with ``model_type`` ``new`` and builds its network."""

    @classmethod
    def sizes(cls, config: HuggingFaceConfig) -> PostNormSizes:
        """Read a ``config.json``.

        Raises:
            ConfigError: an option has an unsupported value.
        """
        for name, value in _REQUIRED_VALUES.items():
            if config.get(name, value) != value:
                raise ConfigError(name, f"{config.get(name)!r} is not supported, only {value!r}")
        return super().sizes(config)

    @classmethod
    def rotary(cls, config: HuggingFaceConfig, head_dim: int) -> RotaryConfig:
        """Return the configuration of the rotary embedding.

        Rope type ``ntk`` with factor k multiplies the base by k and divides all frequencies by ``k ** (2 /
        head_dim)`` (https://kexue.fm/archives/9706). Other rope types are read as in other families.

        Raises:
            ConfigError: the rope type is unknown, its factor is missing, or ``mixed_b`` is set.
        """
        scaling = config.section("rope_scaling")
        if scaling.get("type", scaling.get("rope_type")) != "ntk":
            return super().rotary(config, head_dim)
        if "factor" not in scaling:
            raise ConfigError("rope_scaling.factor", "is missing, but rope type 'ntk' needs it")
        if scaling.get("mixed_b") is not None:
            raise ConfigError(
                "rope_scaling.mixed_b", f"{scaling.get('mixed_b')!r} is not supported: remove it"
            )
        factor = scaling.number("factor", 1.0)
        base = config.number("rope_theta", 10000.0) * factor
        positions = config.integer("max_position_embeddings")
        parameters = {"rope_type": "linear", "factor": factor ** (2 / head_dim)}
        return RotaryConfig(head_dim, base, "linear", positions, positions, parameters)
