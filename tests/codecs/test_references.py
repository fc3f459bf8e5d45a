"""Every codec against its own package, in chunks of every size, and in batches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.back_ends import all_back_ends
from support.codecs import REFERENCES, expected, load_reference
from torch import Tensor

from penstock.codecs import CODECS, AudioCodec, CodecChunk


@pytest.fixture(scope="module", params=REFERENCES)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module", params=all_back_ends())
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
    if not codec.can_encode:
        pytest.skip("this checkpoint has no encoder")
    assert torch.equal(codec.encode(expected(name)["samples"]), expected(name)["encoded"])


def test_chunks_of_every_size_equal_the_whole(codec: AudioCodec, frames: Tensor) -> None:
    (whole,) = codec.decode_chunks([CodecChunk(frames)])
    for chunk_frames in range(1, len(frames) + 1):
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


@pytest.mark.parametrize("side", ["left_context", "right_context"])
def test_less_context_gives_other_samples(name: str, frames: Tensor, side: str) -> None:
    codec: Any = load_reference(name)
    (whole,) = codec.decode_chunks([CodecChunk(frames)])
    setattr(codec, side, getattr(codec, side) - 2)
    parts = codec.decode_chunks(list(codec.cut(frames, 1)))
    assert (torch.cat(parts) - whole).abs().max() > codec.tolerance


def test_a_batch_has_the_bits_of_each_alone(codec: AudioCodec, frames: Tensor) -> None:
    streams = [frames, frames[:1], frames[2:9].flip(0)]
    alone = [codec.decode([one])[0] for one in streams]
    for one, other in zip(codec.decode(streams), alone, strict=True):
        assert torch.equal(one, other)


def test_no_frames_give_no_samples(codec: AudioCodec, frames: Tensor) -> None:
    one, other = codec.decode([frames[:0], frames[:2]])
    assert len(one) == 0
    assert torch.equal(other, codec.decode([frames[:2]])[0])
