"""Small random vision models, prompts with images, and their reference results from transformers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from support.checkpoints import skip_unknown_model_type

from penstock.architectures.registry import SupportedArchitecture
from penstock.pipelines import TextGenerationPipeline
from penstock.pipelines.core import ImageMetadata, TextAndVisionContext, image_digest


def save_vision_model(architecture: SupportedArchitecture, folder: Path, **changed_values: Any) -> Any:
    """Save a model whose random weights are so large that a mistake changes the logits. Return it in float32.

    Args:
        architecture: its tiny configuration is used.
        folder: the folder to write.
        changed_values: changed values of the configuration. A dict is merged into the section of this name.
    """
    from transformers import AutoConfig, AutoModelForImageTextToText

    assert architecture.tiny_config is not None
    values = architecture.tiny_config()
    for name, new_value in changed_values.items():
        values[name] = values[name] | new_value if isinstance(new_value, dict) else new_value
    skip_unknown_model_type(values["model_type"])
    config = AutoConfig.for_model(
        **{name: value for name, value in values.items() if name != "architectures"}
    )
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            is_scale = parameter.dim() == 1 and name.endswith(".weight")
            parameter.copy_((0.3 if is_scale else 0.2) * torch.randn_like(parameter) + is_scale)
        for name, buffer in model.named_buffers():
            if name.endswith(("layer_scalar", "std_bias", "std_scale")):
                buffer.uniform_(0.5, 1.5)
            elif name.endswith(("put_min", "put_max")):  # the bounds of clipped layers
                buffer.fill_((1 + float(torch.rand(()))) * (-1 if name.endswith("min") else 1))
    model.save_pretrained(folder)
    return AutoModelForImageTextToText.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()


@dataclass(frozen=True)
class VisionPrompt:
    """A prompt: tokens with image placeholders, images, and further arguments for the transformers model."""

    tokens: list[int]
    images: list[ImageMetadata]
    image_token: int
    is_bidirectional: bool
    arguments: dict[str, Any]

    def context(self, max_new_tokens: int = 100, **fields: Any) -> TextAndVisionContext:
        """Return a context that ends only at its maximum length."""
        return TextAndVisionContext(
            prompt=list(self.tokens),
            max_length=len(self.tokens) + max_new_tokens,
            tokens=np.array(self.tokens, dtype=np.int64),
            ignore_eos=True,
            images=list(self.images),
            vision_token_ids=[self.image_token],
            has_bidirectional_images=self.is_bidirectional,
            **fields,
        )

    def logits(self, model: Any, continuation: Sequence[int] = ()) -> torch.Tensor:  # [T, V]
        """Return the logits ``[T, V]`` of transformers after each token of the prompt and a continuation."""
        ids = torch.tensor([[*self.tokens, *continuation]])
        dtype = next(model.parameters()).dtype
        with torch.inference_mode():
            outputs = model(input_ids=ids, **_model_arguments(self.arguments, ids, self.image_token, dtype))
        logits: torch.Tensor = outputs.logits[0].float()
        return logits

    def greedy(self, model: Any, count: int) -> list[int]:
        """Return the ``count`` tokens that the greedy search of transformers generates."""
        ids = torch.tensor([self.tokens])
        result = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=count,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            **_model_arguments(self.arguments, ids, self.image_token, torch.float32),
        )
        text: list[int] = result[0, len(self.tokens) :].tolist()
        return text


def _model_arguments(
    arguments: dict[str, Any], ids: torch.Tensor, image_token: int, dtype: torch.dtype
) -> dict[str, Any]:
    """Return the arguments of the transformers model for these token ids, with pixels of a dtype."""
    result = dict(arguments)
    result["pixel_values"] = result["pixel_values"].to(dtype)
    for name in ("token_type_ids", "mm_token_type_ids"):
        if name in result:
            result[name] = (ids == image_token).long()
    return result


Spans = Sequence[tuple[ImageMetadata, list[int]]]  # images, each with its tokens in the prompt


def _prompt(
    text: Sequence[Sequence[int]], spans: Spans, image_token: int, is_bidirectional: bool, **arguments: Any
) -> VisionPrompt:
    """Return a prompt that consists of texts, with an image after each text except the last."""
    tokens: list[int] = []
    images = []
    for words, (image, ids) in zip(text[:-1], spans, strict=False):
        tokens += words
        offsets = [index for index, token in enumerate(ids) if token == image_token]
        start, end = len(tokens) + offsets[0], len(tokens) + offsets[-1] + 1
        images.append(
            ImageMetadata(
                start_idx=start,
                end_idx=end,
                pixel_values=image.pixel_values,
                arguments=image.arguments,
                num_embedding_rows=len(offsets),
                image_hash=image_digest(image.pixel_values, image.arguments),
            )
        )
        tokens += ids
    return VisionPrompt([*tokens, *text[-1]], images, image_token, is_bidirectional, arguments)


PROMPT_TEXTS = ([5, 6, 7], [20, 21], [8, 9, 10, 11, 12])


def _pixels(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def _image(pixels: np.ndarray, **arguments: np.ndarray) -> ImageMetadata:
    return ImageMetadata(start_idx=0, end_idx=1, pixel_values=pixels, arguments=arguments)


def idefics3_prompt(config: dict[str, Any], text: Sequence[Sequence[int]] = PROMPT_TEXTS) -> VisionPrompt:
    """Return a prompt with two images: one has two tiles and an overview, the other has one tile.

    If ``text`` has two parts, the prompt has only the first image.
    """
    size, token = config["vision_config"]["image_size"], config["image_token_id"]
    side = size // config["vision_config"]["patch_size"] // config["scale_factor"]
    tiles = [_pixels(0, 3, 3, size, size), _pixels(1, 1, 3, size, size)]
    spans = [
        (_image(pixels, tiles=np.array([2, 1])), [*([30, *[token] * side**2] * len(pixels)), 31])
        for pixels in tiles
    ]
    batch = torch.from_numpy(np.concatenate(tiles[: len(text) - 1]))[None]
    return _prompt(text, spans, token, False, pixel_values=batch)


def gemma3_prompt(config: dict[str, Any], text: Sequence[Sequence[int]] = PROMPT_TEXTS) -> VisionPrompt:
    """Return a prompt with two images, or with one if ``text`` has two parts."""
    size, token = config["vision_config"]["image_size"], config["image_token_index"]
    images = [_pixels(seed, 3, size, size) for seed in (0, 1)]
    ids = [config["boi_token_index"], *[token] * config["mm_tokens_per_image"], config["eoi_token_index"]]
    batch = torch.from_numpy(np.stack(images[: len(text) - 1]))
    spans = [(_image(pixels), ids) for pixels in images]
    return _prompt(text, spans, token, True, pixel_values=batch, token_type_ids=None)


def qwen_prompt(
    config: dict[str, Any],
    text: Sequence[Sequence[int]] = PROMPT_TEXTS,
    grids: Sequence[tuple[int, int]] = ((4, 6), (10, 8)),
) -> VisionPrompt:
    """Return a prompt with two images of different shapes, or with one if ``text`` has two parts."""
    token, patch = config["image_token_id"], config["vision_config"]["patch_size"]
    start, end = config["vision_start_token_id"], config["vision_end_token_id"]
    grids = grids[: len(text) - 1]
    images = [_pixels(seed, rows * columns, 6 * patch * patch) for seed, (rows, columns) in enumerate(grids)]
    spans = [
        (_image(pixels, image_grid_thw=np.array([1, *grid])), [start, *[token] * (len(pixels) // 4), end])
        for pixels, grid in zip(images, grids, strict=True)
    ]
    return _prompt(
        text,
        spans,
        token,
        False,
        pixel_values=torch.from_numpy(np.concatenate(images)),
        image_grid_thw=torch.tensor([(1, *grid) for grid in grids]),
        mm_token_type_ids=None,
    )


def gemma4_prompt(
    config: dict[str, Any],
    text: Sequence[Sequence[int]] = PROMPT_TEXTS,
    grids: Sequence[tuple[int, int]] = ((2, 8), (4, 4)),
) -> VisionPrompt:
    """Return a prompt with two images of different shapes, or with one if ``text`` has two parts."""
    token, vision = config["image_token_id"], config["vision_config"]
    grids = grids[: len(text) - 1]
    num_rows, width = max(rows * columns for rows, columns in grids), 3 * vision["patch_size"] ** 2
    positions = [
        np.array([(column, row) for row in range(rows) for column in range(columns)])
        for rows, columns in grids
    ]
    images = [np.abs(_pixels(seed, len(array), width)).clip(max=1) for seed, array in enumerate(positions)]
    batch = torch.zeros(len(grids), num_rows, width)
    batch_positions = torch.full((len(grids), num_rows, 2), -1)
    for index, (pixels, array) in enumerate(zip(images, positions, strict=True)):
        batch[index, : len(array)] = torch.from_numpy(pixels)
        batch_positions[index, : len(array)] = torch.from_numpy(array)
    num_merged = vision["pooling_kernel_size"] ** 2
    spans = [
        (
            _image(pixels, image_position_ids=array),
            [config["boi_token_id"], *[token] * (len(array) // num_merged), config["eoi_token_id"]],
        )
        for pixels, array in zip(images, positions, strict=True)
    ]
    return _prompt(
        text,
        spans,
        token,
        config["text_config"].get("use_bidirectional_attention") == "vision",
        pixel_values=batch,
        image_position_ids=batch_positions,
        mm_token_type_ids=None,
    )


PROMPTS: dict[str, Callable[..., VisionPrompt]] = {
    "idefics3": idefics3_prompt,
    "smolvlm": idefics3_prompt,
    "gemma3": gemma3_prompt,
    "gemma4": gemma4_prompt,
    "qwen2_vl": qwen_prompt,
    "qwen2_5_vl": qwen_prompt,
    "qwen3_vl": qwen_prompt,
    "qwen3_5": qwen_prompt,
    "qwen3_5_moe": qwen_prompt,
}
"""Family -> function that returns its prompt for a configuration."""


def chunk_logits(
    pipeline: TextGenerationPipeline, context: TextAndVisionContext, chunks: Sequence[int]
) -> torch.Tensor:  # [T, V]
    """Return the logits ``[T, V]`` after each token, computed in chunks that end at these indices."""
    rows = []
    for end_index in chunks:
        context.set_token_indices(active_idx=end_index)
        rows.append(forward_logits(pipeline, [context]))
        context.update(0)
        pipeline.kv.commit(context)
    return torch.cat(rows)


def forward_logits(
    pipeline: TextGenerationPipeline, contexts: Sequence[TextAndVisionContext]
) -> torch.Tensor:
    """Return the logits ``[R, V]`` of the R tokens that the next step computes for all contexts."""
    for context in contexts:
        pipeline.kv.claim(context)
        pipeline.kv.reserve(context)
    counts = [context.active_length for context in contexts]
    return pipeline.runner.forward(contexts, counts).float().cpu()
