"""LLaVA (Liu et al. 2023, arXiv:2304.08485): a CLIP or SigLIP encoder, a projector and a decoder."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from penstock.architectures.llava.images import (
    CLIP,
    SIGLIP,
    drops_first_row,
    has_class_row,
    vision_config,
)
from penstock.architectures.vision_language import ImageEncoder, VisionLanguageModel
from penstock.errors import ConfigError
from penstock.kernels import Activation, Ops
from penstock.nn import MAX_LAYERS, Linear, Loader, activation_named
from penstock.nn.vision import (
    EncoderRunner,
    VisionSizes,
    VisionTower,
    flatten_patches,
    image_step,
    image_step_tensors,
    with_step_tensors,
)

if TYPE_CHECKING:
    from penstock.config import HuggingFaceConfig
    from penstock.pipelines.core import ImageMetadata


@dataclass(frozen=True, slots=True)
class LlavaEncoder:
    """A vision tower, and two linear layers that project its output rows to decoder embeddings."""

    tower: VisionTower
    feature_block_counts: tuple[int, ...]
    """For each hidden state that the projector reads: the number of tower blocks before it."""
    has_class_row: bool
    drops_first_row: bool
    up: Linear
    down: Linear
    activation: Activation
    device: torch.device
    dtype: torch.dtype

    def __call__(self, images: Sequence[ImageMetadata], run: EncoderRunner) -> list[Tensor]:
        """Return the decoder embeddings ``[embedding_rows, E]`` of each image."""
        ops = run.ops
        pixels = torch.stack([torch.from_numpy(image.pixel_values) for image in images])
        pixels = pixels.to(self.device, self.dtype)  # [N, C, h, w]
        patches = flatten_patches(pixels, self.tower.sizes.patch_size).view(
            len(images), -1, _flat_patch_size(self.tower)
        )
        if self.has_class_row:
            patches = torch.cat([patches.new_zeros(len(images), 1, patches.shape[2]), patches], dim=1)
        rows_per_image = patches.shape[1]
        step = image_step(ops, [rows_per_image] * len(images), self.device)

        def forward(ops: Ops, tensors: Mapping[str, Tensor]) -> Iterable[Tensor]:
            forward_step = with_step_tensors(step, ops, tensors)
            return self.tower.hidden_states(
                tensors["patches"], forward_step.positions, forward_step, self.feature_block_counts
            )

        inputs = {"patches": patches.flatten(0, 1), **image_step_tensors(step)}
        block_rows = run((id(self), len(images)), inputs, forward)
        rows = torch.cat(block_rows, dim=1).view(len(images), rows_per_image, -1)
        if self.drops_first_row:
            rows = rows[:, 1:]
        inner = ops.activation(self.up(rows.flatten(0, 1).contiguous(), step), self.activation)
        return list(self.down(inner, step).view(*rows.shape[:2], -1))


_PREFIXES: Mapping[str, str] = {
    "model.vision_tower.vision_model.": "vision_tower.",
    "model.vision_tower.": "vision_tower.",
    "model.multi_modal_projector.": "multi_modal_projector.",
    "model.language_model.": "model.",
    "vision_tower.vision_model.": "vision_tower.",
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
}
"""Maps the prefix of a tensor name in the checkpoint to the prefix in the model.

Versions of transformers write different prefixes.
"""


def model_tensor_name(name: str) -> str:
    """Return the name that the model uses for a checkpoint tensor."""
    for prefix, model_prefix in _PREFIXES.items():
        if name.startswith(prefix):
            return model_prefix + name.removeprefix(prefix)
    return name


class LlavaModel(VisionLanguageModel):
    """Reads the configuration of LLaVA and builds its network."""

    weights_adapter = model_tensor_name
    ignored_weights = (
        "*rotary_emb.inv_freq",
        "*position_ids",
        "vision_tower.encoder.layers.*",  # blocks after the last used block
        "vision_tower.post_layernorm.*",
        "vision_tower.head.*",
    )
    text_defaults: ClassVar[Mapping[str, Mapping[str, object]]] = {
        "llama": {
            "hidden_size": 4096,
            "intermediate_size": 11008,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "max_position_embeddings": 2048,
            "vocab_size": 32000,
        },
        "mistral": {
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "vocab_size": 32000,
        },
    }

    @classmethod
    def load_encoder(cls, load: Loader, huggingface_config: HuggingFaceConfig) -> ImageEncoder:
        config, tower_config = huggingface_config, vision_config(huggingface_config)
        tower_type = tower_config.text("model_type")
        if tower_type not in (CLIP, SIGLIP):
            raise ConfigError("vision_config.model_type", f"{tower_type!r} is not one of {CLIP}, {SIGLIP}")
        is_clip = has_class_row(config)
        sizes = (
            VisionSizes.from_huggingface(tower_config, activation="quick_gelu", norm_eps=1e-5)
            if is_clip
            else VisionSizes.from_huggingface(tower_config, activation="gelu_pytorch_tanh", norm_eps=1e-6)
        )
        layers = _feature_layers(config, sizes.layers)
        tower = VisionTower.load(
            load, "vision_tower", sizes, is_clip=is_clip, num_blocks=max(layers), has_post_norm=False
        )
        hidden = cls.blueprint(config).hidden
        bias = config.flag("multimodal_projector_bias", True)
        name, width = "multi_modal_projector", sizes.hidden * len(layers)
        return LlavaEncoder(
            tower,
            layers,
            is_clip,
            drops_first_row(config),
            load.linear(f"{name}.linear_1", hidden, width, bias=bias),
            load.linear(f"{name}.linear_2", hidden, hidden, bias=bias),
            activation_named(config.get("projector_hidden_act") or "gelu", "projector_hidden_act"),
            load.device,
            load.dtype,
        )

    def encoder_rows(self, image: ImageMetadata) -> int:
        return self.max_image_rows(self.huggingface_config)

    @classmethod
    def max_image_rows(cls, huggingface_config: HuggingFaceConfig) -> int:
        tower = vision_config(huggingface_config)
        grid = tower.integer("image_size") // tower.integer("patch_size")
        return grid * grid + has_class_row(huggingface_config)

    @classmethod
    def widest_layer(cls, huggingface_config: HuggingFaceConfig) -> int:
        tower = vision_config(huggingface_config)
        return max(
            3 * tower.integer("hidden_size"),
            tower.integer("intermediate_size"),
            cls.blueprint(huggingface_config).hidden,
        )


def _feature_layers(config: HuggingFaceConfig, layers: int) -> tuple[int, ...]:
    """Return for each value of ``vision_feature_layer`` the number of blocks before its hidden state.

    Negative values count from the output of the last block, -1. 0 selects the embeddings.
    """
    configured = config.get("vision_feature_layer")
    indices = config.integers("vision_feature_layer") if isinstance(configured, list) else None
    if indices is None:
        indices = (config.integer("vision_feature_layer", -2, minimum=-MAX_LAYERS),)
    block_counts = tuple(layers + 1 + index if index < 0 else index for index in indices)
    if not block_counts or min(block_counts) < 0 or max(block_counts) > layers:
        raise ConfigError(
            "vision_feature_layer", f"{configured!r} is not within the {layers} layers of the vision tower"
        )
    return block_counts


def _flat_patch_size(tower: VisionTower) -> int:
    """Return the number of values of a patch: C p p."""
    return tower.sizes.channels * tower.sizes.patch_size**2
