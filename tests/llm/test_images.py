"""`LLM` with images: texts equal transformers, and do not depend on chunks, caches or preemption."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from support.checkpoints import load_in_transformers
from support.vision_checkpoint import encode_image_file, image_chat, random_picture, write_llava

from penstock import LLM
from penstock.errors import CheckpointError, InputError, PromptTooLongError, UnsupportedFeatureError
from penstock.media.processor import LocalProcessor
from penstock.pipelines.core import SamplingParams

GREEDY = SamplingParams(max_new_tokens=12, top_k=1, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llava(tmp_path_factory.mktemp("llava"))


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with open_llm(folder) as llm_:
        yield llm_


def open_llm(folder: Path, **config: Any) -> LLM:
    settings = {"quantization_encoding": "float32", "kv_cache_block_size": 16, "max_batch_size": 8}
    return LLM(folder, **settings | config)


def generate_tokens(llm: LLM, prompt: str, *images: Any) -> list[int]:
    return llm.generate(prompt, GREEDY, use_tqdm=False, images=list(images) or None)[0].token_ids


def count_encodings(llm: LLM) -> tuple[int, int]:
    """Return the numbers of encoded images and of hits in the encoder cache."""
    cache = llm.pipeline.runner.images.cache
    return cache.num_encoded, cache.num_hits


def test_text_about_images_equals_transformers(llm: LLM, folder: Path) -> None:
    from transformers import AutoImageProcessor

    images = [random_picture(1, (50, 31)), random_picture(2)]
    output = llm.chat(image_chat("What?", images), GREEDY, use_tqdm=False)[0]
    processor = AutoImageProcessor.from_pretrained(folder, backend="pil")
    pixels = torch.from_numpy(processor(images, return_tensors="np")["pixel_values"])
    ids = torch.tensor([output.prompt_token_ids])
    text = load_in_transformers(folder).generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        pixel_values=pixels,
        max_new_tokens=12,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    assert output.token_ids == text[0, ids.shape[1] :].tolist()
    assert output.prompt_token_ids.count(129) == 32


def test_all_forms_of_an_image_give_the_same_text(llm: LLM, tmp_path: Path) -> None:
    image = random_picture(3)
    path = tmp_path / "picture.png"
    image.save(path)
    expected = generate_tokens(llm, "See <image>!", image)
    for image_form in (np.asarray(image), path, str(path), path.read_bytes()):
        assert generate_tokens(llm, "See <image>!", image_form) == expected
    url = "data:image/png;base64," + b64encode(path.read_bytes()).decode()
    image_part = {"type": "image_url", "image_url": {"url": url}}
    text_part = {"type": "text", "text": "What?"}
    chat = llm.chat([{"role": "user", "content": [image_part, text_part]}], GREEDY, use_tqdm=False)
    repeated_outputs = llm.chat(image_chat("What?", [path]), GREEDY, use_tqdm=False)
    assert chat[0].token_ids == repeated_outputs[0].token_ids
    stream = llm.stream("See <image>!", GREEDY, images=image)
    "".join(stream)
    assert stream.output.token_ids == expected


def test_a_batch_equals_single_requests(llm: LLM) -> None:
    prompts = ["A <image> b", "No image", "<image><image>", "A <image> b"]
    images = [[random_picture(4)], None, [random_picture(5), random_picture(4)], [random_picture(6)]]
    single_outputs = [
        generate_tokens(llm, prompt, *(prompt_images or ()))
        for prompt, prompt_images in zip(prompts, images, strict=True)
    ]
    batch_outputs = llm.generate(prompts, GREEDY, use_tqdm=False, images=images)
    assert [output.token_ids for output in batch_outputs] == single_outputs
    assert single_outputs[0] != single_outputs[3]


def test_an_image_is_encoded_only_once(folder: Path) -> None:
    with open_llm(folder) as llm:
        expected = generate_tokens(llm, "Long enough text before <image> after", random_picture(7))
        assert count_encodings(llm) == (1, 0)
        assert generate_tokens(llm, "Long enough text before <image> after", random_picture(7)) == expected
        assert count_encodings(llm)[0] == 1
        # The prefix cache holds the whole image, so the encoder cache is not read.
        generate_tokens(llm, "<image>" + "a" * 32, random_picture(8))
        counts_before = count_encodings(llm)
        generate_tokens(llm, "<image>" + "a" * 32, random_picture(8))
        assert count_encodings(llm) == counts_before
        # Other text precedes the image, so the rows of the image come from the encoder cache.
        generate_tokens(llm, "Other <image>", random_picture(8))
        assert count_encodings(llm) == (counts_before[0], counts_before[1] + 1)
        # Both images of the batch are new and equal, so the encoder runs once.
        llm.generate(
            ["<image>a", "b<image>"], GREEDY, use_tqdm=False, images=[random_picture(9), random_picture(9)]
        )
        assert count_encodings(llm)[0] == counts_before[0] + 1


def test_prompts_with_different_images_do_not_share_cached_prefixes(llm: LLM) -> None:
    prompt = "<image>" + "the same text after it " * 2
    outputs = [generate_tokens(llm, prompt, random_picture(seed)) for seed in (10, 11, 10)]
    assert outputs[0] == outputs[2]
    assert outputs[0] != outputs[1]


@pytest.mark.parametrize(
    "config",
    [
        {"max_batch_input_tokens": 9},
        {"enable_prefix_caching": False, "encoder_cache_memory": 1},
        {"kv_cache_memory": 17 * 16 * 3 * 2 * 2 * 8 * 4, "max_batch_size": 4, "max_length": 160},
    ],
    ids=["chunks", "no caches", "preemption"],
)
def test_texts_do_not_depend_on_chunks_caches_or_preemption(
    llm: LLM, folder: Path, config: dict[str, Any]
) -> None:
    prompts = [f"{index} <image> x <image> y" for index in range(4)]
    images = [[random_picture(20 + index), random_picture(21 + index)] for index in range(4)]
    params = SamplingParams(max_new_tokens=40, top_k=1, ignore_eos=True)
    expected = llm.generate(prompts, params, use_tqdm=False, images=images)
    with open_llm(folder, **config) as limited_llm:
        actual = limited_llm.generate(prompts, params, use_tqdm=False, images=images)
        if "kv_cache_memory" in config:
            assert limited_llm._scheduler.num_preemptions > 0
        if "encoder_cache_memory" in config:
            assert count_encodings(limited_llm)[1] == 0
    assert [output.token_ids for output in actual] == [reference.token_ids for reference in expected]


def test_invalid_images_are_refused(llm: LLM, tmp_path: Path) -> None:
    valid_image = random_picture(1)
    with pytest.raises(InputError, match="the prompt has 0 placeholders '<image>', but the request has 1"):
        generate_tokens(llm, "Hi", valid_image)
    with pytest.raises(InputError, match=r"the prompt has 2 placeholders .* has 1 images"):
        generate_tokens(llm, "<image><image>", valid_image)
    with pytest.raises(InputError, match="the data is not an image in one of the formats PNG"):
        generate_tokens(llm, "<image>", b"no image")
    with pytest.raises(InputError, match="cannot be read"):
        generate_tokens(llm, "<image>", tmp_path / "missing.png")
    with pytest.raises(InputError, match="must be uint8 of shape"):
        generate_tokens(llm, "<image>", np.zeros((4, 4, 3)))
    with pytest.raises(InputError, match="was dict"):
        generate_tokens(llm, "<image>", {})
    with pytest.raises(UnsupportedFeatureError, match="images with token ids"):
        llm.generate([1, 2], GREEDY, use_tqdm=False, images=valid_image)
    detailed_parts = [{"type": "image", "image": valid_image, "detail": "high"}]
    with pytest.raises(UnsupportedFeatureError, match="detail 'high' is not supported: this model supports"):
        llm.chat([{"role": "user", "content": detailed_parts}], GREEDY, use_tqdm=False)
    with pytest.raises(InputError, match="images has 1 entries for 2 prompts"):
        llm.generate(["a", "b"], GREEDY, use_tqdm=False, images=[valid_image])
    with pytest.raises(InputError, match="the request has 33 images, but the limit is 32"):
        generate_tokens(llm, "<image>" * 33, *[valid_image] * 33)
    with pytest.raises(PromptTooLongError, match=r"257.*256|272.*256"):
        generate_tokens(llm, "<image>" * 17, *[valid_image] * 17)


def test_placeholders_in_user_text_are_not_images(llm: LLM) -> None:
    output = llm.chat(image_chat("Look: <image>", [random_picture(1)]), GREEDY, use_tqdm=False)[0]
    assert output.prompt_token_ids.count(129) == 16


def test_a_text_model_refuses_images() -> None:
    with (
        LLM("demo", quantization_encoding="float32") as demo,
        pytest.raises(UnsupportedFeatureError, match="images is not supported: this model reads text only"),
    ):
        demo.generate("<image>", GREEDY, use_tqdm=False, images=encode_image_file(Image.new("RGB", (4, 4))))


def test_a_checkpoint_without_an_image_processor_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="has no image processor that can be loaded"):
        LocalProcessor(tmp_path).process(encode_image_file(random_picture()), {}, 10_000)
