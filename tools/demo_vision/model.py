"""A small SmolVLM for training, without a KV cache: a SigLIP vision tower, a connector, and a Llama."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from train_demo_model import Model as Llama
from train_demo_model import ModelSizes

from demo_vision.pictures import COLOURS, SHAPES


@dataclass(frozen=True)
class TowerSizes:
    """Sizes of the vision tower and of images."""

    image_size: int = 96
    patch_size: int = 12
    hidden: int = 128
    inner: int = 384
    layers: int = 3
    heads: int = 4
    scale: int = 2  # the connector joins scale x scale patches into one image token of the decoder
    norm_eps: float = 1e-6

    @property
    def grid(self) -> int:
        """Number of patches per row and per column of an image."""
        return self.image_size // self.patch_size

    @property
    def num_image_tokens(self) -> int:
        """Number of image tokens of an image in the decoder."""
        return (self.grid // self.scale) ** 2


class TowerBlock(nn.Module):
    """A layer of the tower. Its q, k and v projections are fused."""

    def __init__(self, sizes: TowerSizes) -> None:
        super().__init__()
        self.heads = sizes.heads
        self.norm1 = nn.LayerNorm(sizes.hidden, sizes.norm_eps)
        self.qkv = nn.Linear(sizes.hidden, 3 * sizes.hidden)
        self.out = nn.Linear(sizes.hidden, sizes.hidden)
        self.norm2 = nn.LayerNorm(sizes.hidden, sizes.norm_eps)
        self.fc1 = nn.Linear(sizes.hidden, sizes.inner)
        self.fc2 = nn.Linear(sizes.inner, sizes.hidden)

    def forward(self, x: Tensor) -> Tensor:
        """Return the output of the layer for ``x [N, P, E]``, N images of P patches."""
        count, patches, hidden = x.shape
        heads = self.qkv(self.norm1(x)).view(count, patches, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        q, k, v = heads.unbind(0)
        scores = (q * (hidden // self.heads) ** -0.5) @ k.transpose(-1, -2)
        mixed = torch.softmax(scores, -1, dtype=scores.dtype) @ v
        x = x + self.out(mixed.transpose(1, 2).reshape(count, patches, hidden))
        return x + self.fc2(F.gelu(self.fc1(self.norm2(x)), approximate="tanh"))


class DemoVision(nn.Module):
    """The model: tower, connector and decoder."""

    def __init__(self, tower: TowerSizes, text: ModelSizes) -> None:
        super().__init__()
        self.tower_sizes = tower
        self.patches = nn.Linear(3 * tower.patch_size**2, tower.hidden)
        self.positions = nn.Parameter(0.02 * torch.randn(tower.grid**2, tower.hidden))
        self.blocks = nn.ModuleList(TowerBlock(tower) for _ in range(tower.layers))
        self.norm = nn.LayerNorm(tower.hidden, tower.norm_eps)
        for block in self.blocks:
            for layer in (block.out, block.fc2):
                nn.init.normal_(layer.weight, std=0.02 / math.sqrt(2 * tower.layers))
        self.connector = nn.Linear(tower.hidden * tower.scale**2, text.hidden_size, bias=False)
        self.classes = nn.Linear(tower.hidden, 2 * (len(SHAPES) + len(COLOURS) + 2))  # for training only
        self.text = Llama(text)

    def encode_images(self, pixels: Tensor) -> tuple[Tensor, Tensor]:
        """Return image embeddings ``[N, R, E]`` for the decoder, and class scores ``[N, P, K]`` of patches.

        ``pixels`` is ``[N, 3, S, S]``.
        """
        sizes = self.tower_sizes
        side, size, scale = sizes.grid, sizes.patch_size, sizes.scale
        count = len(pixels)
        flat = (
            pixels.view(count, 3, side, size, side, size).permute(0, 2, 4, 1, 3, 5).flatten(1, 2).flatten(2)
        )
        x = self.patches(flat) + self.positions
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        patch_groups = x.view(count, side // scale, scale, side // scale, scale, -1).transpose(2, 3)
        return self.connector(patch_groups.reshape(count, sizes.num_image_tokens, -1)), self.classes(x)

    def forward(
        self,
        ids: Tensor,
        image_embeddings: Tensor,
        image_token_indices: Tensor,
        positions: Tensor,
        mask: Tensor,
    ) -> Tensor:
        """Return the logits ``[B, T, V]``.

        Args:
            ids: ``[B, T]``.
            image_embeddings: ``[B, R, E]``, the embeddings of the image of each sequence.
            image_token_indices: ``[R]``, the indices of the tokens that the image embeddings replace.
            positions: ``[B, T]``, the position of each token in its conversation.
            mask: ``[B, 1, T, T]``, added to the attention scores.
        """
        text = self.text
        x = text.embedding(ids).to(image_embeddings.dtype)
        x = x.index_copy(1, image_token_indices, image_embeddings)
        exponents = torch.arange(0, text.sizes.head_dim, 2).float() / text.sizes.head_dim
        angles = positions[..., None].float() * text.sizes.rope_theta**-exponents
        angles = torch.cat((angles, angles), -1)[:, None]
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        for block in text.blocks:
            x = block(x, cos, sin, mask.to(x.dtype))
        return F.linear(text.norm(x), text.embedding.weight)

    def smolvlm_state(self) -> dict[str, Tensor]:
        """Return the weights in bfloat16 under their names in a SmolVLM checkpoint."""
        sizes = self.tower_sizes
        state: dict[str, Tensor] = {
            f"model.text_model.{name.removeprefix('model.')}": tensor
            for name, tensor in self.text.llama_state().items()
        }
        tower = "model.vision_model"
        state[f"{tower}.embeddings.patch_embedding.weight"] = self.patches.weight.view(
            sizes.hidden, 3, sizes.patch_size, sizes.patch_size
        )
        state[f"{tower}.embeddings.patch_embedding.bias"] = self.patches.bias
        state[f"{tower}.embeddings.position_embedding.weight"] = self.positions
        for index, block in enumerate(self.blocks):
            layer = f"{tower}.encoder.layers.{index}"
            for parameter_name in ("weight", "bias"):
                for name, tensor_or_module in zip(
                    "qkv", getattr(block.qkv, parameter_name).chunk(3), strict=True
                ):
                    state[f"{layer}.self_attn.{name}_proj.{parameter_name}"] = tensor_or_module
                modules = {
                    "layer_norm1": block.norm1,
                    "self_attn.out_proj": block.out,
                    "layer_norm2": block.norm2,
                    "mlp.fc1": block.fc1,
                    "mlp.fc2": block.fc2,
                }
                state |= {
                    f"{layer}.{name}.{parameter_name}": getattr(tensor_or_module, parameter_name)
                    for name, tensor_or_module in modules.items()
                }
        state[f"{tower}.post_layernorm.weight"] = self.norm.weight
        state[f"{tower}.post_layernorm.bias"] = self.norm.bias
        state["model.connector.modality_projection.proj.weight"] = self.connector.weight
        return {name: tensor.detach().to(torch.bfloat16).contiguous() for name, tensor in state.items()}


def smolvlm_config(
    tower: TowerSizes, text: ModelSizes, image_token_id: int, end_token_id: int
) -> dict[str, Any]:
    """Return the ``config.json`` of a ``SmolVLMForConditionalGeneration``."""
    llama = text.to_llama_config()
    for name in ("architectures", "torch_dtype", "use_cache", "bos_token_id"):
        llama.pop(name)
    llama |= {"eos_token_id": end_token_id, "pad_token_id": end_token_id}
    return {
        "architectures": ["SmolVLMForConditionalGeneration"],
        "model_type": "smolvlm",
        "image_token_id": image_token_id,
        "scale_factor": tower.scale,
        "tie_word_embeddings": True,
        "eos_token_id": end_token_id,
        "pad_token_id": end_token_id,
        "dtype": "bfloat16",
        "text_config": llama,
        "vision_config": {
            "model_type": "smolvlm_vision",
            "hidden_size": tower.hidden,
            "intermediate_size": tower.inner,
            "num_hidden_layers": tower.layers,
            "num_attention_heads": tower.heads,
            "image_size": tower.image_size,
            "patch_size": tower.patch_size,
            "layer_norm_eps": tower.norm_eps,
            "hidden_act": "gelu_pytorch_tanh",
        },
    }
