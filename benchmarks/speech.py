"""Measure speech generation with random weights: real-time factor, and time to the first audio.

    python benchmarks/speech.py --shape neutts-nano --encoding int8
    python benchmarks/speech.py --shape orpheus-150m --transformers --json out.json

A shape has the size of a public language model for speech, and its codec: NeuCodec, or SNAC at 24 kHz.
Sampling is greedy and end of sequence is ignored. A model with random weights does not generate valid frames
of codes. Therefore each generated token is converted to a code, so that the codec always has frames to
decode.

With --transformers, transformers generates the same number of tokens from a prompt of the same length, and
the reference implementation of the codec decodes as many frames: the package ``snac``, or NeuCodec of
transformers. Penstock and transformers run alternately. Figures are medians of the rounds. A warm-up request
of Penstock is not counted.

- ``first audio``: seconds from the start of the request to its first chunk of audio.
- ``real-time factor``: seconds of the whole request divided by the seconds of audio.
- ``codec``: share of the request's time that the codec takes.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from codec_sizes import SMALL_ENCODER
from codec_sizes import SNAC as SNAC_SIZES
from torch import Tensor

from penstock.bench.random_weights import write_random_checkpoint
from penstock.codecs import AudioCodec, load_codec
from penstock.config import PipelineConfig
from penstock.pipelines.audio import AudioGeneratorPipeline
from penstock.pipelines.core import SamplingParams, TTSContext
from penstock.pipelines.speech_tokens import SpeechTokenGenerationPipeline
from penstock.text.speech_format import SpeechCodes

_LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "dtype": "bfloat16"}
SHAPES: Mapping[str, Mapping[str, Any]] = {
    "neutts-nano": {
        **_LLAMA,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 33,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "vocab_size": 194256,
        "max_position_embeddings": 2048,
        "rope_theta": 500000.0,
        "tie_word_embeddings": True,
    },
    "orpheus-150m": {
        **_LLAMA,
        "hidden_size": 768,
        "intermediate_size": 2048,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "vocab_size": 78000,
        "max_position_embeddings": 4096,
        "rope_theta": 100000.0,
        "tie_word_embeddings": True,
    },
}
"""Name -> ``config.json``. A shape has the number of parameters of the public model of the same name.
neutts-nano also has the vocabulary size of this model. The layer sizes are typical of Llama models with this
number of parameters."""
PROMPT_LENGTH = 120


class AllTokensAsCodes(SpeechCodes):
    """A speech format that converts every token to a code, so that every answer has complete frames."""

    def __init__(self, codes_per_frame: int, codebook_size: int) -> None:
        token_ids = np.arange(codes_per_frame * codebook_size, dtype=np.int64)
        super().__init__(token_ids.reshape(codes_per_frame, codebook_size))
        self.offset = 0
        """Number that `parse` adds to token ids, different in each request.

        Codecs cache decoded windows, so each request needs codes that no earlier request had.
        """

    def parse(self, tokens: Any) -> tuple[np.ndarray, int, int]:
        """Return (codes of all complete frames, number of parsed tokens, 0 dropped tokens).

        A code is the token id plus `offset`, modulo the size of the codebook.
        """
        count = len(tokens) // self.codes_per_frame * self.codes_per_frame
        codes = (np.asarray(tokens[:count]) + self.offset) % self.codebook_size
        return codes.astype(np.int32), count, 0


def open_pipeline(folder: Path, codec: Path, shape: str, encoding: str) -> AudioGeneratorPipeline:
    """Return Penstock's audio pipeline for a checkpoint and a codec with random weights."""
    config = PipelineConfig.from_flat(
        {
            "model_path": str(folder),
            "quantization_encoding": encoding,
            "task": "audio-generation",
            "max_batch_size": 1,
            "kv_cache_memory": 256 << 20,
        }
    )
    from penstock.architectures.registry import PIPELINE_REGISTRY
    from penstock.pipelines.core import PipelineTask

    architecture = PIPELINE_REGISTRY.retrieve_architecture(
        config.model.huggingface_config, folder, task=PipelineTask.AUDIO_GENERATION
    )
    from penstock.engine import InferenceSession

    session = InferenceSession()
    codec_encoding = encoding if encoding in ("float32", "bfloat16", "int8") else None
    audio_codec = _load_codec(codec, session, codec_encoding)
    codebook_size = min(audio_codec.codebook_size, SHAPES[shape]["vocab_size"] // audio_codec.codes_per_frame)
    token_pipeline = SpeechTokenGenerationPipeline(
        config,
        architecture.load_pipeline_model(),
        None,
        codes=AllTokensAsCodes(audio_codec.codes_per_frame, codebook_size),
        session=session,
    )
    return AudioGeneratorPipeline(token_pipeline, audio_codec)


def _load_codec(folder: Path, session: Any, encoding: str | None) -> AudioCodec:
    """Load a codec in ``encoding``. If ``encoding`` is None or not supported, use the codec's default."""
    from penstock.errors import ConfigError

    try:
        return load_codec(folder, session, encoding=encoding)
    except ConfigError:  # the codec does not support the encoding
        return load_codec(folder, session)


def speak(pipeline: AudioGeneratorPipeline, num_tokens: int) -> dict[str, float]:
    """Run one streamed request and return its figures."""
    codes = pipeline.speech_lm_pipeline.codes
    assert isinstance(codes, AllTokensAsCodes)
    codes.offset += 7919
    context = TTSContext(
        prompt=[1] * PROMPT_LENGTH,
        tokens=np.arange(1, PROMPT_LENGTH + 1),
        max_length=PROMPT_LENGTH + num_tokens,
        ignore_eos=True,
        sampling_params=SamplingParams(temperature=0.0, ignore_eos=True),
        streaming=True,
    )
    codec, decode, codec_seconds = pipeline.codec, pipeline.codec.decode_chunks, [0.0]

    def decode_timed(chunks: Any) -> Any:
        start = time.perf_counter()
        samples = decode(chunks)
        codec_seconds[0] += time.perf_counter() - start
        return samples

    codec.decode_chunks = decode_timed  # type: ignore[method-assign]
    begin, first_audio_seconds, num_samples = time.perf_counter(), 0.0, 0
    try:
        while not context.is_done:
            output = pipeline.execute({"a": context}, pipeline.num_steps_for(0.02))["a"]
            if output.has_audio_data:
                first_audio_seconds = first_audio_seconds or time.perf_counter() - begin
                num_samples += len(output.audio_data)
    finally:
        codec.decode_chunks = decode  # type: ignore[method-assign]
        pipeline.release(context)
    total_seconds, audio_seconds = time.perf_counter() - begin, num_samples / codec.sample_rate
    return {
        "first audio": first_audio_seconds,
        "real-time factor": total_seconds / audio_seconds,
        "codec": codec_seconds[0] / total_seconds,
    }


def transformers_engine(
    folder: Path, num_tokens: int, frames: Tensor, decode: Callable[[Tensor], object]
) -> Callable[[], float]:
    """Return a function that generates tokens with transformers and decodes ``frames``.

    The function returns the seconds that generation and decoding take together.
    """
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    ids = torch.arange(1, PROMPT_LENGTH + 1)[None]

    def run() -> float:
        begin = time.perf_counter()
        with torch.inference_mode():
            model.generate(ids, max_new_tokens=num_tokens, min_new_tokens=num_tokens, do_sample=False)
            decode(frames)
        return time.perf_counter() - begin

    return run


def write_codec(shape: str, folder: Path) -> Callable[[Tensor], object]:
    """Write a codec with random weights. Returns the decoder of the codec's reference implementation.

    The decoder takes codes ``[frames, codes per frame]``.
    """
    torch.manual_seed(0)
    if shape == "orpheus-150m":
        try:
            from snac import SNAC  # type: ignore[import-not-found]
        except ImportError as error:
            raise SystemExit(
                f"the shape {shape} needs the package {error.name!r} for its codec: pip install {error.name}"
            ) from None

        from penstock.codecs.snac.quantizer import frame_columns

        snac: Any = SNAC(**SNAC_SIZES).eval()
        (folder / "config.json").write_text(json.dumps(SNAC_SIZES))
        torch.save(snac.state_dict(), folder / "pytorch_model.bin")
        columns = frame_columns([4, 2, 1])
        return lambda frames: snac.decode([frames[:, column].flatten()[None] for column in columns])
    from transformers import NeuCodecConfig, NeuCodecModel

    model: Any = NeuCodecModel(NeuCodecConfig(encoder_hidden_size=4, semantic_model_config=SMALL_ENCODER))
    model.eval().save_pretrained(folder)
    return lambda frames: model.decode(frames.t()[None])


def main() -> None:
    """Measure the selected shape and print its figures. With ``--json``, also write the figures to a file."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("--shape", choices=[*SHAPES], default="neutts-nano")
    parser.add_argument("--encoding", default="bfloat16")
    parser.add_argument("--tokens", type=int, default=350)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--transformers", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, tempfile.TemporaryDirectory() as codec_name:
        folder = write_random_checkpoint(Path(name), SHAPES[options.shape])
        decode = write_codec(options.shape, Path(codec_name))
        pipeline = open_pipeline(folder, Path(codec_name), options.shape, options.encoding)
        pipeline.speech_lm_pipeline.pack_all_pending()
        codec = pipeline.codec
        num_frames = options.tokens // codec.codes_per_frame
        frames = torch.randint(0, codec.codebook_size, (num_frames, codec.codes_per_frame))
        run_transformers = None
        if options.transformers:
            run_transformers = transformers_engine(folder, options.tokens, frames, decode)
        speak(pipeline, options.tokens)
        rounds, seconds = [], []
        for _ in range(options.rounds):
            rounds.append(speak(pipeline, options.tokens))
            if run_transformers is not None:
                seconds.append(run_transformers())
    figures = {key: statistics.median(figures[key] for figures in rounds) for key in rounds[0]}
    if seconds:
        duration = num_frames / codec.frame_rate
        figures["transformers, real-time factor"] = statistics.median(seconds) / duration
    for key, value in figures.items():
        print(f"{options.shape} {options.encoding:9} {key:31} {value:.3f}")
    if options.json:
        options.json.write_text(json.dumps({"shape": options.shape, "encoding": options.encoding, **figures}))


if __name__ == "__main__":
    main()
