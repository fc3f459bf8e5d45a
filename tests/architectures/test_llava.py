"""LLaVA with several vision encoders, projectors and decoders gives the results of transformers."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.checkpoints import VISION_DECODERS, load_in_transformers, write_checkpoint
from support.images import forward_logits, image_context, random_pixels
from support.pipeline_steps import generate_tokens, open_pipeline, random_tokens

from penstock.errors import CheckpointError, ConfigError
from penstock.pipelines import TextGenerationPipeline
from penstock.pipelines.core import TextAndVisionContext

pytestmark = pytest.mark.models

(LLAVA,) = (candidate for candidate in VISION_DECODERS if candidate.name == "llava")
IMAGE_TOKEN = 129
SIGLIP = {
    "model_type": "siglip_vision_model",
    "hidden_size": 36,
    "intermediate_size": 60,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "image_size": 28,
    "patch_size": 7,
}
MISTRAL = {
    "model_type": "mistral",
    "hidden_size": 48,
    "intermediate_size": 72,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 130,
    "max_position_embeddings": 256,
    "sliding_window": 24,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "clip_llama": {},
    "clip_mistral": {"text_config": MISTRAL, "vision_feature_layer": -1},
    "siglip_llama": {"vision_config": SIGLIP, "vision_feature_select_strategy": "full"},
    "several_layers": {"vision_feature_layer": [1, -2], "multimodal_projector_bias": False},
}


def make_config(variant: str) -> dict[str, Any]:
    assert LLAVA.tiny_config is not None
    return LLAVA.tiny_config() | VARIANTS[variant]


def make_prompt(num_images: int, rows: int = 16) -> list[int]:
    """Return a prompt with text before, between and after images."""
    tokens = random_tokens(9, 129, seed=1)
    for index in range(num_images):
        tokens += [IMAGE_TOKEN] * rows + random_tokens(3 + index, 129, seed=2 + index)
    return tokens


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    result: dict[str, Path] = {}

    def get_checkpoint(variant: str) -> Path:
        if variant not in result:
            result[variant] = write_checkpoint(tmp_path_factory.mktemp(variant), make_config(variant))
        return result[variant]

    return get_checkpoint


@pytest.fixture(scope="module")
def pipeline(checkpoints: Callable[[str], Path]) -> TextGenerationPipeline:
    return open_pipeline(checkpoints("clip_llama"), kv_cache_block_size=16)


def expected_logits(model: Any, context: TextAndVisionContext) -> torch.Tensor:  # [T, V]
    tokens = torch.from_numpy(context.all_tokens[None])
    pixels = torch.from_numpy(np.stack(context.pixel_values)).to(model.dtype)
    with torch.inference_mode():
        return model(input_ids=tokens, pixel_values=pixels).logits[0].float()


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, atol=1e-4 * max(1.0, float(expected.std())), rtol=0)


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_and_greedy_tokens_equal_transformers(
    variant: str, checkpoints: Callable[[str], Path]
) -> None:
    reference, pipeline = load_in_transformers(checkpoints(variant)), open_pipeline(checkpoints(variant))
    pixels = [random_pixels(1), random_pixels(2)]
    tokens = make_prompt(2)
    expected = expected_logits(reference, image_context(tokens, pixels, IMAGE_TOKEN))
    context = image_context(tokens, pixels, IMAGE_TOKEN)
    assert_close(forward_logits(pipeline, [context])[0], expected)
    pipeline.release(context)
    ids = torch.tensor([tokens])
    reference_ids = reference.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        pixel_values=torch.from_numpy(np.stack(pixels)),
        max_new_tokens=20,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    assert (
        generate_tokens(pipeline, [image_context(tokens, pixels, IMAGE_TOKEN)])[0]
        == reference_ids[0, len(tokens) :].tolist()
    )


def test_other_pixels_change_the_logits_from_the_image_on(
    pipeline: TextGenerationPipeline, checkpoints: Callable[[str], Path]
) -> None:
    tokens = make_prompt(1)
    first_logits = forward_logits(
        pipeline, [first_context := image_context(tokens, [random_pixels(1)], IMAGE_TOKEN)]
    )[0]
    second_logits = forward_logits(
        pipeline, [second_context := image_context(tokens, [random_pixels(2)], IMAGE_TOKEN)]
    )[0]
    assert (first_logits[:9] - second_logits[:9]).abs().max() < 1e-5
    assert (first_logits[9:] - second_logits[9:]).abs().max() > 0.1
    for context in (first_context, second_context):
        pipeline.release(context)


def test_tensor_names_of_other_versions_are_read(checkpoints: Callable[[str], Path], tmp_path: Path) -> None:
    """Reads the names of LLaVA 1.5 on the Hub, and the names that transformers 4.52 to 4.57 saved."""
    folder = checkpoints("clip_llama")
    expected = forward_logits(
        open_pipeline(folder), [image_context(make_prompt(1), [random_pixels(1)], IMAGE_TOKEN)]
    )
    tensors = load_file(folder / "model.safetensors")
    for number, convert_name in enumerate((_hub_name, _nested_name)):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "config.json").write_text((folder / "config.json").read_text())
        renamed_tensors = {convert_name(name): tensor for name, tensor in tensors.items()}
        save_file(renamed_tensors, tmp_path / str(number) / "model.safetensors")
        context = image_context(make_prompt(1), [random_pixels(1)], IMAGE_TOKEN)
        logits = forward_logits(open_pipeline(tmp_path / str(number)), [context])
        assert torch.equal(logits[0], expected[0])


def _hub_name(name: str) -> str:
    return name.replace("vision_tower.", "vision_tower.vision_model.", 1)


def _nested_name(name: str) -> str:
    if name.startswith("language_model.lm_head"):
        return name.removeprefix("language_model.")
    return "model." + _hub_name(name).replace("language_model.model.", "language_model.", 1)


def test_the_bfloat16_error_is_at_most_a_tenth_larger_than_in_transformers(
    checkpoints: Callable[[str], Path],
) -> None:
    reference = load_in_transformers(checkpoints("clip_llama"))
    context = image_context(make_prompt(2), [random_pixels(1), random_pixels(2)], IMAGE_TOKEN)
    expected = expected_logits(reference, context)
    reference_logits = expected_logits(reference.to(torch.bfloat16), context)
    pipeline = open_pipeline(checkpoints("clip_llama"), quantization_encoding="bfloat16")
    error = (forward_logits(pipeline, [context])[0] - expected).norm()
    assert 0 < error <= 1.1 * (reference_logits - expected).norm()


def test_int8_encoder_and_decoder_are_close_to_float32(
    checkpoints: Callable[[str], Path], pipeline: TextGenerationPipeline
) -> None:
    int8_pipeline: Any = open_pipeline(checkpoints("clip_llama"), quantization_encoding="int8")
    tower = int8_pipeline.model.network.encoder.tower
    assert {block.mlp.up.packed.encoding for block in tower.blocks} == {"int8"}
    contexts = [image_context(make_prompt(1), [random_pixels(1)], IMAGE_TOKEN) for _ in range(2)]
    exact_logits = forward_logits(pipeline, contexts[:1])[0]
    error = (forward_logits(int8_pipeline, contexts[1:])[0] - exact_logits).norm() / exact_logits.norm()
    pipeline.release(contexts[0])
    assert 0 < float(error) < 0.05


def test_the_memory_plan_counts_the_vision_encoder_and_its_cache(pipeline: TextGenerationPipeline) -> None:
    plan = pipeline.memory_plan
    assert plan.encoder_size >= 4096 * 120 * 4
    assert 0 < plan.encoder_cache_size <= 256 * 2**20
    assert plan.static_size == plan.weights_size + plan.activation_size + (
        plan.encoder_size + plan.encoder_cache_size
    )
    assert any(name == "images" for name, _ in plan.rows())


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"vision_feature_layer": -9}, ConfigError, "-9 is not within the 3 layers of the vision tower"),
        ({"vision_feature_select_strategy": "odd"}, CheckpointError, "must be default or full, was 'odd'"),
        ({"vision_config": SIGLIP | {"model_type": "pixtral"}}, ConfigError, "'pixtral' is not one of"),
        ({"text_config": {"model_type": "gpt2"}}, ConfigError, "'gpt2' cannot be the decoder"),
    ],
)
def test_unsupported_configurations_are_refused(
    change: Mapping[str, Any],
    error: type[Exception],
    message: str,
    checkpoints: Callable[[str], Path],
    tmp_path: Path,
) -> None:
    folder = checkpoints("clip_llama")
    (tmp_path / "model.safetensors").symlink_to(folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text()) | change
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(error, match=message):
        open_pipeline(tmp_path)
