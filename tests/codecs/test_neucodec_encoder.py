"""The encoder of NeuCodec against transformers, with small random weights."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from support.back_ends import all_back_ends, back_end_params
from support.codecs import write_neucodec
from torch import Tensor

from penstock.codecs import load_codec
from penstock.codecs.neucodec.features import mel_rows
from penstock.errors import InputError, UnsupportedFeatureError, WeightsError

LENGTHS = (9000, 9280, 20000)
"""Numbers of samples. One is a multiple of the frame size."""


@dataclass
class ReferenceEncoder:
    """A checkpoint, and the results of transformers for it."""

    folder: Path
    model: Any
    outputs: dict[str, Tensor]

    def encode(self, samples: Tensor) -> Tensor:
        """Return the codes ``[F]`` of transformers, and store the module outputs in `outputs`."""
        padded_samples = F.pad(samples, (0, 320 - len(samples) % 320))
        with torch.no_grad():
            result = self.model.encode(padded_samples[None, None], seamless_rows(padded_samples)[None])
        codes: Tensor = result.audio_codes[0, 0]
        return codes


def seamless_rows(padded_samples: Tensor) -> Tensor:
    """Return the features of padded samples, computed by the feature extractor of Seamless M4T."""
    from transformers import SeamlessM4TFeatureExtractor

    result = SeamlessM4TFeatureExtractor()(padded_samples.numpy(), sampling_rate=16000, return_tensors="np")
    return torch.from_numpy(np.asarray(result["input_features"][0], dtype=np.float32))


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> ReferenceEncoder:
    folder: Path = tmp_path_factory.mktemp("neucodec")
    model = write_neucodec(folder)
    outputs: dict[str, Tensor] = {}

    def record_output(name: str) -> Any:
        def hook(_module: Any, _inputs: Any, output: Any) -> None:
            outputs[name] = output[0].detach()

        return hook

    for name in ("semantic_adapter", "acoustic_encoder", "quantizer.project_in"):
        model.get_submodule(name).register_forward_hook(record_output(name))
    return ReferenceEncoder(folder, model, outputs)


@pytest.fixture(scope="module", params=back_end_params(all_back_ends()))
def session(request: pytest.FixtureRequest) -> Any:
    return SimpleNamespace(ops=all_back_ends(deterministic=True)[request.param])


def make_random_samples(length: int, seed: int = 0) -> Tensor:
    """Return noise plus a tone of rising frequency."""
    torch.manual_seed(seed)
    times = torch.arange(length) / 16000
    return 0.1 * torch.randn(length) + 0.3 * torch.sin(6.28 * (200 + 300 * times) * times)


@pytest.mark.parametrize("length", LENGTHS)
def test_features_equal_transformers(length: int) -> None:
    """Penstock computes the features in float64, so quiet bins differ from transformers by rounding."""
    expected = seamless_rows(make_random_samples(length))
    features = mel_rows(make_random_samples(length))
    torch.testing.assert_close(features, expected[: len(features)], rtol=0, atol=2e-3)
    assert len(expected) - len(features) in (0, 1)  # transformers pads an odd number of frames
    assert float(expected.std()) == pytest.approx(1, abs=0.1)


@pytest.mark.parametrize("length", LENGTHS)
@torch.no_grad()
def test_module_outputs_and_codes_equal_transformers(
    reference: ReferenceEncoder, session: Any, length: int
) -> None:
    codec = load_codec(reference.folder, session)
    assert codec.can_encode
    samples = make_random_samples(length)
    expected = reference.encode(samples)
    encoder = codec._load_encoder()
    padded_samples = F.pad(samples, (0, 320 - length % 320))
    semantic_features = encoder.semantic(seamless_rows(padded_samples), session.ops)
    acoustic_features = encoder.acoustic(padded_samples, session.ops)
    for result, name in ((semantic_features, "semantic_adapter"), (acoustic_features, "acoustic_encoder")):
        reference_output = reference.outputs[name].T
        torch.testing.assert_close(
            result, reference_output, rtol=0, atol=2e-5 * max(1.0, float(reference_output.std()))
        )
    levels = reference.outputs["quantizer.project_in"]
    assert torch.equal(encoder._quantize(levels), expected)
    codes = codec.encode(samples)
    assert codes.shape == (length // 320, 1)
    assert codes.dtype == torch.int64
    assert len(expected.unique()) > 5
    assert torch.equal(codes[:, 0], expected)


def test_decoding_works_without_the_tensors_of_the_encoder(
    reference: ReferenceEncoder, session: Any, tmp_path: Path
) -> None:
    codec = load_codec(reference.folder, session)
    codes = codec.encode(make_random_samples(9000))
    tensors = load_file(reference.folder / "model.safetensors")
    decoder_tensors = {
        name: tensor for name, tensor in tensors.items() if "encoder" not in name and "adapter" not in name
    }
    save_file(decoder_tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((reference.folder / "config.json").read_text())
    decoder_only = load_codec(tmp_path, session)
    assert not decoder_only.can_encode
    assert torch.equal(decoder_only.decode([codes])[0], codec.decode([codes])[0])
    with pytest.raises(UnsupportedFeatureError, match="it has no encoder"):
        decoder_only.encode(make_random_samples(9000))


def test_samples_are_cut_to_whole_frames_and_two_dimensional_samples_are_refused(
    reference: ReferenceEncoder, session: Any
) -> None:
    codec = load_codec(reference.folder, session)
    assert [len(codec.encode(make_random_samples(length))) for length in (0, 100, 319, 320, 639, 640)] == [
        0,
        0,
        0,
        1,
        1,
        2,
    ]
    with pytest.raises(InputError, match=r"float32 of shape \[S\]"):
        codec.encode(torch.zeros(1, 100))


def test_missing_tensors_and_unsupported_position_embeddings_are_refused(
    reference: ReferenceEncoder, session: Any, tmp_path: Path
) -> None:
    tensors = load_file(reference.folder / "model.safetensors")
    del tensors["acoustic_encoder.conv2.bias"]
    save_file(tensors, tmp_path / "model.safetensors")
    config = json.loads((reference.folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(WeightsError, match=r"1 missing: acoustic_encoder.conv2.bias"):
        load_codec(tmp_path, session).encode(make_random_samples(9000))
    config["semantic_model_config"]["position_embeddings_type"] = "rotary"
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedFeatureError, match="position_embeddings_type rotary"):
        load_codec(tmp_path, session).encode(make_random_samples(9000))
