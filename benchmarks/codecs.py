"""Compare the decoding speed of audio codecs in Penstock and in their original packages, run alternately.

    python benchmarks/codecs.py [snac] [neucodec] [--seconds 2] [--rounds 3] [--threads 2] [--json out.json]

The checkpoints have random weights and the sizes of SNAC 24 kHz and NeuCodec. SNAC is compared with the
package ``snac``, NeuCodec with transformers. Workloads:

- ``package``, ``transformers``: the original package decodes all frames in one call.
- ``whole``: Penstock decodes all frames in one call.
- ``chunks``: Penstock decodes the same frames in chunks, as in a streamed request. A chunk has 4 frames of
  SNAC (0.34 s) or 5 frames of NeuCodec (0.1 s).

Penstock runs NeuCodec in float32 and in int8.

The real-time factor is the decoding time divided by the duration of the audio. ``cpu`` is the CPU time of all
threads divided by the duration of the audio. Load from other processes changes ``cpu`` less than the
real-time factor. Both figures are medians of the rounds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from codec_sizes import SMALL_ENCODER, SNAC
from torch import Tensor

from penstock.codecs import AudioCodec, load_codec
from penstock.codecs.snac.quantizer import frame_columns
from penstock.engine import InferenceSession

Decoders = dict[str, Callable[[], object]]
"""Printed name -> function that decodes the whole audio."""


def snac_decoders(folder: Path, session: InferenceSession, seconds: float) -> tuple[Decoders, float]:
    """Return the decoders of SNAC, and the duration of the audio in seconds.

    ``folder`` receives a checkpoint with random weights. ``seconds`` is the requested duration.
    """
    try:
        from snac import SNAC as Model  # type: ignore[import-not-found]
    except ImportError as error:
        raise SystemExit(f"snac needs the package {error.name!r}: pip install {error.name}") from None

    torch.manual_seed(0)
    model: Any = Model(**SNAC)
    model.eval()
    (folder / "config.json").write_text(json.dumps(SNAC))
    torch.save(model.state_dict(), folder / "pytorch_model.bin")
    codec = load_codec(folder, session)
    frames = torch.randint(0, codec.codebook_size, (round(seconds * codec.frame_rate), 7))
    codes = [frames[:, columns].flatten()[None] for columns in frame_columns([4, 2, 1])]
    decoders: Decoders = {
        "snac: package": lambda: model.decode(codes),
        "snac: whole": lambda: codec.decode([frames]),
        "snac: chunks": lambda: _decode_in_chunks(codec, frames, 4),
    }
    return decoders, len(frames) / codec.frame_rate


def neucodec_decoders(folder: Path, session: InferenceSession, seconds: float) -> tuple[Decoders, float]:
    """Return the decoders of NeuCodec, and the duration of the audio in seconds.

    ``folder`` receives a checkpoint with random weights. ``seconds`` is the requested duration.
    """
    from transformers import NeuCodecConfig, NeuCodecModel

    torch.manual_seed(0)
    config = NeuCodecConfig(encoder_hidden_size=4, semantic_model_config=SMALL_ENCODER)
    model: Any = NeuCodecModel(config)
    model.eval()
    model.save_pretrained(folder)
    frames = torch.randint(0, 65536, (round(seconds * 50), 1))
    decoders: Decoders = {"neucodec: transformers": lambda: model.decode(frames.t()[None])}
    for encoding in ("float32", "int8"):
        codec = load_codec(folder, session, encoding=encoding)
        decoders[f"neucodec: whole, {encoding}"] = lambda codec=codec: codec.decode([frames])  # type: ignore[misc]
        decoders[f"neucodec: chunks, {encoding}"] = lambda codec=codec: _decode_in_chunks(codec, frames, 5)  # type: ignore[misc]
    return decoders, len(frames) / 50


def _decode_in_chunks(codec: AudioCodec, frames: Tensor, frames_per_chunk: int) -> None:
    """Decode a stream that grows by ``frames_per_chunk`` frames at a time."""
    num_decoded = 0
    # The codec caches decoded windows. A cache filled by the previous run would make this run too fast.
    vars(codec).get("_cache", {}).clear()
    for num_frames in (*range(frames_per_chunk, len(frames), frames_per_chunk), len(frames)):
        is_ended = num_frames == len(frames)
        num_ready = codec.ready_frames(num_frames, ended=is_ended)
        if num_ready > num_decoded and (is_ended or num_ready - num_decoded >= frames_per_chunk):
            codec.decode_chunks([codec.chunk(frames[:num_frames], num_decoded, num_ready, ended=is_ended)])
            num_decoded = num_ready


def measure(decoders: Decoders, duration: float, rounds: int) -> list[dict[str, Any]]:
    """Run all decoders alternately, once to warm up and then ``rounds`` times. Returns one row per decoder.

    ``duration`` is the duration of the audio in seconds.
    """
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in decoders}  # (wall, CPU) seconds
    for _ in range(rounds + 1):
        for name, decode in decoders.items():
            wall_start, cpu_start = time.perf_counter(), time.process_time()
            with torch.inference_mode():
                decode()
            times[name].append((time.perf_counter() - wall_start, time.process_time() - cpu_start))
    return [
        {
            "work": name,
            "real_time_factor": statistics.median(wall for wall, _ in pairs[1:]) / duration,
            "cpu": statistics.median(cpu for _, cpu in pairs[1:]) / duration,
        }
        for name, pairs in times.items()
    ]


def main() -> None:
    """Measure the codecs that the command line selects, and print the real-time factors."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("codecs", nargs="*", default=["snac", "neucodec"], help="snac, neucodec")
    parser.add_argument("--seconds", type=float, default=2.0, help="duration of the audio in seconds")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--json", type=Path, default=None)
    options = parser.parse_args()
    session = InferenceSession(num_threads=options.threads)
    factories = {"snac": snac_decoders, "neucodec": neucodec_decoders}
    results: list[dict[str, Any]] = []
    print(f"{session.kernels}, {torch.get_num_threads()} threads")
    for name in options.codecs:
        with tempfile.TemporaryDirectory() as folder:
            decoders, duration = factories[name](Path(folder), session, options.seconds)
            rows = measure(decoders, duration, options.rounds)
            results += rows
            for row in rows:
                print(
                    f"{row['work']:28} real-time factor {row['real_time_factor']:.3f}   cpu {row['cpu']:.3f}"
                )
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
