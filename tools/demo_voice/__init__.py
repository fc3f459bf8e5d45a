"""The training of the demo voice: espeak-ng, a small NeuCodec, and a small Llama that generates codes."""

from __future__ import annotations

SAMPLE_RATE = 16_000
"""Samples per second of the codec."""
