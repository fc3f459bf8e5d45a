"""Configurations of the audio codecs that the benchmarks create with random weights."""

from __future__ import annotations

SNAC = {
    "sampling_rate": 24000,
    "encoder_dim": 48,
    "encoder_rates": [2, 4, 8, 8],
    "decoder_dim": 1024,
    "decoder_rates": [8, 8, 4, 2],
    "attn_window_size": None,
    "codebook_size": 4096,
    "codebook_dim": 8,
    "vq_strides": [4, 2, 1],
    "noise": True,
    "depthwise": True,
}
"""The config.json of SNAC at 24 kHz."""
SMALL_ENCODER = {
    "model_type": "wav2vec2-bert",
    "hidden_size": 1024,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "output_hidden_size": 1024,
    "feature_projection_input_dim": 8,
}
"""A small semantic encoder for NeuCodec. NeuCodecConfig requires one, but decoding does not use it."""
