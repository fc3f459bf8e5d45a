"""Every codec against its own package, in chunks of every size, and in batches."""

from __future__ import annotations

import pytest
import torch
from support.back_ends import all_back_ends, back_end_params
from support.codecs import REFERENCES, expected, load_reference
from torch import Tensor

from penstock.codecs import CODECS, AudioCodec, CodecChunk

SIZES = (1, 2, 7, 10, 24, 25, 26, 49, 50, 51, 120, 133)
"""Sizes of chunks where a codec decodes in blocks, around the sizes of blocks."""


@pytest.fixture(scope="module", params=REFERENCES)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module", params=back_end_params(all_back_ends()))
def codec(request: pytest.FixtureRequest, name: str) -> AudioCodec:
    codec: AudioCodec = load_reference(name, request.param)
    return codec


@pytest.fixture(scope="module")
def frames(name: str) -> Tensor:
    frames: Tensor = expected(name)["frames"]
    return frames


def test_every_codec_has_a_reference() -> None:
    assert {load_reference(name).name for name in REFERENCES} == {one.name for one in CODECS.codecs}


def test_decodes_as_its_package(codec: AudioCodec, name: str, frames: Tensor) -> None:
    (samples,) = codec.decode([frames])
    assert samples.shape == (len(frames) * codec.samples_per_frame,)
    assert samples.dtype == torch.float32
    torch.testing.assert_close(samples, expected(name)["decoded"], rtol=0, atol=5e-6)


def test_encodes_as_its_package(codec: AudioCodec, name: str) -> None:
    assert codec.can_encode == ("encoded" in expected(name))
    if codec.can_encode:
        assert torch.equal(codec.encode(expected(name)["samples"]), expected(name)["encoded"])


def test_chunks_of_every_size_equal_the_whole(codec: AudioCodec, frames: Tensor) -> None:
    (whole,) = codec.decode_chunks([CodecChunk(frames)])
    sizes = range(1, len(frames) + 1) if len(frames) < 20 else SIZES
    for chunk_frames in sizes:
        chunks = list(codec.cut(frames, chunk_frames))
        parts = codec.decode_chunks(chunks)
        assert [len(part) for part in parts] == [one.num_frames * codec.samples_per_frame for one in chunks]
        assert (torch.cat(parts) - whole).abs().max() <= codec.tolerance, chunk_frames


@pytest.mark.parametrize("frames_per_step", [1, 3])
def test_a_growing_stream_equals_the_whole(codec: AudioCodec, frames: Tensor, frames_per_step: int) -> None:
    known, decoded, parts = 0, 0, []
    while decoded < len(frames):
        known = min(known + frames_per_step, len(frames))
        ended = known == len(frames)
        ready = codec.ready_frames(known, ended=ended)
        if ready > decoded:
            parts += codec.decode_chunks([codec.chunk(frames[:known], decoded, ready, ended=ended)])
            decoded = ready
    (whole,) = codec.decode_chunks([CodecChunk(frames)])
    assert len(parts) > 1
    assert (torch.cat(parts) - whole).abs().max() <= codec.tolerance


def test_a_batch_has_the_bits_of_each_alone(codec: AudioCodec, frames: Tensor) -> None:
    streams = [frames, frames[:1], frames[2:9].flip(0)]
    alone = [codec.decode([one])[0] for one in streams]
    for one, other in zip(codec.decode(streams), alone, strict=True):
        assert torch.equal(one, other)
    chunks = [next(iter(codec.cut(one, 4))) for one in streams]
    alone = [codec.decode_chunks([one])[0] for one in chunks]
    for one, other in zip(codec.decode_chunks(chunks), alone, strict=True):
        assert torch.equal(one, other)


def test_no_frames_give_no_samples(codec: AudioCodec, frames: Tensor) -> None:
    one, other = codec.decode([frames[:0], frames[:2]])
    assert len(one) == 0
    assert torch.equal(other, codec.decode([frames[:2]])[0])
    assert len(codec.decode_chunks([codec.chunk(frames[:3], 0, 0, ended=False)])[0]) == 0
