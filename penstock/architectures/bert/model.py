"""BERT (Devlin et al. 2019, arXiv:1810.04805): learned positions and token types, post-norm blocks."""

from __future__ import annotations

from penstock.architectures.post_norm import PostNormModel
from penstock.nn import ClassifierNames, EncoderNames, MaskedLMNames


def model_tensor_name(name: str) -> str:
    """Return a tensor name without the prefix ``bert.``, which only checkpoints with a head use.

    The names ``gamma`` and ``beta`` in checkpoints converted from TensorFlow become ``weight`` and ``bias``.
    """
    name = name.removeprefix("bert.")
    return name.replace("LayerNorm.gamma", "LayerNorm.weight").replace("LayerNorm.beta", "LayerNorm.bias")


class BertModel(PostNormModel):
    """Reads the configuration of BERT and builds its network."""

    weights_adapter = model_tensor_name
    names = EncoderNames()
    classifier_names = ClassifierNames(dense="pooler.dense", output="classifier")
    masked_lm_names = MaskedLMNames(
        dense="cls.predictions.transform.dense",
        norm="cls.predictions.transform.LayerNorm",
        decoder="cls.predictions.decoder",
        bias="cls.predictions.bias",
    )

    ignored_weights = (
        "embeddings.position_ids",
        "pooler.*",
        "cls.seq_relationship.*",
        "cls.predictions.*",
    )
