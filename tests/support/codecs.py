"""Tiny codecs with random weights, and the outputs of the original packages.

tools/write_codec_references.py writes these outputs.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load_file
from support.back_ends import all_back_ends
from torch import Tensor

from penstock.codecs import load_codec

CODEC_REFERENCES = Path(__file__).parents[1] / "codecs" / "references"
REFERENCES = sorted(folder.name for folder in CODEC_REFERENCES.iterdir())


def load_reference(
    name: str, back_end: str = "reference", folder: Path = CODEC_REFERENCES, encoding: str = "float32"
) -> Any:
    """Return the codec of the folder ``name``, with the operations of a back end."""
    session: Any = SimpleNamespace(ops=all_back_ends(deterministic=True)[back_end])
    return load_codec(folder / name, session, encoding=encoding)


NEUCODEC: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "encoder_hidden_size": 4,
    "downsampling_ratios": [2, 2, 4, 4, 5],
    "quantization_dim": 64,
}
SEMANTIC: dict[str, Any] = {
    "model_type": "wav2vec2-bert",
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 40,
    "output_hidden_size": 32,
    "feature_projection_input_dim": 160,
    "conv_depthwise_kernel_size": 5,
    "left_max_position_embeddings": 6,
    "right_max_position_embeddings": 3,
}


def write_neucodec(folder: Path, levels: tuple[int, ...] = (4, 5, 3)) -> Any:
    """Write a random NeuCodec checkpoint with an encoder. Return the model of transformers."""
    from transformers import NeuCodecConfig, NeuCodecModel

    torch.manual_seed(0)
    values = {**NEUCODEC, "quantization_levels": list(levels)}
    model = NeuCodecModel(NeuCodecConfig(**values, semantic_model_config=SEMANTIC)).eval()
    for name, parameter in model.named_parameters():
        is_scale = "norm" in name and name.endswith("weight")
        fan_in = parameter[0].numel() if parameter.dim() > 1 else 25
        scale = 0.04 if "project_in" in name else 1.0
        parameter.data.normal_(1.0 if is_scale else 0.0, scale * fan_in**-0.5)
    model.save_pretrained(folder)
    return model


def load_expected(name: str) -> dict[str, Tensor]:
    """Return the tensors that the codec's original package computed."""
    tensors: dict[str, Tensor] = load_file(CODEC_REFERENCES / name / "expected.tensors")
    return tensors
