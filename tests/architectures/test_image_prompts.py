"""Image tokens in prompts equal the tokens that the processors of transformers insert."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from PIL import Image

from penstock.architectures.gemma3.media import Gemma3Family
from penstock.architectures.gemma4.media import Gemma4Family
from penstock.architectures.idefics3.media import Idefics3Family
from penstock.architectures.qwen2_5_vl.media import QwenVisionFamily
from penstock.architectures.qwen3_vl.media import Qwen3VisionFamily
from penstock.architectures.smolvlm.media import SmolVLMFamily
from penstock.config import HuggingFaceConfig
from penstock.errors import ConfigError, InputError
from penstock.media.family import ProcessedImage, VisionFamily

SIZES = [(200, 100), (70, 150), (64, 64)]


@pytest.fixture(autouse=True)
def _without_video_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the processors work without a video processor, torchvision and num2words.

    Prompts with images use none of these.
    """
    from transformers import processing_utils
    from transformers.models.smolvlm import processing_smolvlm

    monkeypatch.setattr(
        processing_utils.ProcessorMixin, "check_argument_for_proper_class", lambda *arguments: None
    )
    monkeypatch.setattr(processing_smolvlm, "num2words", str, raising=False)
    monkeypatch.setattr(processing_smolvlm, "is_num2words_available", lambda: True)


def make_tokenizer(special_tokens: Sequence[str], **roles: str) -> Any:
    """Return a tokenizer of bytes with special tokens."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = {byte: index for index, byte in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(alphabet, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        additional_special_tokens=list(special_tokens),
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        **({"extra_special_tokens": roles} if roles else {}),
    )


def prompt_ids(family: VisionFamily, image_processor: Any, tokenizer: Any, template: str) -> list[int]:
    """Return the token ids of a template in which each ``{}`` stands for an image."""
    text = template.replace("{}", family.placeholder)
    for size in SIZES:
        image = Image.fromarray(np.zeros((size[1], size[0], 3), np.uint8))
        outputs = {
            name: np.asarray(value)
            for name, value in image_processor([image], **family.processor_options("auto")).items()
        }
        text = text.replace(family.placeholder, "\0", 1)
        text = text.replace(
            "\0", family.expand(family.to_processed_image(outputs, size)).replace(family.placeholder, "\1")
        )
    ids: list[int] = tokenizer(text.replace("\1", family.placeholder), add_special_tokens=False)["input_ids"]
    return ids


def reference_ids(processor: Any, template: str, placeholder: str) -> list[int]:
    images = [Image.fromarray(np.zeros((height, width, 3), np.uint8)) for width, height in SIZES]
    text = template.replace("{}", placeholder)
    ids: list[int] = processor(text=text, images=[images], return_tensors="np")["input_ids"][0].tolist()
    return ids


@pytest.mark.parametrize("name", ["idefics3", "smolvlm"])
def test_prompts_with_image_tiles_equal_transformers(name: str) -> None:
    from transformers import Idefics3Processor, SmolVLMProcessor
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
    from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

    tile_tokens = [f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)]
    tokenizer = make_tokenizer(
        ["<fake_token_around_image>", "<image>", "<global-img>", "<end_of_utterance>", *tile_tokens]
    )
    sizes = {"size": {"longest_edge": 256}, "max_image_size": {"longest_edge": 64}}
    config = HuggingFaceConfig(
        {
            "image_token_id": tokenizer.convert_tokens_to_ids("<image>"),
            "scale_factor": 2,
            "vision_config": {"patch_size": 8},
        }
    )
    processor: Any
    if name == "idefics3":
        processor = Idefics3Processor(Idefics3ImageProcessorPil(**sizes), tokenizer, image_seq_len=16)
        family: VisionFamily = Idefics3Family(config, {}, tokenizer.convert_ids_to_tokens)
    else:
        processor = SmolVLMProcessor(
            SmolVLMImageProcessorPil(**sizes), tokenizer, video_processor=None, image_seq_len=16
        )
        family = SmolVLMFamily(config, {}, tokenizer.convert_ids_to_tokens)
    prompt_tokens = prompt_ids(family, processor.image_processor, tokenizer, "a {}b{} c\n{}")
    assert prompt_tokens == reference_ids(processor, "a {}b{} c\n{}", "<image>")
    assert family.processor_options("low")["do_image_splitting"] is False
    assert family.processor_options("high")["do_image_splitting"] is True


GEMMA_TOKENS = {
    "boi_token": "<start_of_image>",
    "image_token": "<image_soft_token>",
    "eoi_token": "<end_of_image>",
}


def gemma_config(tokenizer: Any) -> HuggingFaceConfig:
    image_start_id, image_token_id, image_end_id = (
        tokenizer.convert_tokens_to_ids(token) for token in GEMMA_TOKENS.values()
    )
    return HuggingFaceConfig(
        {
            "boi_token_index": image_start_id,
            "image_token_index": image_token_id,
            "eoi_token_index": image_end_id,
            "mm_tokens_per_image": 16,
        }
    )


def test_prompts_of_gemma3_equal_transformers() -> None:
    from transformers import Gemma3Processor
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

    tokenizer = make_tokenizer(list(GEMMA_TOKENS.values()), **GEMMA_TOKENS)
    image_processor = Gemma3ImageProcessorPil(size={"height": 32, "width": 32})
    processor = Gemma3Processor(image_processor, tokenizer, image_seq_length=16)
    family = Gemma3Family(gemma_config(tokenizer), {}, tokenizer.convert_ids_to_tokens)
    prompt_tokens = prompt_ids(family, image_processor, tokenizer, "a {}b{} c\n{}")
    assert prompt_tokens == reference_ids(processor, "a {}b{} c\n{}", "<start_of_image>")


def test_pan_and_scan_of_gemma3_is_refused() -> None:
    with pytest.raises(ConfigError, match="do_pan_and_scan"):
        Gemma3Family(HuggingFaceConfig({}), {"do_pan_and_scan": True}, str)


@pytest.mark.parametrize("detail", ["auto", "low", "high"])
def test_prompts_of_gemma4_equal_transformers(detail: str) -> None:
    from transformers import Gemma4Processor
    from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil

    special_tokens = {
        "boi_token": "<|image>",
        "image_token": "<|image|>",
        "eoi_token": "<image|>",
        "boa_token": "<|audio>",
        "audio_token": "<|audio|>",
        "eoa_token": "<audio|>",
    }
    tokenizer = make_tokenizer(list(special_tokens.values()), **special_tokens)
    max_tokens = {"auto": 280, "low": 70, "high": 1120}[detail]
    images = Gemma4ImageProcessorPil(max_soft_tokens=max_tokens)
    processor = Gemma4Processor(None, images, tokenizer, None)
    keys = {"boi_token": "boi_token_id", "image_token": "image_token_id", "eoi_token": "eoi_token_id"}
    ids = {key: tokenizer.convert_tokens_to_ids(special_tokens[name]) for name, key in keys.items()}
    family = Gemma4Family(HuggingFaceConfig(ids), {}, tokenizer.convert_ids_to_tokens)
    assert family.processor_options(detail).get("max_soft_tokens", 280) == max_tokens
    prompt_tokens = prompt_ids(family, images, tokenizer, "a {}b{} c\n{}")
    assert prompt_tokens == reference_ids(processor, "a {}b{} c\n{}", "<|image|>")


@pytest.mark.parametrize("name", ["Qwen2_5_VLProcessor", "Qwen3VLProcessor"])
def test_prompts_of_qwen_equal_transformers(name: str) -> None:
    import transformers
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    tokenizer = make_tokenizer(["<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|video_pad|>"])
    image_processor = Qwen2VLImageProcessorPil()
    processor = getattr(transformers, name)(image_processor, tokenizer, video_processor=None)
    config = HuggingFaceConfig({"image_token_id": tokenizer.convert_tokens_to_ids("<|image_pad|>")})
    family_class = QwenVisionFamily if name == "Qwen2_5_VLProcessor" else Qwen3VisionFamily
    family = family_class(config, {}, tokenizer.convert_ids_to_tokens)
    template = "a <|vision_start|>{}<|vision_end|>b<|vision_start|>{}<|vision_end|>{}"
    assert prompt_ids(family, image_processor, tokenizer, template) == reference_ids(
        processor, template, "<|image_pad|>"
    )


def test_videos_are_refused() -> None:
    family = QwenVisionFamily(HuggingFaceConfig({}), {}, str)
    outputs = {"pixel_values": np.zeros((8, 4)), "image_grid_thw": np.array([[2, 2, 2]])}
    with pytest.raises(InputError, match=r"2 frames.*not videos"):
        family.to_processed_image(outputs, (28, 28))


def test_an_image_has_one_token_per_merged_patch() -> None:
    family = QwenVisionFamily(
        HuggingFaceConfig({"vision_config": {"spatial_merge_size": 4}}), {}, lambda _: "x"
    )
    image = ProcessedImage(np.zeros((128, 4)), (1, 1), {"image_grid_thw": np.array([1, 8, 16])})
    assert family.expand(image) == "x" * 8
