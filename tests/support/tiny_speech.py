"""Small random speech models, and a fake codec whose samples are a simple function of the codes.

The models nearly always generate codes of the expected codebook. For each codebook, one hidden dimension is
large in two places: in the embeddings of the tokens after which a code of this codebook must follow, and in
the rows of the LM head for the codes of this codebook.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import save_file
from support import tiny_llm
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

from penstock.codecs import AudioCodec, CodecChunk
from penstock.codecs.registry import CODECS as REAL_CODECS
from penstock.codecs.registry import CodecRegistry, SupportedCodec
from penstock.engine import InferenceSession

CODEBOOK_SIZE = 16
"""Number of codes in each codebook."""
CODES_PER_FRAME = {"neutts": 1, "orpheus": 3}
"""Number of codes in each frame, by speech format."""
SAMPLE_RATE, SAMPLES_PER_FRAME = 800, 8
MAX_LENGTH = 320


class FakeCodec(AudioCodec):
    """A codec whose samples depend on the codes of their frame, two previous frames and the next frame.

    With ``right_context=0`` they do not depend on the next frame.
    """

    name = "fake"
    sample_rate = SAMPLE_RATE
    encoder_sample_rate = SAMPLE_RATE
    samples_per_frame = SAMPLES_PER_FRAME
    codebook_size = CODEBOOK_SIZE
    left_context, right_context, tolerance = 2, 1, 0.0

    def __init__(self, codes_per_frame: int, *, right_context: int = 1) -> None:
        self.codes_per_frame = codes_per_frame
        self.right_context = right_context
        self.num_calls = 0
        self.num_frames = 0
        self.refused_codes: set[int] = set()
        """Decoding a frame fails if its first code is in this set."""

    @classmethod
    def load(
        cls, folder: Path, config: Mapping[str, Any], session: InferenceSession, encoding: str
    ) -> FakeCodec:
        return cls(config["codes_per_frame"])

    @property
    def can_encode(self) -> bool:
        return True

    def decode_chunks(self, chunks: Sequence[CodecChunk]) -> list[Tensor]:
        self.num_calls += 1
        return [self._decode(chunk) for chunk in chunks]

    def _decode(self, chunk: CodecChunk) -> Tensor:
        self.check_chunk(chunk)
        self.num_frames += chunk.num_frames
        codes = chunk.frames.double()
        if self.refused_codes & set(chunk.frames[chunk.left :, 0].tolist()):
            raise FloatingPointError("the codec failed")
        values = (codes + 1) @ torch.arange(1, self.codes_per_frame + 1).double()  # [F]
        padded = torch.cat([torch.zeros(2).double(), values, torch.zeros(1).double()])
        next_values = padded[3:] if self.right_context else torch.zeros(len(values)).double()
        mixed_codes = padded[2:-1] + 0.5 * padded[1:-2] + 0.25 * padded[:-3] + 0.125 * next_values
        waves = torch.sin(mixed_codes[:, None] * torch.arange(1, SAMPLES_PER_FRAME + 1))
        return waves[chunk.left : chunk.left + chunk.num_frames].flatten().float()

    def encode(self, samples: Tensor) -> Tensor:
        num_frames = len(samples) // SAMPLES_PER_FRAME
        levels = samples[: num_frames * SAMPLES_PER_FRAME].view(num_frames, -1).mean(1)
        code = ((levels + 1) / 2 * (CODEBOOK_SIZE - 1)).round().long().clamp(0, CODEBOOK_SIZE - 1)
        return code[:, None].repeat(1, self.codes_per_frame)


class FakeCodecs(CodecRegistry):
    """A registry of the fake codec and the real codecs."""

    @property
    def codecs(self) -> tuple[SupportedCodec, ...]:
        record = SupportedCodec(
            name="fake",
            detect=lambda config: config.get("model_type") == "fake",
            codec="tiny_speech:FakeCodec",
            package="support",
        )
        return (record, *REAL_CODECS.codecs)


def create_audio_pipeline(pipeline_inputs: Any) -> Any:
    """Return an audio pipeline that can use the fake codec."""
    from penstock.pipelines import audio

    return audio.create_audio(pipeline_inputs, FakeCodecs())


def fake_codec_catalog() -> Any:
    """Return a catalog whose audio pipelines can use the fake codec."""
    from dataclasses import replace

    from penstock.assembly import Catalog
    from penstock.pipelines.core import PipelineTask
    from penstock.pipelines.tasks import TASKS

    audio = replace(TASKS[PipelineTask.AUDIO_GENERATION], factory="support.tiny_speech:create_audio_pipeline")
    return Catalog(tasks={**TASKS, audio.task: audio})


def write_tiny_speech(
    folder: Path,
    speech_format: str = "neutts",
    *,
    seed: int = 0,
    end_logit_ratio: float = 0.9,
    num_codes: int | None = None,
    **speech_config: Any,
) -> Path:
    """Write a speech checkpoint with its codec.

    Args:
        folder: the folder to write.
        speech_format: the speech format.
        seed: seed of the weights.
        end_logit_ratio: approximate ratio of the logit of the end-of-speech token to the logits of the first
            codes of frames.
        num_codes: the number of codes in a frame, by default the value in CODES_PER_FRAME.
        **speech_config: changed or added values of ``speech_config.json``.
    """
    folder.mkdir(parents=True, exist_ok=True)
    num_codes = num_codes or CODES_PER_FRAME[speech_format]
    tokens = _tokens(speech_format, num_codes)
    first_code = {"neutts": "<|speech_0|>", "orpheus": "<custom_token_10>"}[speech_format]
    end_tokens = {"neutts": "<|SPEECH_GENERATION_END|>", "orpheus": "<custom_token_2>"}
    vocabulary = 256 + len(tokens)
    config = {
        **tiny_llm.CONFIG,
        "vocab_size": vocabulary,
        "max_position_embeddings": MAX_LENGTH,
        "eos_token_id": 256,
    }
    _write(folder / "config.json", config)
    weights = tiny_llm._weights({**config}, np.random.default_rng(seed))
    weights = {name: 0.3 * tensor if tensor.ndim == 2 else tensor for name, tensor in weights.items()}
    rng = np.random.default_rng(seed + 1)
    hidden = config["hidden_size"]
    embeddings = rng.normal(0, 1.0, (vocabulary, hidden)).astype(np.float32)
    head = rng.normal(0, 0.4, (vocabulary, hidden)).astype(np.float32)
    embeddings[:, :num_codes] = 0
    head[:, :num_codes] = 0
    embeddings[:, 0] = 6  # after a token that is not a code, the first code of a frame follows
    start = 256 + tokens.index(first_code)
    for position in range(num_codes):
        rows = slice(start + position * CODEBOOK_SIZE, start + (position + 1) * CODEBOOK_SIZE)
        embeddings[rows, 0] = 0
        embeddings[rows, (position + 1) % num_codes] = 6
        head[rows, position] = 6
    head[256 + tokens.index(end_tokens[speech_format]), 0] = 6 * end_logit_ratio
    weights["model.embed_tokens.weight"], weights["lm_head.weight"] = embeddings, head
    save_file(weights, folder / "model.safetensors")
    _tokenizer(tokens).save(str(folder / "tokenizer.json"))
    _write(folder / "tokenizer_config.json", {"eos_token": "<|eos|>"})
    settings = {
        "codebook_size": CODEBOOK_SIZE,
        "codes_per_frame": num_codes,
        "codec": "codec",
        "phonemes": False,
    }
    _write(folder / "speech_config.json", settings | speech_config)
    _write(folder / "codec" / "config.json", {"model_type": "fake", "codes_per_frame": num_codes})
    save_file({"unused": np.zeros(1, np.float32)}, folder / "codec" / "model.safetensors")
    return folder


def _tokens(speech_format: str, num_codes: int) -> list[str]:
    """Return the special tokens that follow the bytes in the vocabulary."""
    if speech_format == "neutts":
        names = [f"<|{kind}_{edge}|>" for kind in ("TEXT_PROMPT", "SPEECH_GENERATION") for edge in _EDGES]
        return ["<|eos|>", *names, *(f"<|speech_{i}|>" for i in range(CODEBOOK_SIZE))]
    count = 10 + num_codes * CODEBOOK_SIZE
    return ["<|eos|>", "<|eot_id|>", *(f"<custom_token_{i}>" for i in range(count))]


_EDGES = ("START", "END")


def _tokenizer(special: list[str]) -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in special])
    return tokenizer


def _write(path: Path, value: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value))
