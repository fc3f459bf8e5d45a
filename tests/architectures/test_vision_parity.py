"""Every vision model except llava (see test_llava.py) gives the results of transformers."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from dataclasses import replace as dataclass_replace
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from support.networks import weight_bytes
from support.pipeline_steps import append_token, generate_tokens, make_context, open_pipeline, random_tokens
from support.vision import PROMPTS, VisionPrompt, chunk_logits, forward_logits, save_vision_model

from penstock.architectures.registry import PIPELINE_REGISTRY, SupportedArchitecture
from penstock.kv_cache import restart
from penstock.pipelines import TextGenerationPipeline
from penstock.pipelines.core import image_digest

pytestmark = pytest.mark.models

FAMILIES = [candidate for candidate in PIPELINE_REGISTRY.architectures if candidate.name in PROMPTS]


@dataclass(frozen=True)
class Family:
    """A checkpoint on disk and in transformers, with its prompt and the expected results."""

    model: Any
    folder: Path
    config: dict[str, Any]
    prompt: VisionPrompt
    logits: torch.Tensor  # [T, V]
    greedy_tokens: list[int]


def build_family(architecture: SupportedArchitecture, folder: Path, **changes: Any) -> Family:
    model = save_vision_model(architecture, folder, **changes)
    assert architecture.tiny_config is not None
    config = architecture.tiny_config()
    for name, change in changes.items():
        config[name] = config[name] | change if isinstance(change, dict) else change
    prompt = PROMPTS[architecture.name](config)
    return Family(model, folder, config, prompt, prompt.logits(model), prompt.greedy(model, 20))


@pytest.fixture(scope="module", params=FAMILIES, ids=lambda architecture: architecture.name)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Family:
    return build_family(request.param, tmp_path_factory.mktemp(request.param.name))


@pytest.fixture(scope="module")
def pipeline(family: Family) -> TextGenerationPipeline:
    return open_pipeline(family.folder, kv_cache_block_size=16)


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, atol=1e-4 * max(1.0, float(expected.std())), rtol=0)


def test_every_registered_family_is_tested() -> None:
    vision_families = {
        candidate.name for candidate in PIPELINE_REGISTRY.architectures if candidate.media is not None
    }
    assert vision_families == {*PROMPTS, "llava"}, "llava is tested in test_llava.py"


def test_logits_of_a_prompt_equal_transformers(family: Family, pipeline: TextGenerationPipeline) -> None:
    context = family.prompt.context()
    assert_close(forward_logits(pipeline, [context]), family.logits)
    pipeline.release(context)


def test_logits_of_the_reference_kernels_equal_transformers(family: Family) -> None:
    pipeline = open_pipeline(family.folder, kernels="reference")
    assert_close(forward_logits(pipeline, [family.prompt.context()]), family.logits)


def test_logits_in_chunks_equal_transformers(family: Family, pipeline: TextGenerationPipeline) -> None:
    """Chunks end in text and at both ends of an image.

    With causal attention they also end within an image.
    """
    prompt = family.prompt
    first_image, second_image = prompt.images
    ends = {
        2,
        first_image.start_idx,
        first_image.end_idx,
        first_image.end_idx + 1,
        second_image.end_idx,
        len(prompt.tokens),
    }
    if not prompt.is_bidirectional:
        ends |= {first_image.start_idx + 1, second_image.start_idx + 1, second_image.end_idx - 1}
    context = prompt.context(log_probabilities_echo=True)
    assert_close(chunk_logits(pipeline, context, sorted(ends)), family.logits)
    pipeline.release(context)


def test_decode_steps_after_images_equal_transformers(
    family: Family, pipeline: TextGenerationPipeline
) -> None:
    decoded_tokens = random_tokens(8, 120, seed=1)
    expected = family.prompt.logits(family.model, decoded_tokens)
    context = family.prompt.context()
    forward_logits(pipeline, [context])
    for index, token in enumerate(decoded_tokens):
        append_token(pipeline, context, token)
        row = len(family.prompt.tokens) + index
        assert_close(forward_logits(pipeline, [context]), expected[row : row + 1])
    pipeline.release(context)


@pytest.mark.parametrize("num_steps", [1, 7])
def test_greedy_tokens_equal_transformers(
    family: Family, pipeline: TextGenerationPipeline, num_steps: int
) -> None:
    text_tokens = random_tokens(30, 120, seed=2)
    single_context = make_context(text_tokens, 20)
    [expected] = generate_tokens(pipeline, [single_context])
    contexts = [family.prompt.context(20), make_context(text_tokens, 20), family.prompt.context(20)]
    assert generate_tokens(pipeline, contexts, num_steps) == [
        family.greedy_tokens,
        expected,
        family.greedy_tokens,
    ]


def test_a_prompt_without_images_equals_transformers(
    family: Family, pipeline: TextGenerationPipeline
) -> None:
    tokens = random_tokens(30, 120, seed=3)
    with torch.inference_mode():
        expected = family.model(input_ids=torch.tensor([tokens])).logits[0].float()
    context: Any = make_context(tokens)
    assert_close(forward_logits(pipeline, [context]), expected)
    pipeline.release(context)


def test_an_equal_prefix_with_images_is_reused(family: Family, pipeline: TextGenerationPipeline) -> None:
    """Equal images share cache blocks and encoder outputs. An image with one changed pixel is not shared."""
    assert pipeline.runner.images is not None
    prompt = family.prompt
    [expected] = generate_tokens(pipeline, [prompt.context(20)])
    same_context = prompt.context(20)
    pipeline.kv.claim(same_context)
    assert same_context.start_idx >= 16
    num_encoded = pipeline.runner.images.cache.num_encoded
    assert generate_tokens(pipeline, [same_context]) == [expected]
    assert pipeline.runner.images.cache.num_encoded == num_encoded
    last_image = prompt.images[1]
    pixels = last_image.pixel_values.copy()
    pixels.reshape(-1)[0] += 1
    changed_image = replace(
        last_image, pixel_values=pixels, image_hash=image_digest(pixels, last_image.arguments)
    )
    changed_context = dataclass_replace(prompt, images=[prompt.images[0], changed_image]).context(20)
    pipeline.kv.claim(changed_context)
    assert changed_context.start_idx <= last_image.start_idx
    pipeline.release(changed_context)


def test_a_preempted_context_continues_with_the_tokens_of_transformers(
    family: Family, pipeline: TextGenerationPipeline
) -> None:
    """The context loses its blocks after at least 8 generated tokens, and all its tokens are recomputed."""
    context = family.prompt.context(20)
    tokens: list[int] = []
    while len(tokens) < 8:
        tokens += [int(token.next_token) for token in pipeline.execute({"a": context})["a"].tokens]
    restart(pipeline.kv, context)
    while not context.is_done:
        tokens += [int(token.next_token) for token in pipeline.execute({"a": context})["a"].tokens]
    pipeline.release(context)
    assert tokens == family.greedy_tokens


def test_logits_after_a_final_image_equal_transformers_and_several_steps_give_equal_tokens(
    family: Family, pipeline: TextGenerationPipeline
) -> None:
    full_prompt = PROMPTS[family.model.config.model_type](family.config, ([5, 6, 7], []))
    prompt = dataclass_replace(full_prompt, tokens=full_prompt.tokens[: full_prompt.images[0].end_idx])
    decoded_tokens = random_tokens(5, 120, seed=4)
    expected = prompt.logits(family.model, decoded_tokens)
    context = prompt.context(log_probabilities_echo=True)  # no row is read from the prefix cache
    assert_close(forward_logits(pipeline, [context]), expected[: len(prompt.tokens)])
    for index, token in enumerate(decoded_tokens):
        append_token(pipeline, context, token)
        row = len(prompt.tokens) + index
        assert_close(forward_logits(pipeline, [context]), expected[row : row + 1])
    pipeline.release(context)
    single_step_tokens = generate_tokens(pipeline, [prompt.context(10)], 1)
    assert generate_tokens(pipeline, [prompt.context(10)], 5) == single_step_tokens


@pytest.mark.parametrize(("encoding", "max_error"), [("bfloat16", None), ("int8", 0.2)])
def test_logits_in_bfloat16_and_int8_are_close_to_transformers(
    family: Family, encoding: str, max_error: float | None
) -> None:
    pipeline = open_pipeline(family.folder, quantization_encoding=encoding)
    logits = forward_logits(pipeline, [family.prompt.context()])
    error = float((logits - family.logits).std() / family.logits.std())
    if max_error is None:  # a multiple of the error of transformers in bfloat16
        reference_logits = family.prompt.logits(copy.deepcopy(family.model).to(torch.bfloat16))
        factor = 2 if family.config["model_type"] == "gemma4" else 1.5
        max_error = factor * float((reference_logits - family.logits).std() / family.logits.std())
    elif family.config["model_type"] in ("gemma4", "qwen3_5_moe"):
        max_error *= 1.5  # a rounding error can route a row to another expert
    assert error < max_error


def test_the_memory_estimate_covers_the_weights(family: Family, pipeline: TextGenerationPipeline) -> None:
    plan = pipeline.memory_plan
    if pipeline.session.memory is not None:
        pytest.skip("the plan measures the weights on this device")
    assert weight_bytes(pipeline) <= plan.weights_size <= 1.3 * weight_bytes(pipeline)


VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("idefics3", {"scale_factor": 4, "vision_config": {"image_size": 64, "num_attention_heads": 4}}),
    ("smolvlm", {"text_config": {"tie_word_embeddings": True}, "tie_word_embeddings": True}),
    ("gemma3", {"mm_tokens_per_image": 16, "text_config": {"sliding_window": 5}}),
    ("gemma3", {"mm_tokens_per_image": 1, "vision_config": {"vision_use_head": True, "hidden_act": "gelu"}}),
    (
        "gemma4",
        {
            "text_config": {
                "use_bidirectional_attention": None,
                "pad_token_id": 5,
                "num_kv_shared_layers": 0,
            },
            "vision_config": {"standardize": False, "use_clipped_linears": False, "head_dim": 24},
        },
    ),
    (
        "gemma4",
        {
            "text_config": {
                "sliding_window": 5,
                "hidden_size_per_layer_input": 0,
                "num_kv_shared_layers": 0,
                "use_double_wide_mlp": False,
            },
            "vision_config": {"rope_parameters": {"rope_type": "axial", "rope_theta": 50.0}},
        },
    ),
    ("gemma4", {"text_config": {"sliding_window": 256}}),  # no cache group has a window
    ("qwen2_5_vl", {"vision_config": {"window_size": 1000, "fullatt_block_indexes": [0, 2]}}),
    (
        "qwen2_5_vl",
        {
            "tie_word_embeddings": True,
            "vision_config": {"patch_size": 2, "spatial_merge_size": 2, "window_size": 8, "depth": 2},
            "text_config": {
                "num_key_value_heads": 3,
                "rope_parameters": {
                    "rope_type": "yarn",
                    "factor": 2.0,
                    "rope_theta": 99.0,
                    "mrope_section": [4, 2, 2],
                },
            },
        },
    ),
    ("qwen3_vl", {"vision_config": {"deepstack_visual_indexes": [2, 0, 1], "num_position_embeddings": 4}}),
    (
        "qwen3_vl",
        {
            "tie_word_embeddings": True,
            "vision_config": {"deepstack_visual_indexes": [], "patch_size": 6},
            "text_config": {"attention_bias": True, "head_dim": 40, "num_key_value_heads": 3},
        },
    ),
]


@pytest.mark.parametrize(
    ("name", "changes"), VARIANTS, ids=lambda value: value if isinstance(value, str) else ""
)
def test_variants_of_the_configuration_equal_transformers(
    name: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    (architecture,) = (candidate for candidate in FAMILIES if candidate.name == name)
    family = build_family(architecture, tmp_path, **changes)
    pipeline = open_pipeline(tmp_path, kv_cache_block_size=16)
    assert_close(forward_logits(pipeline, [family.prompt.context()]), family.logits)
    assert generate_tokens(pipeline, [family.prompt.context(20)], 4) == [family.greedy_tokens]
