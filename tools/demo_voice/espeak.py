"""Speech by espeak-ng, through the C library of the package `espeakng-loader`."""

from __future__ import annotations

import ctypes

import numpy as np
import torch
from torch import Tensor

from . import SAMPLE_RATE

_SYNCHRONOUS_RETRIEVAL = (
    2  # the callback receives the audio, and espeak_Synth returns at the end of the speech
)
_RATE_PARAMETER = 1
_SILENCE = 1e-3  # magnitude below which a sample counts as silence
_MARGIN = 400  # samples of silence, at espeak-ng's rate, that are kept at both ends


class Espeak:
    """A voice of espeak-ng. A process can use only one voice at a time.

    Args:
        voice: a voice name of espeak-ng.
        words_per_minute: the speed of the speech.
    """

    def __init__(self, voice: str = "en-us", words_per_minute: int = 150) -> None:
        import espeakng_loader

        self._library = ctypes.CDLL(str(espeakng_loader.get_library_path()))
        data = str(espeakng_loader.get_data_path()).encode()
        self._sample_rate = self._library.espeak_Initialize(_SYNCHRONOUS_RETRIEVAL, 0, data, 0)
        if self._sample_rate <= 0:
            raise RuntimeError("espeak-ng could not be initialized")
        if self._library.espeak_SetVoiceByName(voice.encode()) != 0:
            raise ValueError(f"espeak-ng has no voice {voice!r}")
        self.set_speed(words_per_minute)
        self._received_chunks: list[np.ndarray] = []
        callback_type = ctypes.CFUNCTYPE(
            ctypes.c_int, ctypes.POINTER(ctypes.c_short), ctypes.c_int, ctypes.c_void_p
        )
        self._callback = callback_type(self._receive)  # the library keeps no reference
        self._library.espeak_SetSynthCallback(self._callback)

    def set_speed(self, words_per_minute: int) -> None:
        """Set the speed of later calls."""
        self._library.espeak_SetParameter(_RATE_PARAMETER, words_per_minute, 0)

    def _receive(self, samples: ctypes._Pointer[ctypes.c_short], count: int, _events: int) -> int:
        if samples and count:
            self._received_chunks.append(np.ctypeslib.as_array(samples, (count,)).copy())
        return 0

    def __call__(self, text: str) -> Tensor:  # [S] float32 at SAMPLE_RATE
        """Return the speech of a text, resampled after silence is cut to `_MARGIN` samples at each end."""
        self._received_chunks.clear()
        data = text.encode() + b"\0"
        self._library.espeak_Synth(data, ctypes.c_size_t(len(data)), 0, 1, 0, 1, None, None)
        self._library.espeak_Synchronize()
        samples = torch.from_numpy(np.concatenate(self._received_chunks)).float() / 32768
        loud = (samples.abs() > _SILENCE).nonzero()
        samples = samples[max(0, int(loud[0]) - _MARGIN) : int(loud[-1]) + _MARGIN]
        return resample(samples, self._sample_rate, SAMPLE_RATE)


def resample(samples: Tensor, from_rate: int, to_rate: int) -> Tensor:
    """Resample a waveform ``[S]`` by cutting or extending its spectrum."""
    size = round(len(samples) * to_rate / from_rate)
    spectrum = torch.fft.rfft(samples)
    bins = size // 2 + 1
    spectrum = torch.nn.functional.pad(spectrum, (0, max(0, bins - len(spectrum))))[:bins]
    return torch.fft.irfft(spectrum, n=size) * (size / len(samples))
