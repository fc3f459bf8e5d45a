"""Reads audio files, and encodes samples as a file or as a stream.

16-bit WAV and PCM need no library. All other formats need ``soundfile`` (the extra ``audio``).
"""

from __future__ import annotations

import io
import struct
import wave
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from penstock.errors import InputError, MissingDependencyError

Samples = npt.NDArray[np.float32]
"""Samples of one channel, ``[S]`` float32 from -1 to 1."""

_UNKNOWN_SIZE = 0xFFFFFFFF
_BYTES_PER_SAMPLE = 2
_SINC_HALF_WIDTH = 16  # source samples on each side of a target sample, if the rate increases


@dataclass(frozen=True)
class AudioFormat:
    """A format of audio files."""

    name: str
    media_type: str
    container: str | None = None
    """The name of the format in ``soundfile``; None for formats that need no library."""
    codec: str | None = None
    """The name of the subtype in ``soundfile``."""


AUDIO_FORMATS: Mapping[str, AudioFormat] = {
    record.name: record
    for record in (
        AudioFormat("wav", "audio/wav"),
        AudioFormat("pcm", "audio/pcm"),
        AudioFormat("flac", "audio/flac", "FLAC", "PCM_16"),
        AudioFormat("mp3", "audio/mpeg", "MP3", "MPEG_LAYER_III"),
        AudioFormat("opus", "audio/ogg", "OGG", "OPUS"),
    )
}
"""The output formats by name. The name is also the suffix of the file."""


def audio_format(name: str) -> AudioFormat:
    """Return a format by its name.

    Raises:
        InputError: the name is unknown.
        MissingDependencyError: the format needs ``soundfile``, which is not installed.
    """
    record = AUDIO_FORMATS.get(name)
    if record is None:
        raise InputError(f"audio format {name!r} is unknown: known are {', '.join(AUDIO_FORMATS)}")
    if record.container is not None:
        _soundfile(f"the audio format {name}")
    return record


def pcm_bytes(samples: Samples) -> bytes:
    """Return samples as 16-bit little-endian integers. Samples outside -1 to 1 are clipped."""
    scaled_samples = np.rint(np.clip(samples, -1.0, 1.0) * 32767.0)
    data: bytes = scaled_samples.astype("<i2").tobytes()
    return data


def wav_header(sample_rate: int, num_samples: int | None) -> bytes:
    """Return the header of a WAV file with 16-bit samples. ``num_samples`` is None for a stream."""
    size = _UNKNOWN_SIZE if num_samples is None else num_samples * _BYTES_PER_SAMPLE
    riff_size = _UNKNOWN_SIZE if num_samples is None else size + 36
    fields = (1, 1, sample_rate, sample_rate * _BYTES_PER_SAMPLE, _BYTES_PER_SAMPLE, 16)
    return struct.pack("<4sI4s4sIHHIIHH4sI", b"RIFF", riff_size, b"WAVE", b"fmt ", 16, *fields, b"data", size)


def encode_audio(samples: Samples, sample_rate: int, name: str) -> bytes:
    """Return samples as an audio file.

    Raises:
        InputError: the format is unknown, or does not support the sample rate.
        MissingDependencyError: the format needs ``soundfile``, which is not installed.
    """
    if audio_format(name).name == "wav":
        return wav_header(sample_rate, len(samples)) + pcm_bytes(samples)
    encoder = AudioEncoder(name, sample_rate)
    encoder.keeps_length = True
    return encoder.add(samples) + encoder.finish()


class _SoundFile(Protocol):
    """An open file of the library soundfile."""

    closed: bool

    def write(self, samples: Samples) -> None: ...
    def close(self) -> None: ...


class AudioEncoder:
    """Encodes chunks of samples. The concatenated results are a file.

    The header of a WAV stream contains no length, because the length is not known when the header is sent.
    Compressed formats are encoded in blocks, so `add` can return no bytes.

    Args:
        name: a name in `AUDIO_FORMATS`.
        sample_rate: samples per second.

    Raises:
        InputError: the format is unknown, or does not support the sample rate.
        MissingDependencyError: the format needs ``soundfile``, which is not installed.
    """

    def __init__(self, name: str, sample_rate: int) -> None:
        self.format = audio_format(name)
        self.keeps_length = False
        """Whether all compressed bytes are returned at the end, so that the header contains the length."""
        self._rate = sample_rate
        self._has_header = False
        self._file: _SoundFile | None = None
        self._sink = _Sink()
        if self.format.container is not None:
            library = _soundfile(f"the audio format {name}")
            # The bit rate must be constant, because players estimate the length of a stream from its bit
            # rate.
            mp3_options = {"bitrate_mode": "CONSTANT", "compression_level": 0.5}
            options = mp3_options if name == "mp3" else {}
            try:
                self._file = library.SoundFile(
                    self._sink,
                    "w",
                    sample_rate,
                    1,
                    self.format.codec,
                    format=self.format.container,
                    **options,
                )
            except (ValueError, RuntimeError) as error:
                raise InputError(f"{name} cannot be written at {sample_rate} Hz: {error}") from error

    def add(self, samples: Samples) -> bytes:
        """Encode more samples. Return the encoded bytes that are complete."""
        if self._file is not None:
            self._file.write(samples)
            return self._take_written()
        header = b""
        if not self._has_header and self.format.name == "wav":
            header = wav_header(self._rate, None)
        self._has_header = True
        return header + pcm_bytes(samples)

    def finish(self) -> bytes:
        """End the file. Return its last bytes."""
        if self._file is None:
            return b"" if self._has_header else self.add(np.zeros(0, np.float32))
        self._file.close()
        return self._take_written()

    def _take_written(self) -> bytes:
        """Return the bytes written since the last call.

        All bytes of a FLAC file are returned at the end, because its header contains the length.
        """
        assert self._file is not None
        if (self.keeps_length or self.format.name == "flac") and not self._file.closed:
            return b""
        data = self._sink.take()
        if data and not self._has_header:
            self._has_header = True
            # In an MP3 stream, the frame with the length is dropped, because the length is not known yet.
            if self.format.name == "mp3" and not self.keeps_length:
                data = data[_mp3_info_size(data) :]
        return data


def _mp3_info_size(data: bytes) -> int:
    """Return the size in bytes of the frame with the length at the start of an MP3 file; 0 if there is none.

    The encoder fills this frame with zeros until the length is known.
    """
    second_frame = data.find(data[:2], 2)
    is_info = second_frame > 0 and (
        not any(data[4:second_frame]) or b"Xing" in data[:second_frame] or b"Info" in data[:second_frame]
    )
    return second_frame if is_info else 0


class _Sink(io.RawIOBase):
    """A file in memory whose written bytes can be removed with `take`.

    Later writes to removed positions have no effect.
    """

    def __init__(self) -> None:
        self._data = bytearray()
        self._num_taken = 0
        self._position = 0

    def take(self) -> bytes:
        """Return and remove the bytes written since the last call."""
        data = bytes(self._data)
        self._num_taken += len(data)
        self._data.clear()
        return data

    def write(self, data: Any) -> int:
        content = bytes(data)
        size = len(content)
        start = self._position - self._num_taken
        self._position += size
        if start < 0:
            content, start = content[-start:], 0
        self._data[start : start + len(content)] = content
        return size

    def readinto(self, buffer: Any) -> int:
        start, target = max(self._position - self._num_taken, 0), memoryview(buffer)
        content = self._data[start : start + len(target)]
        target[: len(content)] = content
        self._position += len(content)
        return len(content)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        end = self._num_taken + len(self._data)
        self._position = offset + (0, self._position, end)[whence]
        return self._position

    def tell(self) -> int:
        return self._position

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def writable(self) -> bool:
        return True


def read_audio(path: Path) -> tuple[Samples, int]:
    """Return the samples of a recording, with all channels mixed to one, and its sample rate.

    Raises:
        InputError: the file is not an audio file.
        MissingDependencyError: the file is not a 16-bit WAV, and ``soundfile`` is not installed.
        OSError: the file cannot be read.
    """
    data = path.read_bytes()
    try:
        with wave.open(io.BytesIO(data)) as file:
            if file.getsampwidth() == _BYTES_PER_SAMPLE:
                frames = np.frombuffer(file.readframes(file.getnframes()), "<i2")
                samples = frames.reshape(-1, file.getnchannels()).mean(axis=1) / 32768.0
                return samples.astype(np.float32), file.getframerate()
    except (wave.Error, EOFError):
        pass
    library = _soundfile(f"reading {path.name}")
    try:
        channels, rate = library.read(io.BytesIO(data), dtype="float32", always_2d=True)
    except (ValueError, RuntimeError) as error:
        raise InputError(f"{path} cannot be read as an audio file: {error}") from error
    return channels.mean(axis=1).astype(np.float32), int(rate)


def resample(samples: Samples, source_rate: int, target_rate: int) -> Samples:
    """Return samples at another rate (both in Hz), by interpolation with a windowed sinc."""
    if source_rate == target_rate or not len(samples):
        return samples
    num_target_samples = max(1, round(len(samples) * target_rate / source_rate))
    cutoff = min(1.0, target_rate / source_rate)
    half_width = int(np.ceil(_SINC_HALF_WIDTH / cutoff))
    padded = np.pad(samples.astype(np.float64), half_width + 1)
    result = np.empty(num_target_samples, np.float32)
    offsets = np.arange(-half_width, half_width + 1)
    for start in range(0, num_target_samples, 8192):
        positions = np.arange(start, min(start + 8192, num_target_samples)) * (source_rate / target_rate)
        nearest_samples = np.rint(positions).astype(np.int64)
        distance = (nearest_samples[:, None] + offsets) - positions[:, None]
        window = np.where(
            np.abs(distance) < half_width, np.cos(np.pi * distance / (2 * half_width)) ** 2, 0.0
        )
        weights = cutoff * np.sinc(cutoff * distance) * window
        neighbors = padded[np.clip(nearest_samples[:, None] + offsets + half_width + 1, 0, len(padded) - 1)]
        result[start : start + len(positions)] = (weights * neighbors).sum(axis=1)
    return result


@cache
def _soundfile(purpose: str) -> ModuleType:
    try:
        import soundfile
    except (ImportError, OSError) as error:  # OSError if the C library libsndfile is missing
        raise MissingDependencyError("soundfile", "audio", purpose) from error
    library: ModuleType = soundfile
    return library
