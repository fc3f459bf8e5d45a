"""SNAC: noise, frame order, int8 weights, context of chunks, checkpoint files, refused configurations."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.codecs import CODEC_REFERENCES, load_expected, load_reference

from penstock.codecs import CodecChunk
from penstock.codecs.snac.noise import noise_at
from penstock.codecs.snac.quantizer import frame_columns
from penstock.errors import CheckpointError, InputError, UnsupportedFeatureError, WeightsError


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    shutil.copytree(CODEC_REFERENCES / "snac", tmp_path / "snac")
    return tmp_path / "snac"


def load_folder(folder: Path) -> object:
    return load_reference(folder.name, folder=folder.parent)


def test_rates_and_sizes_are_those_of_the_checkpoint() -> None:
    codec = load_reference("snac")
    assert (codec.codes_per_frame, codec.samples_per_frame, codec.codebook_size) == (7, 96, 32)
    assert (codec.sample_rate, codec.encoder_sample_rate) == (8000, 8000)


def test_columns_of_a_frame_are_in_order_of_time() -> None:
    assert [columns.tolist() for columns in frame_columns([4, 2, 1])] == [[0], [1, 4], [2, 3, 5, 6]]
    assert [columns.tolist() for columns in frame_columns([3, 1])] == [[0], [1, 2, 3]]


def test_samples_without_noise_equal_the_original_package() -> None:
    codec, tensors = load_reference("snac"), load_expected("snac")
    codec.with_noise = False
    samples = codec.decode([tensors["frames"]])[0]
    torch.testing.assert_close(samples, tensors["decoded_without_noise"], rtol=0, atol=5e-6)
    assert (samples - tensors["decoded"]).abs().max() > 0.01


def test_noise_is_normal_and_depends_on_layer_and_position() -> None:
    noise = noise_at(1, 0, 100_000)
    assert torch.equal(noise[500:900], noise_at(1, 500, 900))
    assert abs(float(noise.mean())) < 0.02
    assert abs(float(noise.std()) - 1) < 0.02
    assert abs(float((noise**4).mean()) - 3) < 0.2
    assert abs(float((noise * noise_at(2, 0, 100_000)).mean())) < 0.02
    assert abs(float((noise[1:] * noise[:-1]).mean())) < 0.02


@pytest.mark.parametrize("name", ["snac", "snac_dense"])
def test_wide_convolutions_run_in_int8(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = load_expected(name)
    frames, exact_samples = tensors["frames"], load_reference(name).decode([tensors["frames"]])[0]
    unchanged_samples = load_reference(name, encoding="int8").decode([frames])[0]
    assert torch.equal(unchanged_samples, exact_samples), (
        "no convolution of these checkpoints is wide enough for int8"
    )
    monkeypatch.setattr("penstock.codecs.snac.model.MIN_QUANTIZED_CHANNELS", 8)
    codec = load_reference(name, encoding="int8")
    samples = codec.decode([frames])[0]
    error = (samples - exact_samples).square().mean()
    assert 0 < error * 100 < exact_samples.square().mean()
    chunk_samples = codec.decode_chunks(list(codec.split_stream(frames, 2)))
    torch.testing.assert_close(torch.cat(chunk_samples), samples, rtol=0, atol=codec.tolerance)
    if codec.can_encode and "encoded" in tensors:
        assert torch.equal(codec.encode(tensors["samples"]), tensors["encoded"])


@pytest.mark.parametrize("context_name", ["left_context", "right_context"])
@pytest.mark.parametrize("name", ["snac", "snac_dense"])
def test_chunks_with_less_context_give_other_samples(name: str, context_name: str) -> None:
    codec, frames = load_reference(name), load_expected(name)["frames"]
    (full_samples,) = codec.decode_chunks([CodecChunk(frames)])
    assert getattr(codec, context_name) < len(frames)
    setattr(codec, context_name, getattr(codec, context_name) - 2)
    chunk_samples = codec.decode_chunks(list(codec.split_stream(frames, 1)))
    assert (torch.cat(chunk_samples) - full_samples).abs().max() > codec.tolerance


def test_a_pickled_checkpoint_is_read_without_running_code(checkpoint: Path) -> None:
    tensors = load_file(checkpoint / "model.safetensors")
    (checkpoint / "model.safetensors").unlink()
    frames = load_expected("snac")["frames"]
    samples = load_reference("snac").decode([frames])[0]
    for is_zip in (True, False):
        torch.save(tensors, checkpoint / "pytorch_model.bin", _use_new_zipfile_serialization=is_zip)
        codec = load_reference("snac", folder=checkpoint.parent)
        assert torch.equal(codec.decode([frames])[0], samples)

    torch.save({**tensors, "callback": print}, checkpoint / "pytorch_model.bin")
    with pytest.raises(WeightsError, match=r"pytorch_model\.bin: cannot be read as tensors"):
        load_folder(checkpoint)
    torch.save([1, 2], checkpoint / "pytorch_model.bin")
    with pytest.raises(WeightsError, match="must contain a dictionary of tensors"):
        load_folder(checkpoint)
    tensors.pop("decoder.model.0.bias")
    tensors["decoder.extra"] = tensors["decoder.model.1.bias"]
    tensors["decoder.model.1.bias"] = torch.zeros(3)
    torch.save(tensors, checkpoint / "pytorch_model.bin")
    with pytest.raises(
        WeightsError,
        match=r"0\.bias is missing; .*1\.bias is \[3\] where.* needs \[16\]; decoder\.extra is unexp",
    ):
        load_folder(checkpoint)


def test_older_names_of_weight_normalization_are_read(checkpoint: Path) -> None:
    tensors = load_file(checkpoint / "model.safetensors")
    renamed_tensors = {
        name.replace("parametrizations.weight.original0", "weight_g").replace(
            "parametrizations.weight.original1", "weight_v"
        ): tensor
        for name, tensor in tensors.items()
    }
    save_file(renamed_tensors, checkpoint / "model.safetensors")
    codec, frames = load_reference("snac", folder=checkpoint.parent), load_expected("snac")["frames"]
    assert torch.equal(codec.decode([frames])[0], load_reference("snac").decode([frames])[0])


def test_a_configuration_with_attention_is_refused(checkpoint: Path) -> None:
    config = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps({**config, "attn_window_size": 32}))
    with pytest.raises(UnsupportedFeatureError, match="SNAC with attn_window_size"):
        load_folder(checkpoint)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"vq_strides": [4, 3]}, r"each of vq_strides must be a multiple of the next, were \[4, 3\]"),
        ({"decoder_rates": [2, 2]}, "must have the same product"),
        ({"decoder_rates": []}, "decoder_rates must be a list of whole numbers above 0"),
        ({"codebook_size": "many"}, "codebook_size must be a whole number"),
    ],
)
def test_invalid_sizes_are_refused(checkpoint: Path, change: dict[str, object], problem: str) -> None:
    config = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises(CheckpointError, match=problem):
        load_folder(checkpoint)


def test_samples_of_the_wrong_shape_are_refused_and_no_samples_give_no_frames() -> None:
    codec = load_reference("snac")
    with pytest.raises(InputError, match=r"float32 of shape \[S\], were torch.float32 of shape \[2, 9\]"):
        codec.encode(torch.zeros(2, 9))
    assert codec.encode(torch.zeros(0)).shape == (0, 7)
