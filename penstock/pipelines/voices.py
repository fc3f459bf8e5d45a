"""Reads the voices of ``--voice``. Each recording is encoded once; its codes are cached in a file."""

from __future__ import annotations

import os
from collections.abc import Iterable
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import torch

from penstock.codecs import AudioCodec, CodecChunk
from penstock.errors import ConfigError, PenstockError
from penstock.media.audio_files import read_audio, resample
from penstock.pipelines.core import VoicePrompt
from penstock.weights.json_files import read_json_object

MAX_SECONDS = 60.0
"""Maximum duration of a recording of a voice, in seconds."""


def load_voices(settings: Iterable[str], codec: AudioCodec, codec_folder: Path) -> dict[str, VoicePrompt]:
    """Return the voices of the settings ``NAME=FILE`` and ``NAME=CODES``.

    CODES are numbers separated by commas. A file is a recording or a JSON file with ``codes`` and an optional
    ``transcription``. The transcription of a recording is in a file of the same name that ends in ``.txt``;
    without this file it is empty. The codes of recordings are cached in ``$XDG_CACHE_HOME/penstock/voices``.

    Args:
        settings: the values of ``--voice``.
        codec: encodes the recordings, and checks given codes.
        codec_folder: the checkpoint of the codec; changed files invalidate the cache.

    Raises:
        ConfigError: a voice cannot be read, its codes are invalid or its recording is empty or too long, or a
            name is given twice.
    """
    voices: dict[str, VoicePrompt] = {}
    for setting in settings:
        name, _, source = setting.partition("=")
        if name in voices:
            raise ConfigError("voice", f"{name!r} is given twice: use one name for each voice")
        try:
            voices[name] = _load_voice(name, source, codec, codec_folder)
        except (PenstockError, OSError, ValueError) as error:
            raise ConfigError("voice", f"{name!r} cannot be used: {error}") from error
    return voices


def _load_voice(name: str, source: str, codec: AudioCodec, codec_folder: Path) -> VoicePrompt:
    parts = [part.strip() for part in source.split(",")]
    if all(part.isdecimal() for part in parts):
        return _checked_voice(VoicePrompt(name, [int(part) for part in parts]), codec)
    path = Path(source).expanduser()
    if path.suffix.lower() == ".json":
        values = read_json_object(path)
        codes = values.get("codes")
        if not isinstance(codes, list) or not all(isinstance(code, int) for code in codes):
            raise ValueError(f"{path} must have codes, a list of integers")
        return _checked_voice(VoicePrompt(name, codes, str(values.get("transcription", ""))), codec)
    text_file = path.with_suffix(".txt")
    transcription = text_file.read_text(encoding="utf-8").strip() if text_file.is_file() else ""
    return VoicePrompt(name, _encode_recording(path, codec, codec_folder), transcription)


def _checked_voice(voice: VoicePrompt, codec: AudioCodec) -> VoicePrompt:
    codes_per_frame = codec.codes_per_frame
    if not voice.codes or len(voice.codes) % codes_per_frame:
        raise ValueError(
            f"{len(voice.codes)} codes are not a whole number of frames: a frame has {codes_per_frame}"
        )
    codec.check_chunk(CodecChunk(torch.tensor(voice.codes).view(-1, codes_per_frame)))
    return voice


def _encode_recording(path: Path, codec: AudioCodec, codec_folder: Path) -> list[int]:
    """Return the codes of a recording, from the cache if it contains them."""
    digest = blake2b(path.read_bytes(), digest_size=16, person=b"voice")
    files = sorted(file for file in codec_folder.iterdir() if file.is_file())
    digest.update(
        repr([(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files]).encode()
    )
    cache_folder = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))
    cache_file = cache_folder / "penstock" / "voices" / f"{digest.hexdigest()}.npy"
    if cache_file.is_file():
        codes: list[int] = np.load(cache_file).tolist()
        return codes
    samples, sample_rate = read_audio(path)
    if not 0 < len(samples) / sample_rate <= MAX_SECONDS:
        raise ValueError(
            f"{path} has {len(samples) / sample_rate:.1f} s: a recording must have more than 0 and at most "
            f"{MAX_SECONDS:g} s"
        )
    samples = resample(samples, sample_rate, codec.encoder_sample_rate)
    with torch.inference_mode():
        code_array: Any = codec.encode(torch.from_numpy(samples)).reshape(-1).to(torch.int32).numpy()
    if not len(code_array):
        raise ValueError(
            f"{path} has {len(samples)} samples, which is less than a frame: use a longer recording"
        )
    cache_file.parent.mkdir(parents=True, exist_ok=True)
    temporary_file = cache_file.with_suffix(f".{os.getpid()}.tmp.npy")
    np.save(temporary_file, code_array)
    temporary_file.replace(cache_file)
    return list(map(int, code_array))
