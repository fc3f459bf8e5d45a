"""The codec of the demo voice: a small NeuCodec, trained with an encoder that is not exported.

Training uses the quantizer and the decoder of transformers. The loss compares magnitudes of spectra at three
resolutions and log mel spectra; there is no discriminator.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from transformers import NeuCodecConfig
from transformers.models.neucodec.modeling_neucodec import NeuCodecDecoder, NeuCodecQuantizer

from . import SAMPLE_RATE

HOP = 480
"""Number of samples per frame. There are 33.3 frames per second."""
LEVELS = (4, 4, 4, 4, 4, 4)
NUM_CODES = 4096
_MELS, _MEL_FFT, _MEL_HOP = 80, 1024, 160
_BATCH_SIZE, _SEGMENT_FRAMES = 8, 36  # a training batch has 8 segments of 36 frames


def codec_config() -> NeuCodecConfig:
    """Return the configuration: NeuCodec at 16 kHz with 4,096 codes instead of 65,536."""
    return NeuCodecConfig(
        hidden_size=160,
        intermediate_size=320,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=40,
        downsampling_ratios=[2, 4, 4, 5, 3],
        quantization_dim=192,
        quantization_levels=list(LEVELS),
        input_sampling_rate=SAMPLE_RATE,
        output_sampling_rate=SAMPLE_RATE,
        activation_dropout=0.0,
        semantic_model_config={
            "model_type": "wav2vec2-bert",
            "hidden_size": 32,
            "num_hidden_layers": 1,
            "num_attention_heads": 1,
            "intermediate_size": 32,
        },
    )


def mel_filters() -> Tensor:  # [80, 513]
    """Return 80 triangular filters from 50 to 8,000 Hz, evenly spaced on the mel scale."""
    low, high = (2595 * math.log10(1 + hertz / 700) for hertz in (50, 8000))
    points = 700 * (10 ** (torch.linspace(low, high, _MELS + 2, dtype=torch.float64) / 2595) - 1)
    bins = torch.arange(_MEL_FFT // 2 + 1, dtype=torch.float64) * SAMPLE_RATE / _MEL_FFT
    rising = (bins - points[:-2, None]) / (points[1:-1] - points[:-2])[:, None]
    falling = (points[2:, None] - bins) / (points[2:] - points[1:-1])[:, None]
    return torch.minimum(rising, falling).clamp(min=0).float()


_FILTERS = mel_filters()


def magnitudes(samples: Tensor, size: int, hop: int) -> Tensor:  # [B, S] -> [B, size / 2 + 1, F]
    """Return the magnitudes of the short-time Fourier transform."""
    window = torch.hann_window(size)
    spectrum = torch.stft(samples, size, hop, size, window, pad_mode="constant", return_complex=True)
    return spectrum.abs()


def log_mel(samples: Tensor) -> Tensor:  # [B, S] -> [B, 80, F]
    """Return the log mel spectrum, 100 frames per second."""
    return (_FILTERS @ magnitudes(samples, _MEL_FFT, _MEL_HOP)).clamp(min=1e-4).log()


class Encoder(nn.Module):
    """Converts waveforms to the inputs of the quantizer, by their log mel spectra."""

    def __init__(self, config: NeuCodecConfig, width: int = 192) -> None:
        super().__init__()
        self.first = nn.Conv1d(3 * _MELS, width, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.GroupNorm(1, width),
                nn.Conv1d(width, width, 5, padding=2),
                nn.GELU(),
                nn.Conv1d(width, width, 1),
            )
            for _ in range(3)
        )
        self.last = nn.Conv1d(width, config.quantization_dim, 1)

    def forward(self, samples: Tensor) -> Tensor:  # [B, S] -> [B, F, Q]
        frames = samples.shape[1] // HOP
        mel = (log_mel(samples)[..., 1 : 3 * frames + 1] + 4) / 3
        mel = mel.reshape(len(samples), _MELS, frames, 3).permute(0, 1, 3, 2)
        hidden = self.first(mel.reshape(len(samples), 3 * _MELS, frames))
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return self.last(hidden).transpose(1, 2)


class Codec(nn.Module):
    """The codec: encoder, quantizer and decoder."""

    def __init__(self) -> None:
        super().__init__()
        config = codec_config()
        self.encoder = Encoder(config)
        self.quantizer = NeuCodecQuantizer(config)
        self.decoder = NeuCodecDecoder(config)
        with torch.no_grad():  # the output of the untrained decoder should be quiet
            self.decoder.head.linear.bias[: self.decoder.head.n_fft // 2 + 1] -= 1.0

    def encode(self, samples: Tensor) -> Tensor:  # [S] -> [F] int64
        """Return the codes of one waveform. The waveform is padded to whole frames."""
        samples = nn.functional.pad(samples, (0, -len(samples) % HOP))
        return self.quantizer(self.encoder(samples[None]))[1][0, :, 0].long()

    def decode(self, codes: Tensor) -> Tensor:  # [F] -> [F * HOP]
        """Return the waveform of codes."""
        return self.decoder(self.quantizer.from_codes(codes[None, :, None]))[0, 0]

    def forward(self, samples: Tensor) -> Tensor:  # [B, S] -> [B, S]
        return self.decoder(self.quantizer(self.encoder(samples))[0])[:, 0]

    @torch.no_grad()
    def load_neucodec_state(self, state: Mapping[str, Tensor]) -> None:
        """Copy quantizer and decoder from the weights of `neucodec_state`."""
        for name, module in (("quantizer", self.quantizer), ("acoustic_decoder", self.decoder)):
            part = {
                key.removeprefix(f"{name}."): value.float()
                for key, value in state.items()
                if key.startswith(f"{name}.")
            }
            module.load_state_dict(part)

    def neucodec_state(self) -> dict[str, Tensor]:
        """Return the weights of quantizer and decoder in bfloat16, with the names of transformers."""
        state = {f"quantizer.{name}": value for name, value in self.quantizer.state_dict().items()}
        state |= {f"acoustic_decoder.{name}": value for name, value in self.decoder.state_dict().items()}
        return {name: value.to(torch.bfloat16).contiguous() for name, value in state.items()}


def spectral_loss(actual: Tensor, expected: Tensor) -> Tensor:
    """Return the distance between the spectra of waveforms ``[B, S]``."""
    total = torch.zeros(())
    for size in (256, 640, 1600):
        a, b = magnitudes(actual, size, size // 4), magnitudes(expected, size, size // 4)
        total = total + (a.clamp(min=1e-3).log() - b.clamp(min=1e-3).log()).abs().mean()
        total = total + 0.5 * (a - b).square().sum().sqrt() / b.square().sum().sqrt()
    return total / 3 + (log_mel(actual) - log_mel(expected)).abs().mean()


def train_codec(codec: Codec, speech: Sequence[Tensor], steps: int, *, decoder_only: bool, seed: int) -> None:
    """Train a codec on waveforms.

    Args:
        codec: the codec, which is changed in place.
        speech: waveforms ``[S]``.
        steps: number of steps.
        decoder_only: whether to train only the decoder, so that codes do not change. The learning rate then
            ends at 2 % of its peak, and otherwise at 51 %.
        seed: the seed that selects excerpts of the speech.
    """
    peak_learning_rate = 5e-4 if decoder_only else 1e-3
    trained_module = codec.decoder if decoder_only else codec
    optimizer = torch.optim.AdamW(
        trained_module.parameters(), lr=peak_learning_rate, betas=(0.8, 0.99), weight_decay=0.01
    )
    schedule_steps = steps if decoder_only else 2 * steps
    rng = random.Random(seed)
    stream = torch.cat([nn.functional.pad(samples, (0, -len(samples) % HOP)) for samples in speech])
    segment_size, average, start_time = HOP * _SEGMENT_FRAMES, 0.0, time.perf_counter()
    for step in range(steps):
        decay = 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * step / schedule_steps))
        factor = min(1.0, (step + 1) / 100) * decay
        for group in optimizer.param_groups:
            group["lr"] = peak_learning_rate * factor
        starts = [rng.randrange(len(stream) - segment_size) for _ in range(_BATCH_SIZE)]
        samples = torch.stack([stream[start : start + segment_size] for start in starts])
        samples = samples * torch.empty(_BATCH_SIZE, 1).uniform_(0.7, 1.1)
        loss = spectral_loss(codec(samples), samples)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(trained_module.parameters(), 1.0)
        optimizer.step()
        average = loss.item() if step == 0 else 0.98 * average + 0.02 * loss.item()
        if step % 100 == 99:
            seconds = time.perf_counter() - start_time
            print(f"codec step {step + 1}  loss {average:.4f}  {seconds:.0f} s", flush=True)


def train_encoder(
    codec: Codec,
    speech: Sequence[Tensor],
    decoded_examples: Sequence[tuple[Tensor, Tensor]],
    steps: int,
    *,
    seed: int,
) -> float:
    """Train an encoder for a decoder that does not change.

    The first half of a batch is speech. The loss of the first half compares the speech with the waveform that
    the decoder computes from the encoder's codes. The second half is decoded from known codes. The loss of
    the second half compares the quantized output of the encoder with the vectors of the known codes.

    Args:
        codec: the codec. Its encoder is changed in place.
        speech: waveforms ``[S]``.
        decoded_examples: waveforms ``[F * HOP]`` with their codes ``[F]``.
        steps: number of steps.
        seed: the seed that selects excerpts.

    Returns:
        The moving average, at the end of the training, of the share of known codes that the encoder predicts.
    """
    for part in (codec.quantizer, codec.decoder):
        part.requires_grad_(False)
    optimizer = torch.optim.AdamW(codec.encoder.parameters(), lr=1e-3, betas=(0.8, 0.99), weight_decay=0.01)
    rng = random.Random(seed)
    stream = torch.cat([nn.functional.pad(samples, (0, -len(samples) % HOP)) for samples in speech])
    decoded_samples = torch.cat([samples for samples, _ in decoded_examples])
    codes = torch.cat([row for _, row in decoded_examples])
    segment_size, num_rows = HOP * _SEGMENT_FRAMES, _BATCH_SIZE // 2
    accuracy, start_time = 0.0, time.perf_counter()
    for step in range(steps):
        factor = min(1.0, (step + 1) / 50) * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * step / steps)))
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * factor
        starts = [rng.randrange(len(stream) - segment_size) for _ in range(num_rows)]
        frames = [rng.randrange(len(codes) - _SEGMENT_FRAMES) for _ in range(num_rows)]
        real = torch.stack([stream[start : start + segment_size] for start in starts])
        synthetic = torch.stack(
            [decoded_samples[frame * HOP : frame * HOP + segment_size] for frame in frames]
        )
        expected_codes = torch.stack([codes[frame : frame + _SEGMENT_FRAMES] for frame in frames])
        hidden, indices = codec.quantizer(codec.encoder(torch.cat((real, synthetic))))
        expected_hidden = codec.quantizer.from_codes(expected_codes[..., None])
        distance = (hidden[num_rows:] - expected_hidden).square().mean() / expected_hidden.var()
        loss = spectral_loss(codec.decoder(hidden[:num_rows])[:, 0], real) + 2 * distance
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(codec.encoder.parameters(), 1.0)
        optimizer.step()
        share = (indices[num_rows:, :, 0] == expected_codes).float().mean().item()
        accuracy = share if step == 0 else 0.98 * accuracy + 0.02 * share
        if step % 100 == 99:
            seconds = time.perf_counter() - start_time
            print(
                f"encoder step {step + 1}  loss {loss.item():.4f}  accuracy {accuracy:.3f}  {seconds:.0f} s",
                flush=True,
            )
    return accuracy
