"""NeuCodec: code digits, windows of streams, encodings, refused configurations."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from support.codecs import CODEC_REFERENCES, load_expected, load_reference

from penstock.codecs import CodecChunk
from penstock.codecs.neucodec import model as neucodec
from penstock.codecs.neucodec.decoder import code_digits
from penstock.codecs.neucodec.windows import RIGHT_CONTEXT, block_at, frame_block
from penstock.errors import CheckpointError, UnsupportedFeatureError


def test_rates_and_sizes_are_those_of_the_checkpoint() -> None:
    codec = load_reference("neucodec")
    assert (codec.codes_per_frame, codec.samples_per_frame, codec.codebook_size) == (1, 24, 60)
    assert (codec.sample_rate, codec.encoder_sample_rate) == (24000, 16000)


def test_the_least_significant_code_digit_comes_first() -> None:
    digits = code_digits((4, 4, 4, 4, 4, 4, 4, 4))
    assert digits.shape == (65536, 8)
    assert digits[1 + 2 * 4 + 3 * 16].tolist() == [-0.5, 0.0, 0.5, -1, -1, -1, -1, -1]


def test_blocks_cover_each_frame_once() -> None:
    starts = [frame_block(index).start for index in range(8)]
    assert starts == [0, 10, 25, 45, 75, 115, 165, 215]
    for frame in range(300):
        assert block_at(frame).start <= frame < block_at(frame).stop
        assert frame_block(block_at(frame).index + 1).start == block_at(frame).stop


@pytest.mark.parametrize(
    ("num_known", "num_ready"),
    [(0, 0), (14, 0), (15, 10), (29, 10), (30, 25), (169, 115), (170, 165), (219, 165)],
)
def test_a_block_is_ready_when_all_frames_of_its_window_are_known(num_known: int, num_ready: int) -> None:
    codec = load_reference("neucodec")
    assert codec.ready_frames(num_known, ended=False) == num_ready
    assert codec.ready_frames(num_known, ended=True) == num_known


def test_samples_are_blended_in_the_right_context_of_a_window() -> None:
    codec, frames = load_reference("neucodec"), load_expected("neucodec")["frames"]
    samples_per_frame = codec.samples_per_frame
    (streamed_samples,) = codec.decode_chunks([CodecChunk(frames)])
    first_window, second_window, third_window = codec.decode([frames[:15], frames[:30], frames[:50]])
    assert torch.equal(streamed_samples[: 10 * samples_per_frame], first_window[: 10 * samples_per_frame])
    assert torch.equal(
        streamed_samples[15 * samples_per_frame : 25 * samples_per_frame],
        second_window[15 * samples_per_frame : 25 * samples_per_frame],
    )
    weight = (torch.arange(RIGHT_CONTEXT * samples_per_frame) + 0.5) / (RIGHT_CONTEXT * samples_per_frame)
    overlap_range = slice(25 * samples_per_frame, 30 * samples_per_frame)
    blended_samples = second_window[overlap_range] * (1 - weight) + third_window[overlap_range] * weight
    torch.testing.assert_close(streamed_samples[overlap_range], blended_samples)


def test_chunks_are_equal_without_the_cache_of_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    frames = load_expected("neucodec")["frames"]
    (full_samples,) = load_reference("neucodec").decode_chunks([CodecChunk(frames)])
    monkeypatch.setattr(neucodec, "MAX_CACHED_WINDOWS", 0)
    codec = load_reference("neucodec")
    chunk_samples = [codec.decode_chunks([chunk])[0] for chunk in codec.split_stream(frames, 17)]
    assert torch.equal(torch.cat(chunk_samples), full_samples)


def test_a_chunk_with_a_wrong_start_gives_other_samples() -> None:
    codec, frames = load_reference("neucodec"), load_expected("neucodec")["frames"]
    (full_samples,) = codec.decode_chunks([CodecChunk(frames)])
    chunk = list(codec.split_stream(frames, 50))[1]
    misplaced_chunk = CodecChunk(chunk.frames[1:], chunk.start - 1, chunk.left - 1, chunk.right)
    (samples,) = codec.decode_chunks([misplaced_chunk])
    assert (samples - full_samples[50 * 24 : 100 * 24]).abs().max() > codec.tolerance


@pytest.mark.parametrize(("encoding", "min_power_ratio"), [("bfloat16", 60), ("int8", 15)])
def test_samples_in_bfloat16_and_int8_are_close_to_float32(encoding: str, min_power_ratio: float) -> None:
    frames, full_samples = load_expected("neucodec")["frames"], load_expected("neucodec")["decoded"]
    samples = load_reference("neucodec", encoding=encoding).decode([frames])[0]
    error = (samples - full_samples).square().mean()
    assert 0 < error * min_power_ratio < full_samples.square().mean()


def test_encoding_without_an_encoder_is_refused() -> None:
    codec = load_reference("neucodec")
    assert not codec.can_encode
    with pytest.raises(UnsupportedFeatureError, match="encoding audio with this NeuCodec checkpoint"):
        codec.encode(torch.zeros(480))


@pytest.mark.parametrize(
    ("change", "error", "problem"),
    [
        ({"hidden_act": "gelu"}, UnsupportedFeatureError, "hidden_act gelu is not supported: only silu"),
        ({"num_key_value_heads": 1}, UnsupportedFeatureError, "num_key_value_heads 1"),
        ({"downsampling_ratios": []}, CheckpointError, "a whole number of samples per frame"),
        ({"hidden_size": 64}, CheckpointError, r"embed\.weight is \[32, 32, 7\]"),
    ],
)
def test_unsupported_configurations_are_refused(
    tmp_path: Path, change: dict[str, object], error: type[Exception], problem: str
) -> None:
    folder = shutil.copytree(CODEC_REFERENCES / "neucodec", tmp_path / "neucodec")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises(error, match=problem):
        load_reference("neucodec", folder=tmp_path)
