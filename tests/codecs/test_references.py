"""Codecs agree with their reference implementations. Chunks, streams and batches agree with whole streams."""

from __future__ import annotations

import pytest
import torch
from support.back_ends import all_back_ends, back_end_params
from support.codecs import REFERENCES, load_expected, load_reference
from torch import Tensor

from penstock.codecs import CODECS, AudioCodec, CodecChunk

CHUNK_SIZES = (1, 2, 7, 10, 24, 25, 26, 49, 50, 51, 120, 133)
"""Chunk sizes for references of 20 or more frames, many of them close to the block sizes of codecs."""


@pytest.fixture(scope="module", params=REFERENCES)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module", params=back_end_params(all_back_ends()))
def codec(request: pytest.FixtureRequest, name: str) -> AudioCodec:
    codec: AudioCodec = load_reference(name, request.param)
    return codec


@pytest.fixture(scope="module")
def frames(name: str) -> Tensor:
    frames: Tensor = load_expected(name)["frames"]
    return frames


def test_every_codec_has_a_reference() -> None:
    assert {load_reference(name).name for name in REFERENCES} == {codec.name for codec in CODECS.codecs}


def test_decoded_samples_equal_the_original_package(codec: AudioCodec, name: str, frames: Tensor) -> None:
    (samples,) = codec.decode([frames])
    assert samples.shape == (len(frames) * codec.samples_per_frame,)
    assert samples.dtype == torch.float32
    torch.testing.assert_close(samples, load_expected(name)["decoded"], rtol=0, atol=5e-6)


def test_codes_equal_the_original_package(codec: AudioCodec, name: str) -> None:
    assert codec.can_encode == ("encoded" in load_expected(name))
    if codec.can_encode:
        assert torch.equal(codec.encode(load_expected(name)["samples"]), load_expected(name)["encoded"])


def test_chunks_of_many_sizes_equal_decoding_at_once(codec: AudioCodec, frames: Tensor) -> None:
    (full_samples,) = codec.decode_chunks([CodecChunk(frames)])
    sizes = range(1, len(frames) + 1) if len(frames) < 20 else CHUNK_SIZES
    for chunk_frames in sizes:
        chunks = list(codec.split_stream(frames, chunk_frames))
        chunk_samples = codec.decode_chunks(chunks)
        assert [len(samples) for samples in chunk_samples] == [
            chunk.num_frames * codec.samples_per_frame for chunk in chunks
        ]
        assert (torch.cat(chunk_samples) - full_samples).abs().max() <= codec.tolerance, chunk_frames


@pytest.mark.parametrize("frames_per_step", [1, 3])
def test_a_growing_stream_equals_decoding_at_once(
    codec: AudioCodec, frames: Tensor, frames_per_step: int
) -> None:
    num_known, num_decoded, chunk_samples = 0, 0, []
    while num_decoded < len(frames):
        num_known = min(num_known + frames_per_step, len(frames))
        is_ended = num_known == len(frames)
        num_ready = codec.ready_frames(num_known, ended=is_ended)
        if num_ready > num_decoded:
            chunk_samples += codec.decode_chunks(
                [codec.chunk(frames[:num_known], num_decoded, num_ready, ended=is_ended)]
            )
            num_decoded = num_ready
    (full_samples,) = codec.decode_chunks([CodecChunk(frames)])
    assert len(chunk_samples) > 1
    assert (torch.cat(chunk_samples) - full_samples).abs().max() <= codec.tolerance


def test_samples_of_a_batch_are_bit_equal_to_single_streams(codec: AudioCodec, frames: Tensor) -> None:
    streams = [frames, frames[:1], frames[2:9].flip(0)]
    all_single_samples = [codec.decode([stream])[0] for stream in streams]
    for batch_samples, single_samples in zip(codec.decode(streams), all_single_samples, strict=True):
        assert torch.equal(batch_samples, single_samples)
    chunks = [next(iter(codec.split_stream(stream, 4))) for stream in streams]
    all_single_samples = [codec.decode_chunks([chunk])[0] for chunk in chunks]
    for batch_samples, single_samples in zip(codec.decode_chunks(chunks), all_single_samples, strict=True):
        assert torch.equal(batch_samples, single_samples)


def test_a_stream_without_frames_has_no_samples(codec: AudioCodec, frames: Tensor) -> None:
    no_samples, decoded_samples = codec.decode([frames[:0], frames[:2]])
    assert len(no_samples) == 0
    assert torch.equal(decoded_samples, codec.decode([frames[:2]])[0])
    assert len(codec.decode_chunks([codec.chunk(frames[:3], 0, 0, ended=False)])[0]) == 0
