"""Compare the decoding of audio codecs by Penstock and by their own packages: real-time factors. Engines
alternate.

    python benchmarks/codecs.py [snac] [neucodec] [--seconds 2] [--rounds 3] [--threads 2] [--json out.json]

The checkpoints have the sizes of SNAC 24 kHz and NeuCodec. SNAC is compared with the package ``snac``,
NeuCodec with transformers. Work:

- ``whole``: a stream decoded at once.
- ``chunks``: the same stream by Penstock in chunks, as they are decoded while a model writes codes: 4 frames
  of SNAC (0.34 s), blocks of NeuCodec.

The real-time factor is the time of decoding divided by the duration of the audio, the median of the rounds.
``cpu`` is the same with the processor time of all threads, which other processes disturb less.
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

Engines = dict[str, Callable[[], object]]


def snac_engines(folder: Path, session: InferenceSession, seconds: float) -> tuple[Engines, float]:
    """Return the engines that decode SNAC (name -> function), and the duration of the audio in seconds."""
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
    codes = [frames[:, one].flatten()[None] for one in frame_columns([4, 2, 1])]
    engines: Engines = {
        "snac: package": lambda: model.decode(codes),
        "snac: whole": lambda: codec.decode([frames]),
        "snac: chunks": lambda: _in_chunks(codec, frames, 4),
    }
    return engines, len(frames) / codec.frame_rate


def neucodec_engines(folder: Path, session: InferenceSession, seconds: float) -> tuple[Engines, float]:
    """Return the engines that decode NeuCodec (name -> function), and the duration of the audio in
    seconds."""
    from transformers import NeuCodecConfig, NeuCodecModel

    torch.manual_seed(0)
    config = NeuCodecConfig(encoder_hidden_size=4, semantic_model_config=SMALL_ENCODER)
    model: Any = NeuCodecModel(config)
    model.eval()
    model.save_pretrained(folder)
    frames = torch.randint(0, 65536, (round(seconds * 50), 1))
    engines: Engines = {"neucodec: transformers": lambda: model.decode(frames.t()[None])}
    for encoding in ("float32", "int8"):
        codec = load_codec(folder, session, encoding=encoding)
        engines[f"neucodec: whole, {encoding}"] = lambda codec=codec: codec.decode([frames])  # type: ignore[misc]
        engines[f"neucodec: chunks, {encoding}"] = lambda codec=codec: _in_chunks(codec, frames, 5)  # type: ignore[misc]
    return engines, len(frames) / 50


def _in_chunks(codec: AudioCodec, frames: Tensor, frames_per_step: int) -> None:
    """Decode a stream that grows by some frames at a time, whenever frames are ready."""
    decoded = 0
    vars(codec).get("_cache", {}).clear()  # a new stream has no decoded windows
    for known in (*range(frames_per_step, len(frames), frames_per_step), len(frames)):
        ended = known == len(frames)
        ready = codec.ready_frames(known, ended=ended)
        if ready > decoded and (ended or ready - decoded >= frames_per_step):
            codec.decode_chunks([codec.chunk(frames[:known], decoded, ready, ended=ended)])
            decoded = ready


def measure(engines: Engines, duration: float, rounds: int) -> list[dict[str, Any]]:
    """Run all engines in turn, once to warm up and then ``rounds`` times."""
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in engines}
    for _ in range(rounds + 1):
        for name, decode in engines.items():
            begin, cpu = time.perf_counter(), time.process_time()
            with torch.inference_mode():
                decode()
            times[name].append((time.perf_counter() - begin, time.process_time() - cpu))
    return [
        {
            "work": name,
            "real_time_factor": statistics.median(wall for wall, _ in found[1:]) / duration,
            "cpu": statistics.median(cpu for _, cpu in found[1:]) / duration,
        }
        for name, found in times.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("codecs", nargs="*", default=["snac", "neucodec"], help="snac, neucodec")
    parser.add_argument("--seconds", type=float, default=2.0, help="duration of the audio")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--json", type=Path, default=None)
    options = parser.parse_args()
    session = InferenceSession(num_threads=options.threads)
    make = {"snac": snac_engines, "neucodec": neucodec_engines}
    results: list[dict[str, Any]] = []
    print(f"{session.kernels}, {torch.get_num_threads()} threads")
    for name in options.codecs:
        with tempfile.TemporaryDirectory() as folder:
            engines, duration = make[name](Path(folder), session, options.seconds)
            results += measure(engines, duration, options.rounds)
            for one in results[-len(engines) :]:
                print(
                    f"{one['work']:28} real-time factor {one['real_time_factor']:.3f}   cpu {one['cpu']:.3f}"
                )
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
