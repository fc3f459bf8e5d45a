"""Write tests/codecs/references: tiny codecs with random weights, and what their own packages compute.

    python tools/write_codec_references.py [snac] [neucodec]

Needs the package ``snac`` or ``transformers``. The tests compare Penstock's codecs with these files.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from contextlib import contextmanager
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
SNACS = {
    "snac": SNAC,
    "snac_dense": {**SNAC, "vq_strides": [6, 2], "noise": False, "depthwise": False},
}


def write_snac(name: str) -> None:
    """Write a SNAC checkpoint, decoded frames and encoded samples."""
    from snac import SNAC as Model

    from penstock.codecs.snac.quantizer import frame_columns

    torch.manual_seed(0)
    config = SNACS[name]
    model = Model(**config).eval()
    for parameter_name, parameter in model.named_parameters():
        if parameter_name.endswith("alpha"):
            parameter.data.uniform_(0.5, 2.0)
        elif not parameter_name.endswith("original0"):
            parameter.data.normal_(0, 0.3)
    columns = frame_columns(config["vq_strides"])
    frames = torch.randint(0, config["codebook_size"], (13, sum(map(len, columns))))
    codes = [frames[:, one].flatten()[None] for one in columns]
    samples = 0.5 * torch.randn(24 * config["vq_strides"][0] * 5 + 7)
    with torch.no_grad():
        with _noise(lambda _layer, length: torch.zeros(length)):
            silent = model.decode(codes)[0, 0]
        with _noise(_positional_noise):
            decoded = model.decode(codes)[0, 0]
        found = model.encode(samples[None, None])
    encoded = torch.empty(len(found[0][0]), frames.shape[1], dtype=torch.int64)
    for one, level in zip(columns, found, strict=True):
        encoded[:, one] = level[0].view(len(encoded), -1)
    expected = {
        "frames": frames,
        "decoded": decoded,
        "decoded_without_noise": silent,
        "samples": samples,
        "encoded": encoded,
    }
    _save(name, config, model.state_dict(), expected)


def _positional_noise(layer: int, length: int) -> Tensor:
    from penstock.codecs.snac.noise import noise_at

    return noise_at(layer, 0, length)


@contextmanager
def _noise(noise: Callable[[int, int], Tensor]):
    """Replace the random numbers of the noise blocks, in the order of the blocks."""
    layers = iter(range(100))
    with mock.patch("torch.randn", lambda shape, **_: noise(next(layers), shape[-1]).view(shape)):
        yield


def _save(name: str, config: dict, tensors: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    folder = FOLDER / name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    save_file({key: one.contiguous().clone() for key, one in tensors.items()}, folder / "model.safetensors")
    save_file({key: one.contiguous() for key, one in expected.items()}, folder / "expected.tensors")
    print(folder, sum(file.stat().st_size for file in folder.iterdir()) // 1000, "kB")


if __name__ == "__main__":
    chosen = sys.argv[1:] or ["snac"]
    for codec in SNACS if "snac" in chosen else ():
        write_snac(codec)
