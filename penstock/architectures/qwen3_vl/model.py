"""Qwen3-VL (Bai et al. 2025, arXiv:2511.21631): Qwen 3 that adds encoder outputs in its first layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from penstock.architectures.multimodal_rope import interleaved_axes
from penstock.architectures.qwen2_5_vl.model import QwenVisionModel
from penstock.architectures.qwen3.model import Qwen3Model
from penstock.architectures.qwen3_vl.vision import Qwen3Vision
from penstock.architectures.vision_language import VisionLanguageNetwork
from penstock.config import HuggingFaceConfig
from penstock.errors import ConfigError
from penstock.host.heartbeat import beat
from penstock.kernels import StepInputs
from penstock.nn import DecoderNetwork, Loader


@dataclass(frozen=True, slots=True)
class DeepstackNetwork(VisionLanguageNetwork):
    """A decoder that adds outputs of encoder blocks to the image rows of its first layers."""

    text: DecoderNetwork
    encoder: Qwen3Vision

    def __call__(
        self, tokens: Tensor, step: StepInputs, input_embeds: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, Tensor]:
        """``tokens [T]`` -> hidden states ``[T, E]`` before and after the final norm.

        ``input_embeds`` are the indices ``[P]`` of image rows, and values ``[P, (1 + N) E]``: first the
        embeddings, then the values to add to the outputs of each of the first N layers.
        """
        if input_embeds is None:
            return self.text(tokens, step)
        network, ops = self.text, step.ops
        image_rows, image_values = input_embeds
        embeddings, *deepstack = torch.split(image_values, network.embedding.table.shape[1], dim=1)
        x, residual = network.embedding(tokens, step, (image_rows, embeddings.contiguous())), None
        rows = [rotary.rows(step) for rotary in network.rotaries]
        for layer, block in enumerate(network.blocks):
            x, residual = block(x, residual, rows, step)
            if layer < len(deepstack):
                sums = ops.add(ops.take_rows(x, image_rows), deepstack[layer].contiguous())
                x = ops.put_rows(x, image_rows, sums)
            beat()
        normalized, hidden = network.norm.add(x, residual, step)
        return hidden, normalized


class Qwen3EncoderModel(QwenVisionModel):
    """Reads the configuration of a model with the encoder of Qwen3-VL."""

    vision_tables = ("visual.pos_embed.weight",)
    vision_defaults: ClassVar[Mapping[str, object]] = {
        "depth": 27,
        "hidden_size": 1152,
        "intermediate_size": 4304,
        "num_heads": 16,
        "patch_size": 16,
        "out_hidden_size": 3584,
    }

    @classmethod
    def axes(cls, sections: Sequence[int], num_pairs: int) -> tuple[int, ...]:
        return interleaved_axes(sections, num_pairs)

    @classmethod
    def load_encoder(cls, load: Loader, huggingface_config: HuggingFaceConfig) -> Qwen3Vision:
        hidden = cls.blueprint(huggingface_config).hidden
        return Qwen3Vision.load(load, "visual", cls.vision_config(huggingface_config), hidden)


class Qwen3VisionModel(Qwen3EncoderModel):
    """Reads the configuration of Qwen3-VL and builds its network."""

    network: DeepstackNetwork
    text_family = Qwen3Model
    sections = (24, 20, 20)
    vision_defaults: ClassVar[Mapping[str, object]] = {
        **Qwen3EncoderModel.vision_defaults,
        "deepstack_visual_indexes": [8, 16, 24],
    }

    @classmethod
    def build(cls, load: Loader, huggingface_config: HuggingFaceConfig, max_length: int) -> DeepstackNetwork:
        network: Any = super().build(load, huggingface_config, max_length)
        num_blocks, layers = len(network.encoder.deepstack), len(network.text.blocks)
        if num_blocks > layers:
            raise ConfigError(
                "vision_config.deepstack_visual_indexes",
                f"has {num_blocks} blocks for a decoder of {layers} layers",
            )
        return DeepstackNetwork(network.text, network.encoder)
