"""`AsyncLLM` with images gives the outputs of `LLM`, and refuses invalid images."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
from support.vision_checkpoint import encode_image_file, image_chat, random_picture, write_llava

from penstock import LLM, AsyncLLM
from penstock.assembly import load_runtime
from penstock.config import PipelineConfig
from penstock.errors import InputError
from penstock.media import tokenizer as media_tokenizer
from penstock.media.processor import LocalProcessor
from penstock.pipelines.core import SamplingParams
from penstock.worker.client import WorkerClient

GREEDY = SamplingParams(max_new_tokens=8, top_k=1, ignore_eos=True)


def make_local_processor(checkpoint: Path, *_: object) -> LocalProcessor:
    """Return an image processor that runs in this process."""
    return LocalProcessor(checkpoint)


async def test_outputs_equal_those_of_llm_and_invalid_images_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(media_tokenizer, "ProcessorPool", make_local_processor)
    config = PipelineConfig.from_flat(
        {"model_path": str(write_llava(tmp_path)), "quantization_encoding": "float32", "max_batch_size": 4}
    )
    prompts, image = ["A <image> b", "No image"], tmp_path / "picture.png"
    image.write_bytes(encode_image_file(random_picture(1)))
    images = [[image], None]
    messages = image_chat("What?", [random_picture(2)])
    with LLM.from_config(config) as llm:
        expected = llm.generate(prompts, GREEDY, use_tqdm=False, images=images)
        other_output = llm.generate(prompts[0], GREEDY, use_tqdm=False, images=random_picture(5))[0]
        chat_output = llm.chat(messages, GREEDY, use_tqdm=False)[0]
    assert expected[0].token_ids != other_output.token_ids, "the output depends on the image"
    worker = WorkerClient(partial(load_runtime, config), in_thread=True)
    async with AsyncLLM.from_config(config, worker=worker) as llm:
        outputs = await llm.generate(prompts, GREEDY, images=images)
        assert [output.token_ids for output in outputs] == [reference.token_ids for reference in expected]
        assert (await llm.generate(prompts[0], GREEDY, images=random_picture(5)))[
            0
        ].token_ids == other_output.token_ids
        assert (await llm.chat(messages, GREEDY))[0].token_ids == chat_output.token_ids
        chunks = [chunk async for chunk in llm.stream(prompts[0], GREEDY, images=image)]
        assert chunks[-1].output is not None
        assert chunks[-1].output.token_ids == expected[0].token_ids
        with pytest.raises(InputError, match="cannot be read"):
            await llm.generate(prompts[0], GREEDY, images="no.png")
        with pytest.raises(InputError, match="images has 1 entries for 2 prompts"):
            await llm.generate(prompts, GREEDY, images=[image])
        with pytest.raises(InputError, match="leave out images"):
            await anext(llm.stream(messages=messages, sampling_params=GREEDY, images=image))
