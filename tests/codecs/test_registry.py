"""Audio codecs are discovered by folder, selected by ``config.json`` and loaded on request.

Malformed code frames and incomplete chunks are refused.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from penstock.codecs import CodecChunk, CodecRegistry, load_codec
from penstock.engine import InferenceSession
from penstock.errors import CheckpointError, ConfigError, InputError, UnsupportedFeatureError

RECORD = """
from penstock.codecs import SupportedCodec

CODEC = SupportedCodec(
    name={name!r}, detect=lambda config: config.get("type") == {name!r}, codec="model:SquareCodec"
)
"""
MODEL = '''
"""Each frame of two codes becomes four samples. The first one depends on the previous frame, the last
    one on the next frame."""
import torch
from penstock.codecs import AudioCodec
from penstock.errors import UnsupportedFeatureError


class SquareCodec(AudioCodec):
    name = "square"
    sample_rate = encoder_sample_rate = 100
    codes_per_frame, samples_per_frame, codebook_size = 2, 4, 8
    left_context, right_context, tolerance = 1, 1, 0.0

    @classmethod
    def load(cls, folder, config, session, encoding):
        return cls()

    def decode_chunks(self, chunks):
        results = []
        for chunk in chunks:
            self.check_chunk(chunk)
            values = chunk.frames.float()
            previous_values = torch.cat([torch.zeros(1, 2), values[:-1]])
            next_values = torch.cat([values[1:], torch.zeros(1, 2)])
            samples = torch.cat([previous_values[:, :1] / 8, values / 8, next_values[:, :1] / 8], 1)
            results.append(samples[chunk.left : chunk.left + chunk.num_frames].flatten())
        return results

    def encode(self, samples):
        raise UnsupportedFeatureError("encoding", "this codec has no encoder")
'''


@pytest.fixture
def registry(tmp_path: Path) -> CodecRegistry:
    for name in ("square", "other"):
        (tmp_path / "found" / name).mkdir(parents=True)
        (tmp_path / "found" / name / "__init__.py").write_text(RECORD.format(name=name))
        (tmp_path / "found" / name / "model.py").write_text(MODEL)
    (tmp_path / "found" / "a_module.py").write_text("raise RuntimeError('not a folder')")
    return CodecRegistry([tmp_path / "found"])


def write_codec_checkpoint(tmp_path: Path, **config: object) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "pytorch_model.bin").touch()
    return tmp_path


def test_each_folder_is_a_codec_that_is_loaded_on_request(registry: CodecRegistry, tmp_path: Path) -> None:
    records = {record.name: record for record in registry.codecs}
    assert {"square", "other"} <= set(records)
    assert f"{records['square'].package}.model" not in sys.modules
    codec = load_codec(write_codec_checkpoint(tmp_path, type="square"), InferenceSession(), registry=registry)
    assert type(codec).__module__ == f"{records['square'].package}.model"
    assert (codec.frame_rate, codec.can_encode) == (25, False)


def test_unsupported_encodings_and_unknown_checkpoints_are_refused(
    registry: CodecRegistry, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="square does not support 'int8': use one of float32"):
        load_codec(
            write_codec_checkpoint(tmp_path, type="square"),
            InferenceSession(),
            encoding="int8",
            registry=registry,
        )
    with pytest.raises(CheckpointError, match=r"known: .*other.*square"):
        load_codec(write_codec_checkpoint(tmp_path, type="circle"), InferenceSession(), registry=registry)


def test_a_folder_without_a_record_is_refused(tmp_path: Path) -> None:
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "__init__.py").write_text("CODEC = 1")
    with pytest.raises(ConfigError, match="must define CODEC with the name 'broken'"):
        CodecRegistry([tmp_path]).codecs  # noqa: B018


@pytest.mark.parametrize("chunk_frames", range(1, 8))
def test_decoding_in_chunks_equals_decoding_at_once(
    registry: CodecRegistry, tmp_path: Path, chunk_frames: int
) -> None:
    codec = load_codec(write_codec_checkpoint(tmp_path, type="square"), InferenceSession(), registry=registry)
    frames = torch.arange(14).view(7, 2) % 8
    chunks = list(codec.split_stream(frames, chunk_frames))
    assert [chunk.start for chunk in chunks] == list(range(0, 7, chunk_frames))
    assert sum(chunk.num_frames for chunk in chunks) == 7
    assert [chunk.ended for chunk in chunks[:-1]] == [
        chunk.start + chunk.num_frames == 6 for chunk in chunks[:-1]
    ]
    assert torch.equal(torch.cat(codec.decode_chunks(chunks)), codec.decode([frames])[0])


@pytest.mark.parametrize("frames_per_step", [1, 2, 3])
def test_decoding_a_growing_stream_equals_decoding_at_once(
    registry: CodecRegistry, tmp_path: Path, frames_per_step: int
) -> None:
    codec = load_codec(write_codec_checkpoint(tmp_path, type="square"), InferenceSession(), registry=registry)
    frames = torch.arange(14).view(7, 2) % 8
    num_decoded, num_known, samples = 0, 0, []
    while num_decoded < len(frames):
        num_known = min(num_known + frames_per_step, len(frames))
        is_ended = num_known == len(frames)
        num_ready = codec.ready_frames(num_known, ended=is_ended)
        assert num_ready == (num_known if is_ended else max(num_known - 1, 0))
        samples += codec.decode_chunks(
            [codec.chunk(frames[:num_known], num_decoded, num_ready, ended=is_ended)]
        )
        num_decoded = num_ready
    assert torch.equal(torch.cat(samples), codec.decode([frames])[0])


def test_malformed_frames_incomplete_chunks_and_encoding_are_refused(
    registry: CodecRegistry, tmp_path: Path
) -> None:
    codec = load_codec(write_codec_checkpoint(tmp_path, type="square"), InferenceSession(), registry=registry)
    with pytest.raises(InputError, match=r"of shape \[F, 2\], were torch.int64 of shape \[3, 1\]"):
        codec.decode([torch.zeros(3, 1, dtype=torch.int64)])
    with pytest.raises(InputError, match=r"were torch\.float32"):
        codec.decode([torch.zeros(3, 2)])
    with pytest.raises(InputError, match="from 0 to 7, were from -1 to 8"):
        codec.decode([torch.tensor([[-1, 8]])])
    with pytest.raises(
        InputError, match="2 to 4 needs frames 1 to 5, but the chunk has 0 frames of left and 0"
    ):
        codec.decode_chunks([CodecChunk(torch.zeros(3, 2, dtype=torch.int64), start=2)])
    with pytest.raises(InputError, match="the chunk has 1 frames, fewer than 1 frames of left and 2"):
        codec.decode_chunks([CodecChunk(torch.zeros(1, 2, dtype=torch.int64), start=2, left=1, right=2)])
    with pytest.raises(UnsupportedFeatureError):
        codec.encode(torch.zeros(8))
