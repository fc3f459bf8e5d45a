"""Features of the semantic encoder: log mel spectrograms as in Kaldi, with two frames concatenated in each
row.

Source: Povey et al. 2011, "The Kaldi speech recognition toolkit". The parameters are those of Seamless M4T
(arXiv:2312.05187, section 3.2.1), because NeuCodec uses the encoder of Seamless M4T.
"""

from __future__ import annotations

import torch
from torch import Tensor

MEL_BINS = 80
FRAMES_PER_ROW = 2
SAMPLE_RATE = 16000
_WINDOW_SIZE, _HOP_SIZE, _FFT_SIZE = 400, 160, 512  # samples
_MIN_FREQUENCY = 20.0  # Hz
_PREEMPHASIS = 0.97
_FULL_SCALE = 2.0**15  # Kaldi reads samples as 16-bit integers
_ENERGY_FLOOR = 2.0**-23  # minimum energy of a mel bin before the logarithm


def mel_rows(samples: Tensor) -> Tensor:
    """Return the features ``[T, 160]`` float32 of samples ``[S]`` at 16 kHz; T is about ``S / 320``.

    Each of the 80 mel bins has mean 0 and variance 1 over time. Fewer than 560 samples have no features.
    """
    if len(samples) < _WINDOW_SIZE + _HOP_SIZE:
        return torch.zeros(0, FRAMES_PER_ROW * MEL_BINS)
    frames = samples.double().mul(_FULL_SCALE).unfold(0, _WINDOW_SIZE, _HOP_SIZE)  # [F, 400]
    frames = frames - frames.mean(1, keepdim=True)
    previous_samples = torch.cat([frames[:, :1], frames[:, :-1]], 1)
    frames = (frames - _PREEMPHASIS * previous_samples) * _povey_window()
    power: Tensor = torch.fft.rfft(frames, _FFT_SIZE).abs().square()  # [F, 257]
    bins: Tensor = (power @ mel_filters()).clamp(min=_ENERGY_FLOOR).log()  # [F, 80]
    bins = (bins - bins.mean(0)) / (bins.var(0) + 1e-7).sqrt()
    num_rows = len(bins) // FRAMES_PER_ROW
    return bins[: num_rows * FRAMES_PER_ROW].reshape(num_rows, FRAMES_PER_ROW * MEL_BINS).float()


def _povey_window() -> Tensor:
    """Return Kaldi's window ``[400]``: a Hann window to the power of 0.85."""
    return torch.hann_window(_WINDOW_SIZE, periodic=False, dtype=torch.float64) ** 0.85


def mel_filters() -> Tensor:
    """Return the weights ``[257, 80]`` of triangular filters, which are evenly spaced in mel."""
    frequencies = torch.arange(_FFT_SIZE // 2 + 1, dtype=torch.float64) * SAMPLE_RATE / _FFT_SIZE
    bounds = _hertz_to_mel(torch.tensor([_MIN_FREQUENCY, SAMPLE_RATE / 2], dtype=torch.float64))
    edges = torch.linspace(float(bounds[0]), float(bounds[1]), MEL_BINS + 2, dtype=torch.float64)
    left, center, right = edges[:-2], edges[1:-1], edges[2:]
    mels = _hertz_to_mel(frequencies)[:, None]
    return torch.minimum((mels - left) / (center - left), (right - mels) / (right - center)).clamp(min=0)


def _hertz_to_mel(frequencies: Tensor) -> Tensor:
    mels: Tensor = 1127.0 * torch.log1p(frequencies / 700.0)
    return mels
