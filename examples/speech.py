"""Generate speech as a stream of chunks, with a model that generates audio tokens.

The script writes the chunks to a WAV file. The real-time factor is the time of the generation divided by the
duration of the speech.

    python examples/speech.py MODEL "The quick brown fox." --output fox.wav

MODEL is the folder or the Hugging Face id of a speech model, such as canopylabs/orpheus-3b-0.1-ft.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np

from penstock import LLM
from penstock.errors import PenstockError
from penstock.media.audio_files import encode_audio
from penstock.pipelines.core import PipelineTask


def main() -> None:
    """Generate the speech of a text."""
    parser = argparse.ArgumentParser(description="Generate the speech of a text.")
    parser.add_argument("model")
    parser.add_argument("text")
    parser.add_argument("--output", type=Path, default=Path("speech.wav"))
    parser.add_argument("--voice", help="the name of a voice")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with LLM(options.model) as llm:
        if llm.config.model.pipeline_task is not PipelineTask.AUDIO_GENERATION:
            raise SystemExit(f"{options.model} is not a speech model")
        speech_format = llm.tokenizer.speech_format
        params = llm.config.default_sampling_params(
            defaults=speech_format.sampling_defaults, seed=options.seed
        )
        stream = llm.stream_speech(options.text, params, voice=options.voice)
        chunks = []
        for chunk in stream:
            if not chunks:
                print(f"first audio after {chunk.metadata['elapsed_seconds']:.2f} s")
            chunks.append(chunk.audio_data.numpy())
        metadata = chunk.metadata
    audio = np.concatenate(chunks)
    options.output.write_bytes(encode_audio(audio, stream.sample_rate, "wav"))
    real_time_factor = metadata["elapsed_seconds"] / metadata["seconds"]
    print(
        f"{metadata['seconds']:.2f} s of audio in {len(chunks)} chunks, "
        f"real-time factor {real_time_factor:.2f}"
    )


if __name__ == "__main__":
    try:
        main()
    except PenstockError as error:
        sys.exit(f"error: {error}")
