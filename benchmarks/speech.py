"""Speech of random weights by Penstock and by transformers, in turn: real-time factor, time to first audio.

    python benchmarks/speech.py --shape neutts-nano --encoding int8
    python benchmarks/speech.py --shape orpheus-150m --transformers --json out.json

The shapes have the sizes of public language models, with the codec of each: NeuCodec, or SNAC at 24 kHz.
Each engine generates the same number of tokens from the same prompt, greedily, ignores the end, and
decodes as many codes. Random weights write no valid frames: each token stands for a code. With
--transformers, generation by transformers and decoding by the codec's own package run in turn with
Penstock. A round runs both; the result is the median of the rounds.

- ``first audio``: seconds from the request to the first chunk of a stream.
- ``real-time factor``: seconds of the whole request, per second of audio.
- ``codec``: the share of the time that the codec takes.
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
"""Name -> ``config.json``. Each has the number of parameters of the public model, and neutts-nano also its
vocabulary. The layer sizes are those of other Llamas of that size."""
PROMPT_TOKENS = 120


class FixedCodes(SpeechCodes):
    """A speech format in which every token is a code, so that random weights write whole frames."""

    def __init__(self, codes_per_frame: int, codebook_size: int) -> None:
        size = np.arange(codes_per_frame * codebook_size, dtype=np.int64)
        super().__init__(size.reshape(codes_per_frame, codebook_size))
        self.offset = 0
        """Added to token ids. A codec may keep decoded windows, so each request needs other codes."""

    def parse(self, tokens: Any) -> tuple[np.ndarray, int, int]:
        """Return the token ids modulo the size of a codebook, as whole frames."""
        count = len(tokens) // self.codes_per_frame * self.codes_per_frame
        codes = (np.asarray(tokens[:count]) + self.offset) % self.codebook_size
        return codes.astype(np.int32), count, 0


def open_pipeline(folder: Path, codec: Path, shape: str, encoding: str) -> AudioGeneratorPipeline:
    """Return Penstock's pipeline of a random checkpoint."""
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
    supported = encoding in ("float32", "bfloat16", "int8")
    loaded = _codec(codec, session, encoding if supported else None)
    size = min(loaded.codebook_size, SHAPES[shape]["vocab_size"] // loaded.codes_per_frame)
    tokens = SpeechTokenGenerationPipeline(
        config,
        architecture.load_pipeline_model(),
        None,
        codes=FixedCodes(loaded.codes_per_frame, size),
        session=session,
    )
    return AudioGeneratorPipeline(tokens, loaded)


def _codec(folder: Path, session: Any, encoding: str | None) -> AudioCodec:
    from penstock.errors import ConfigError

    try:
        return load_codec(folder, session, encoding=encoding)
    except ConfigError:  # the codec runs in one encoding
        return load_codec(folder, session)


def speak(pipeline: AudioGeneratorPipeline, num_tokens: int) -> dict[str, float]:
    """Return the times of one streamed request."""
    codes = pipeline.speech_lm_pipeline.codes
    assert isinstance(codes, FixedCodes)
    codes.offset += 7919
    context = TTSContext(
        prompt=[1] * PROMPT_TOKENS,
        tokens=np.arange(1, PROMPT_TOKENS + 1),
        max_length=PROMPT_TOKENS + num_tokens,
        ignore_eos=True,
        sampling_params=SamplingParams(temperature=0.0, ignore_eos=True),
        streaming=True,
    )
    codec, decode, spent = pipeline.codec, pipeline.codec.decode_chunks, [0.0]

    def timed(chunks: Any) -> Any:
        start = time.perf_counter()
        found = decode(chunks)
        spent[0] += time.perf_counter() - start
        return found

    codec.decode_chunks = timed  # type: ignore[method-assign]
    begin, first, samples = time.perf_counter(), 0.0, 0
    try:
        while not context.is_done:
            output = pipeline.execute({"a": context}, pipeline.num_steps_for(0.02))["a"]
            if output.has_audio_data:
                first = first or time.perf_counter() - begin
                samples += len(output.audio_data)
    finally:
        codec.decode_chunks = decode  # type: ignore[method-assign]
        pipeline.release(context)
    total, seconds = time.perf_counter() - begin, samples / codec.sample_rate
    return {"first audio": first, "real-time factor": total / seconds, "codec": spent[0] / total}


def transformers_engine(
    folder: Path, num_tokens: int, frames: Tensor, decode: Callable[[Tensor], object]
) -> Callable[[], float]:
    """Return a function that generates tokens with transformers, decodes frames, and returns the seconds."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    ids = torch.arange(1, PROMPT_TOKENS + 1)[None]

    def run() -> float:
        begin = time.perf_counter()
        with torch.inference_mode():
            model.generate(ids, max_new_tokens=num_tokens, min_new_tokens=num_tokens, do_sample=False)
            decode(frames)
        return time.perf_counter() - begin

    return run


def write_codec(shape: str, folder: Path) -> Callable[[Tensor], object]:
    """Write a codec with random weights; return how its own package decodes ``[F, C]``."""
    torch.manual_seed(0)
    if shape == "orpheus-150m":
        try:
            from snac import SNAC  # type: ignore[import-not-found]
        except ImportError as error:
            raise SystemExit(
                f"the shape {shape} needs the package {error.name!r}, whose codec it compares with: "
                f"pip install {error.name}"
            ) from None

        from penstock.codecs.snac.quantizer import frame_columns

        snac: Any = SNAC(**SNAC_SIZES).eval()
        (folder / "config.json").write_text(json.dumps(SNAC_SIZES))
        torch.save(snac.state_dict(), folder / "pytorch_model.bin")
        columns = frame_columns([4, 2, 1])
        return lambda frames: snac.decode([frames[:, one].flatten()[None] for one in columns])
    from transformers import NeuCodecConfig, NeuCodecModel

    model: Any = NeuCodecModel(NeuCodecConfig(encoder_hidden_size=4, semantic_model_config=SMALL_ENCODER))
    model.eval().save_pretrained(folder)
    return lambda frames: model.decode(frames.t()[None])


def main() -> None:
    """Measure and print."""
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
        other = transformers_engine(folder, options.tokens, frames, decode) if options.transformers else None
        speak(pipeline, options.tokens)
        rounds, seconds = [], []
        for _ in range(options.rounds):
            rounds.append(speak(pipeline, options.tokens))
            if other is not None:
                seconds.append(other())
    figures = {key: statistics.median(one[key] for one in rounds) for key in rounds[0]}
    if seconds:
        duration = num_frames / codec.frame_rate
        figures["transformers, real-time factor"] = statistics.median(seconds) / duration
    for key, value in figures.items():
        print(f"{options.shape} {options.encoding:9} {key:31} {value:.3f}")
    if options.json:
        options.json.write_text(json.dumps({"shape": options.shape, "encoding": options.encoding, **figures}))


if __name__ == "__main__":
    main()
