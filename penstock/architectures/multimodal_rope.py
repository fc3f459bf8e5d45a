"""`MultimodalRopeModel`: positions with several axes for the tokens of images (arXiv:2409.12191).

A text token has one position. A token of an image has three positions: time, row and column, each counted
from the start position of the image. The text after an image continues at the largest of these positions plus
1. An image therefore advances the positions by at most its number of tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from penstock.architectures.decoder import DecoderModel
from penstock.architectures.model import ModelInputs
from penstock.errors import ConfigError
from penstock.kernels import KVCacheInputs
from penstock.nn.config_values import ConfigValues
from penstock.pipelines.core import ImageMetadata, TextAndVisionContext, TextContext

GRID_ARGUMENT = "image_grid_thw"
"""The key of the image argument with the numbers of frames, patch rows and patch columns."""


class MultimodalRopeModel(DecoderModel):
    """A decoder whose rotary embedding has axes for time, rows and columns of images."""

    merge_size: int = 2
    """Number of patches, in each direction, that are merged into one token."""

    def prepare_initial_token_inputs(
        self,
        replica_batches: Sequence[Sequence[TextContext]],
        kv_cache_inputs: KVCacheInputs | None = None,
        return_n_logits: int | Sequence[int] = 1,
        *,
        drafts: Sequence[Sequence[int]] | None = None,
    ) -> ModelInputs:
        """Return a ragged batch; positions are ``[3, T]`` if the axes of a token differ, else ``[T]``."""
        inputs = super().prepare_initial_token_inputs(
            replica_batches, kv_cache_inputs, return_n_logits, drafts=drafts
        )
        contexts = [context for replica in replica_batches for context in replica]
        if not any(isinstance(context, TextAndVisionContext) and context.images for context in contexts):
            return inputs
        draft_counts = inputs.drafts or [0] * len(contexts)
        context_positions = [
            multimodal_positions(context, context.active_length + draft_count, self.merge_size)
            for context, draft_count in zip(contexts, draft_counts, strict=True)
        ]
        positions = np.concatenate(context_positions, axis=1)  # [3, T]
        if (positions == positions[0]).all():
            positions = positions[0]
        return replace(inputs, positions=self._to_device(positions, np.int64))

    def prepare_next_token_inputs(self, next_tokens: Tensor, prev_model_inputs: ModelInputs) -> ModelInputs:
        if prev_model_inputs.positions.dim() == 2:
            # After an image, the text continues at the largest position of the image plus 1.
            largest = prev_model_inputs.positions.amax(0)
            prev_model_inputs = replace(prev_model_inputs, positions=largest)
        return super().prepare_next_token_inputs(next_tokens, prev_model_inputs)


def multimodal_positions(context: TextContext, num_tokens: int, merge_size: int) -> npt.NDArray[np.int64]:
    """Return the positions ``[3, num_tokens]`` of a context's tokens from its ``start_idx`` on.

    The positions depend only on the images and the token indices. Chunked prefill, preemption and prefix
    caching therefore do not change them.
    """
    first_index = context.start_idx
    indices = np.arange(first_index, first_index + num_tokens)
    positions = np.broadcast_to(indices, (3, num_tokens)).copy()
    images = context.images if isinstance(context, TextAndVisionContext) else []
    for image in images:
        rows, columns = merged_grid(image, merge_size)
        is_inside = (indices >= image.start_idx) & (indices < image.end_idx)
        offsets = indices[is_inside] - image.start_idx
        start = positions[0, is_inside] - offsets
        positions[0, is_inside] = start
        positions[1, is_inside] = start + offsets // columns
        positions[2, is_inside] = start + offsets % columns
        positions[:, indices >= image.end_idx] += max(rows, columns) - (image.end_idx - image.start_idx)
    return positions


def patches_and_grid(
    image: ImageMetadata, device: torch.device, dtype: torch.dtype
) -> tuple[Tensor, list[tuple[int, int]]]:
    """Return the patches ``[T, C 2 p p]`` of an image, and a list with its patch rows and columns."""
    _, height, width = image.arguments[GRID_ARGUMENT].tolist()
    return torch.from_numpy(image.pixel_values).to(device, dtype), [(height, width)]


def merged_grid(image: ImageMetadata, merge_size: int) -> tuple[int, int]:
    """Return the rows and columns of an image's grid of merged patches."""
    _, height, width = image.arguments[GRID_ARGUMENT].tolist()
    return height // merge_size, width // merge_size


def sectioned_axes(sections: Sequence[int], num_pairs: int) -> tuple[int, ...]:
    """Return the position axis of each pair of dims if each axis rotates a contiguous section of pairs.

    Raises:
        ConfigError: the sections do not add up to ``num_pairs``.
    """
    if sum(sections) != num_pairs:
        raise ConfigError(
            "mrope_section",
            f"{list(sections)} must add up to {num_pairs}, half the dims of a head, not {sum(sections)}",
        )
    return tuple(axis for axis, size in enumerate(sections) for _ in range(size))


def interleaved_axes(sections: Sequence[int], num_pairs: int) -> tuple[int, ...]:
    """Return the position axis of each pair of dims if the axes are interleaved.

    Axis a, 1 or 2, rotates the pairs ``3 i + a`` for i below ``sections[a]``. Axis 0 rotates all other pairs.
    """
    return tuple(pair % 3 if pair < 3 * sections[pair % 3] else 0 for pair in range(num_pairs))


def rope_sections(parameters: ConfigValues, default: Sequence[int]) -> tuple[int, ...]:
    """Return ``mrope_section``: the number of dim pairs for each of the axes time, row and column.

    Raises:
        ConfigError: the value is not a list of three whole numbers of at least 0.
    """
    configured = parameters.get("mrope_section")
    if configured is None:
        return tuple(default)
    if (
        not isinstance(configured, list)
        or len(configured) != 3
        or any(type(size) is not int or size < 0 for size in configured)
    ):
        raise ConfigError("mrope_section", f"must be a list of three whole numbers, was {configured!r}")
    return tuple(configured)
