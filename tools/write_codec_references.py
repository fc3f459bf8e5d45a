"""Write tests/codecs/references: tiny random codecs, and the outputs of their reference implementations.

    python tools/write_codec_references.py [snac] [neucodec]

Needs the package ``snac`` for SNAC and ``transformers`` for NeuCodec. The tests compare Penstock's codecs
with these files.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from contextlib import contextmanager
from math import prod
from pathlib import Path
from unittest import mock

import torch
from safetensors.torch import save_file
from torch import Tensor

FOLDER = Path(__file__).resolve().parents[1] / "tests" / "codecs" / "references"

SNAC = {
    "sampling_rate": 8000,
    "encoder_dim": 2,
    "encoder_rates": [2, 3, 4],
    "decoder_dim": 16,
    "decoder_rates": [4, 3, 2],
    "attn_window_size": None,
    "codebook_size": 32,
    "codebook_dim": 4,
    "vq_strides": [4, 2, 1],
    "noise": True,
    "depthwise": True,
}
SNAC_CONFIGS = {
    "snac": SNAC,
    "snac_dense": {**SNAC, "vq_strides": [6, 2], "noise": False, "depthwise": False},
}

NEUCODEC = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "encoder_hidden_size": 4,
    "downsampling_ratios": [2, 2, 4],
    "quantization_dim": 64,
    "quantization_levels": [4, 5, 3],
}
SEMANTIC = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "output_hidden_size": 32,
    "feature_projection_input_dim": 8,
}


def write_snac(name: str) -> None:
    """Write a SNAC checkpoint, decoded frames and encoded samples."""
    from snac import SNAC as Model

    from penstock.codecs.snac.quantizer import frame_columns

    torch.manual_seed(0)
    config = SNAC_CONFIGS[name]
    model = Model(**config).eval()
    for parameter_name, parameter in model.named_parameters():
        if parameter_name.endswith("alpha"):
            parameter.data.uniform_(0.5, 2.0)
        elif not parameter_name.endswith("original0"):
            parameter.data.normal_(0, 0.3)
    columns = frame_columns(config["vq_strides"])
    frames = torch.randint(0, config["codebook_size"], (13, sum(map(len, columns))))
    codes = [frames[:, column].flatten()[None] for column in columns]
    samples = 0.5 * torch.randn(24 * config["vq_strides"][0] * 5 + 7)
    with torch.no_grad():
        with _replace_noise(lambda _layer, length: torch.zeros(length)):
            decoded_without_noise = model.decode(codes)[0, 0]
        with _replace_noise(_positional_noise):
            decoded = model.decode(codes)[0, 0]
        levels = model.encode(samples[None, None])
    encoded = torch.empty(len(levels[0][0]), frames.shape[1], dtype=torch.int64)
    for column, level in zip(columns, levels, strict=True):
        encoded[:, column] = level[0].view(len(encoded), -1)
    expected = {
        "frames": frames,
        "decoded": decoded,
        "decoded_without_noise": decoded_without_noise,
        "samples": samples,
        "encoded": encoded,
    }
    _save(name, config, model.state_dict(), expected)


def write_neucodec() -> None:
    """Write a NeuCodec checkpoint (decoder, quantizer and ``fc_encoder``), and decoded frames."""
    from transformers import NeuCodecConfig, NeuCodecModel

    torch.manual_seed(0)
    config = NeuCodecConfig(**NEUCODEC, semantic_model_config={"model_type": "wav2vec2-bert", **SEMANTIC})
    model = NeuCodecModel(config).eval()
    for name, parameter in model.named_parameters():
        is_scale = "norm" in name and name.endswith("weight")
        parameter.data.normal_(1.0 if is_scale else 0.0, 0.2)
    frames = torch.randint(0, prod(NEUCODEC["quantization_levels"]), (133, 1))
    with torch.no_grad():
        decoded = model.decode(frames.t()[None]).audio_values[0, 0]
    tensors = {
        name: tensor
        for name, tensor in model.state_dict().items()
        if name.startswith(("acoustic_decoder.", "quantizer.", "fc_encoder."))
    }
    _save("neucodec", json.loads(config.to_json_string()), tensors, {"frames": frames, "decoded": decoded})


def _positional_noise(layer: int, length: int) -> Tensor:
    from penstock.codecs.snac.noise import noise_at

    return noise_at(layer, 0, length)


@contextmanager
def _replace_noise(noise: Callable[[int, int], Tensor]):
    """Replace the random numbers of SNAC's noise blocks by ``noise(block index, length)``."""
    layers = iter(range(100))
    with mock.patch("torch.randn", lambda shape, **_: noise(next(layers), shape[-1]).view(shape)):
        yield


def _save(name: str, config: dict, tensors: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    folder = FOLDER / name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    save_file(
        {key: tensor.contiguous().clone() for key, tensor in tensors.items()}, folder / "model.safetensors"
    )
    save_file({key: tensor.contiguous() for key, tensor in expected.items()}, folder / "expected.tensors")
    print(folder, sum(file.stat().st_size for file in folder.iterdir()) // 1000, "kB")


if __name__ == "__main__":
    codec_names = sys.argv[1:] or ["snac", "neucodec"]
    for codec in SNAC_CONFIGS if "snac" in codec_names else ():
        write_snac(codec)
    if "neucodec" in codec_names:
        write_neucodec()
