"""Captured steps of a vision encoder: bit-equal to eager operations, with bounded memory."""

from __future__ import annotations

from dataclasses import replace as dataclass_replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from support.checkpoints import write_checkpoint
from support.images import forward_logits, image_context, random_pixels
from support.pipeline_steps import open_pipeline
from support.vision import PROMPTS, VisionPrompt, save_vision_model

from penstock.architectures.registry import PIPELINE_REGISTRY
from penstock.architectures.vision_language import MAX_ENCODER_GRAPHS
from penstock.kernels import cpu
from penstock.pipelines import TextGenerationPipeline
from penstock.pipelines.core import ImageMetadata, TextAndVisionContext

pytestmark = pytest.mark.skipif(not cpu.available_isas(), reason="the C++ kernels are not built")

EAGER_FAMILIES = ("gemma3", "gemma4", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5", "qwen3_5_moe")
"""Families whose prompts run eagerly because of bidirectional spans or multimodal rotary embeddings."""

VISION_FAMILIES = [
    candidate.name for candidate in PIPELINE_REGISTRY.architectures if candidate.media is not None
]


@pytest.fixture(scope="module", params=VISION_FAMILIES)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    folder = tmp_path_factory.mktemp(request.param)
    return request.param, write_vision_checkpoint(request.param, folder)


def find_architecture(name: str) -> Any:
    (result,) = (candidate for candidate in PIPELINE_REGISTRY.architectures if candidate.name == name)
    return result


def write_vision_checkpoint(name: str, folder: Path) -> Path:
    if name == "llava":
        return write_checkpoint(folder, find_architecture(name).tiny_config())
    save_vision_model(find_architecture(name), folder)
    return folder


def make_images(name: str) -> list[ImageMetadata]:
    """Return two images, of different shapes if the family supports several shapes."""
    config = find_architecture(name).tiny_config()
    if name == "llava":
        pixels = [random_pixels(1), random_pixels(2)]
        return list(image_context([1, *[129] * 16, 2, *[129] * 16], pixels, 129).images)
    prompt: VisionPrompt = PROMPTS[name](config)
    return prompt.images


def make_context(name: str, images: list[ImageMetadata]) -> TextAndVisionContext:
    """Return a context of the prompt of `make_images` with these images."""
    if name == "llava":
        pixels = [image.pixel_values for image in images]
        return image_context([1, *[129] * 16, 2, *[129] * 16], pixels, 129)
    prompt: VisionPrompt = PROMPTS[name](find_architecture(name).tiny_config())
    return dataclass_replace(prompt, images=images).context()


def with_random_pixels(image: ImageMetadata, seed: int) -> ImageMetadata:
    """Return an image of the same shape with random pixels."""
    pixels = np.random.default_rng(seed).normal(size=image.pixel_values.shape).astype(np.float32)
    return replace(image, pixel_values=pixels, image_hash=None)


def open_vision(folder: Path, encoding: str, *, compiled: bool, **options: Any) -> TextGenerationPipeline:
    pipeline = open_pipeline(folder, quantization_encoding=encoding, **options)
    pipeline.session.use_graphs = compiled
    return pipeline


@torch.inference_mode()
def encode_images(pipeline: TextGenerationPipeline, images: list[ImageMetadata]) -> torch.Tensor:
    model: Any = pipeline.model
    return torch.cat(model.encode_images(images))


@pytest.mark.parametrize("encoding", ["float32", "bfloat16", "int8"])
def test_captured_steps_are_bit_equal_to_eager_operations(
    checkpoint: tuple[str, Path], encoding: str
) -> None:
    name, folder = checkpoint
    compiled_pipeline, eager_pipeline = (
        open_vision(folder, encoding, compiled=is_compiled) for is_compiled in (True, False)
    )
    first_image, second_image = make_images(name)
    for repetition in range(4):
        for template_image in (first_image, second_image):
            image = with_random_pixels(template_image, repetition)
            assert torch.equal(
                encode_images(compiled_pipeline, [image]), encode_images(eager_pipeline, [image])
            ), f"repetition {repetition}"
        batch = [
            with_random_pixels(first_image, repetition),
            with_random_pixels(second_image, 50 + repetition),
        ]
        batch_rows = encode_images(compiled_pipeline, batch)
        assert torch.equal(batch_rows, torch.cat([encode_images(eager_pipeline, [image]) for image in batch]))
    compiled_model: Any = compiled_pipeline.model
    assert compiled_model.encoder_graphs.status.startswith("compiled: ")
    assert (eager_pipeline.session.graph_status, getattr(eager_pipeline.model, "encoder_graphs", 0)) == (
        "eager: compiled steps are disabled",
        None,
    )


@pytest.mark.parametrize("encoding", ["float32", "bfloat16"])
def test_prompts_with_images_equal_eager_prompts_and_are_compiled_if_supported(
    checkpoint: tuple[str, Path], encoding: str
) -> None:
    name, folder = checkpoint
    compiled_pipeline, eager_pipeline = (
        open_vision(folder, encoding, compiled=is_compiled) for is_compiled in (True, False)
    )
    statuses = []
    for seed in range(4):
        results = []
        for pipeline in (compiled_pipeline, eager_pipeline):
            context = make_context(name, [with_random_pixels(image, seed) for image in make_images(name)])
            results.append(torch.cat(forward_logits(pipeline, [context])))
            pipeline.release(context)
        assert torch.equal(*results), f"round {seed}"
        statuses.append(compiled_pipeline.session.graph_status)
    assert statuses[-1].startswith("eager: " if name in EAGER_FAMILIES else "compiled: ")


def test_a_step_runs_once_before_it_is_captured(checkpoint: tuple[str, Path]) -> None:
    name, folder = checkpoint
    pipeline = open_vision(folder, "float32", compiled=True)
    image = make_images(name)[1]
    model: Any = pipeline.model
    counts = []
    for number in range(3):
        encode_images(pipeline, [with_random_pixels(image, number)])
        counts.append(model.encoder_graphs.num_graphs)
    assert counts == [0, 1, 1]


def grid_images(grids: list[tuple[int, int]]) -> list[ImageMetadata]:
    """Return images of these grids for Qwen2.5-VL."""
    config = find_architecture("qwen2_5_vl").tiny_config()
    return list(PROMPTS["qwen2_5_vl"](config, [[5]] * (len(grids) + 1), grids).images)


def test_the_number_of_graphs_is_bounded(tmp_path: Path) -> None:
    pipeline = open_vision(write_vision_checkpoint("qwen2_5_vl", tmp_path), "float32", compiled=True)
    eager_pipeline = open_vision(tmp_path, "float32", compiled=False)
    model: Any = pipeline.model
    images = grid_images([(2, 2 * columns) for columns in range(1, MAX_ENCODER_GRAPHS + 4)])
    for _ in range(2):
        for image in images:
            encode_images(pipeline, [image])
    assert model.encoder_graphs.num_graphs == MAX_ENCODER_GRAPHS
    row_size = model.encoder_row_size(model.pipeline_config, model.huggingface_config)
    assert 0 < model.encoder_graphs.num_bytes <= model.max_encoder_rows * row_size
    for image in [images[0], *images]:  # The graph of the first image has been dropped.
        assert torch.equal(encode_images(pipeline, [image]), encode_images(eager_pipeline, [image]))


def test_an_image_with_too_many_rows_runs_without_a_graph(tmp_path: Path) -> None:
    pipeline = open_vision(write_vision_checkpoint("qwen2_5_vl", tmp_path), "float32", compiled=True)
    model: Any = pipeline.model
    small_image, large_image = grid_images([(2, 4), (2, model.max_encoder_rows // 2 + 2)])
    for image in (large_image, large_image, small_image, small_image, large_image):
        encode_images(pipeline, [image])
    assert model.encoder_graphs.num_graphs == 1


def test_graphs_are_dropped_when_the_operations_change(tmp_path: Path) -> None:
    """Replacing the operations of a session keeps its weights and drops its graphs."""
    pipeline = open_vision(write_vision_checkpoint("gemma3", tmp_path), "float32", compiled=True)
    model: Any = pipeline.model
    image = make_images("gemma3")[0]
    for _ in range(2):
        expected = encode_images(pipeline, [image])
    graphs_before = model.encoder_graphs
    vars(pipeline.session)["ops"] = next(ops for ops in cpu.variants() if ops.isa == pipeline.session.ops.isa)
    assert torch.equal(encode_images(pipeline, [image]), expected)
    assert model.encoder_graphs is not graphs_before


def test_requests_with_images_use_graphs_and_give_the_eager_tokens(tmp_path: Path) -> None:
    config = find_architecture("smolvlm").tiny_config()
    pipeline = open_vision(write_vision_checkpoint("smolvlm", tmp_path), "float32", compiled=True)
    eager_pipeline = open_vision(tmp_path, "float32", compiled=False)
    prompt = PROMPTS["smolvlm"](config)
    for seed in range(3):
        images = [with_random_pixels(template_image, seed) for template_image in prompt.images]
        contexts = [dataclass_replace(prompt, images=images).context(6) for _ in range(2)]
        outputs = []
        for runner, context in zip((pipeline, eager_pipeline), contexts, strict=True):
            tokens: list[int] = []
            while not context.is_done:
                tokens += [int(token.next_token) for token in runner.execute({"a": context}, 1)["a"].tokens]
            runner.release(context)
            outputs.append(tokens)
        assert outputs[0] == outputs[1]
        assert len(outputs[0]) == 6
    model: Any = pipeline.model
    assert model.encoder_graphs.num_graphs


def test_several_steps_after_an_image_give_the_tokens_of_single_eager_steps(tmp_path: Path) -> None:
    """In a call of several steps, only the first step reads the embedding of the image's last token."""
    folder = write_vision_checkpoint("llava", tmp_path)

    def generate(seed: int, pipeline: TextGenerationPipeline, num_steps: int) -> list[int]:
        context = image_context([1, *[129] * 16], [random_pixels(seed)], 129, max_new_tokens=8)
        context.set_token_indices(active_idx=16)
        while not context.is_done:
            pipeline.execute({"a": context}, num_steps)
        pipeline.release(context)
        return [int(token) for token in context.generated_tokens]

    compiled_pipeline, eager_pipeline = (
        open_vision(folder, "float32", compiled=is_compiled) for is_compiled in (True, False)
    )
    for seed in range(3):  # The step of the third image is replayed from a graph.
        assert generate(seed, compiled_pipeline, 4) == generate(seed, eager_pipeline, 1)
