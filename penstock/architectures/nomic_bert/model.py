"""Nomic BERT (Nussbaum et al. 2024, arXiv:2402.01613): BERT with RoPE and gated feed-forward layers."""

from __future__ import annotations

from dataclasses import replace

from penstock.architectures.post_norm import PostNormModel, prefix_remover
from penstock.config.huggingface import HuggingFaceConfig
from penstock.errors import ConfigError
from penstock.nn import ClassifierNames, EncoderNames, MaskedLMNames, PostNormSizes, RotaryConfig

_OLDER_KEYS = {
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "intermediate_size": "n_inner",
    "max_position_embeddings": "n_positions",
    "layer_norm_eps": "layer_norm_epsilon",
    "rope_theta": "rotary_emb_base",
}
"""Maps keys of transformers' ``config.json`` to keys of older files."""
_REQUIRED_OLDER_VALUES = {
    "activation_function": "swiglu",
    "prenorm": False,
    "qkv_proj_bias": False,
    "mlp_fc1_bias": False,
    "mlp_fc2_bias": False,
    "rotary_emb_fraction": 1.0,
    "rotary_emb_interleaved": False,
    "rotary_emb_scale_base": None,
    "rotary_scaling_factor": None,
}
"""The only supported value of each of these keys in older files."""


class NomicBertModel(PostNormModel):
    """Reads the configuration of Nomic BERT and builds its network."""

    weights_adapter = prefix_remover("nomic_bert.")
    ignored_weights = ("pooler.*", "cls.*", "*rotary_emb.inv_freq")
    names = EncoderNames(
        positions=None,
        norm="emb_ln",
        block="encoder.layers.{layer}",
        qkv=("attn.Wqkv",),
        output="attn.out_proj",
        attention_norm="norm1",
        gate="mlp.fc12",
        up="mlp.fc11",
        down="mlp.fc2",
        mlp_norm="norm2",
    )
    classifier_names = ClassifierNames(dense="pooler.dense", output="classifier")
    masked_lm_names = MaskedLMNames(
        dense="cls.predictions.transform.dense",
        norm="cls.predictions.transform.layer_norm",
        decoder="cls.predictions.decoder",
        bias="cls.predictions.bias",
    )

    @classmethod
    def sizes(cls, config: HuggingFaceConfig) -> PostNormSizes:
        if "n_embd" in config:
            config = with_transformers_keys(config)
        head_dim = config.integer("hidden_size") // config.integer("num_attention_heads")
        rotary = RotaryConfig.from_huggingface(config, head_dim, default_rope_theta=1000.0)
        values = HuggingFaceConfig({"hidden_act": "silu"} | config.to_dict())
        return replace(
            super().sizes(values), rotary=rotary, attention_bias=False, up_bias=False, down_bias=False
        )


def with_transformers_keys(config: HuggingFaceConfig) -> HuggingFaceConfig:
    """Return an older configuration with the same values also under the keys of transformers.

    Raises:
        ConfigError: a key has an unsupported value.
    """
    for key, expected in _REQUIRED_OLDER_VALUES.items():
        if key in config and config.get(key) != expected:
            raise ConfigError(key, f"must be {expected!r}, was {config.get(key)!r}")
    renamed = {new: config.get(old) for new, old in _OLDER_KEYS.items() if old in config}
    return HuggingFaceConfig(config.to_dict() | renamed)
