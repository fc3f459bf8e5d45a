"""`LLM.chat` with two images for six vision families: the output equals that of transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.vision import save_vision_model
from support.vision_checkpoint import image_chat, random_picture
from tokenizers import Tokenizer, models, pre_tokenizers

from penstock import LLM
from penstock.architectures.registry import PIPELINE_REGISTRY
from penstock.pipelines.core import SamplingParams

GREEDY = SamplingParams(max_new_tokens=10, top_k=1, ignore_eos=True)
LONG_CONTEXT = {"text_config": {"max_position_embeddings": 2048}}
TILES: dict[str, Any] = {"size": {"longest_edge": 64}, "max_image_size": {"longest_edge": 32}}
QWEN = {"patch_size": 4, "merge_size": 2, "temporal_patch_size": 2, "min_pixels": 64, "max_pixels": 1024}
FAMILIES: dict[str, tuple[str, dict[str, Any], dict[int, str], str]] = {
    "idefics3": ("Idefics3ImageProcessor", TILES, {129: "<image>"}, "<image>"),
    "smolvlm": ("SmolVLMImageProcessor", TILES, {129: "<image>"}, "<image>"),
    "gemma3": (
        "Gemma3ImageProcessor",
        {"size": {"height": 32, "width": 32}},
        {129: "<soft>", 128: "<boi>", 127: "<eoi>"},
        "<boi>",
    ),
    "qwen2_5_vl": (
        "Qwen2VLImageProcessor",
        QWEN,
        {129: "<|image_pad|>", 127: "<|vision_start|>", 126: "<|vision_end|>"},
        "<|vision_start|><|image_pad|><|vision_end|>",
    ),
    "qwen3_5": (
        "Qwen2VLImageProcessor",
        QWEN,
        {129: "<|image_pad|>", 127: "<|vision_start|>", 126: "<|vision_end|>"},
        "<|vision_start|><|image_pad|><|vision_end|>",
    ),
    "qwen3_vl": (
        "Qwen2VLImageProcessor",
        QWEN,
        {129: "<|image_pad|>", 127: "<|vision_start|>", 126: "<|vision_end|>"},
        "<|vision_start|><|image_pad|><|vision_end|>",
    ),
}
"""Family -> (image processor, its settings, special tokens by id, text of an image in the chat template)."""


def write_family(folder: Path, name: str) -> Any:
    """Write a checkpoint whose tokens are characters and special tokens. Return its transformers model."""
    (architecture,) = (candidate for candidate in PIPELINE_REGISTRY.architectures if candidate.name == name)
    changes = LONG_CONTEXT | ({"mm_tokens_per_image": 16} if name == "gemma3" else {})
    model = save_vision_model(architecture, folder, **changes)
    processor, settings, special_tokens, image_text = FAMILIES[name]
    vocabulary = {chr(code): code for code in range(126)} | {
        text: index for index, text in special_tokens.items()
    }
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.add_special_tokens(list(special_tokens.values()))
    tokenizer.save(str(folder / "tokenizer.json"))
    template = (
        "{% for m in messages %}{% for part in m.content %}{% if part.type == 'image' %}"
        + image_text
        + "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endfor %}."
    )
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    values = {"image_processor_type": processor, "do_convert_rgb": True, **settings}
    (folder / "preprocessor_config.json").write_text(json.dumps(values))
    return model


@pytest.mark.parametrize("name", FAMILIES)
def test_text_about_two_images_equals_transformers_with_and_without_chunked_prefill(
    name: str, tmp_path: Path
) -> None:
    from transformers import AutoImageProcessor

    model = write_family(tmp_path, name)
    images = [random_picture(1, (50, 31)), random_picture(2, (20, 60))]
    with LLM(tmp_path, quantization_encoding="float32", max_batch_size=2) as llm:
        output = llm.chat(image_chat("What?", images), GREEDY, use_tqdm=False)[0]
    processor = AutoImageProcessor.from_pretrained(tmp_path, backend="pil")
    processor_images = [images] if name in ("idefics3", "smolvlm") else images
    arguments = dict(processor(processor_images, return_tensors="pt"))
    ids = torch.tensor([output.prompt_token_ids])
    for key in ("rows", "cols", "num_crops"):
        arguments.pop(key, None)
    if name.startswith("qwen"):
        arguments["mm_token_type_ids"] = (ids == 129).long()
    if name == "gemma3":
        arguments["token_type_ids"] = (ids == 129).long()
    text = model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=10,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        **arguments,
    )
    assert output.token_ids == text[0, ids.shape[1] :].tolist()
    settings = {"max_batch_input_tokens": 8, "max_batch_size": 2, "kv_cache_block_size": 16}
    # Prompts are computed in chunks of at most 8 tokens.
    with LLM(tmp_path, quantization_encoding="float32", **settings) as llm:
        first_output, second_output = llm.chat([image_chat("What?", images)] * 2, GREEDY, use_tqdm=False)
    assert first_output.token_ids == second_output.token_ids == output.token_ids
