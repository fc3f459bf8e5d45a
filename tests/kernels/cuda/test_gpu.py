"""The CUDA back end on a GPU: texts, graphs and determinism of the demo model, graphs of image encoders."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures.test_vision_graphs import (
    encode_images,
    make_images,
    open_vision,
    with_random_pixels,
    write_vision_checkpoint,
)

from penstock import LLM, SamplingParams
from penstock.pipelines.overlap import OverlappedSteps

pytestmark = pytest.mark.gpu

DEVICE = "gpu"

GREEDY = SamplingParams(max_new_tokens=24, temperature=0)
SAMPLED = SamplingParams(max_new_tokens=24, temperature=0.8, top_k=40, top_p=0.9, seed=7)
PROMPTS = ["Once upon a time", "The weather today is", "A"]


def generate_texts(
    devices: str, params: SamplingParams, encoding: str = "float32", **settings: object
) -> list[str]:
    with LLM("demo", quantization_encoding=encoding, devices=devices, **settings) as llm:  # type: ignore[arg-type]
        output_texts = [output.text for output in llm.generate(PROMPTS, params)]
        if devices == "gpu":
            assert llm.pipeline.session.ops.name == "cuda"
        return output_texts


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_texts_on_the_gpu_equal_texts_on_the_cpu(params: SamplingParams) -> None:
    assert generate_texts("gpu", params) == generate_texts("cpu", params)


def test_decode_steps_run_as_graphs_and_generate_the_text_of_eager_steps() -> None:
    with LLM("demo", quantization_encoding="float32", devices="gpu") as llm:
        replayed_texts = [output.text for output in llm.generate(PROMPTS, GREEDY)]
        assert llm.pipeline.session.graph_status == "compiled: a CUDA graph"
        llm.pipeline.session.use_graphs = False
        assert [output.text for output in llm.generate(PROMPTS, GREEDY)] == replayed_texts


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_overlapped_steps_do_not_change_the_text(params: SamplingParams) -> None:
    single_step = {"max_num_steps": 1}  # a call of several steps does not overlap with the next
    overlapped_texts = generate_texts("gpu", params, overlap_steps=True, **single_step)
    assert overlapped_texts == generate_texts("gpu", params, overlap_steps=False, **single_step)


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_several_steps_per_call_do_not_change_the_text(params: SamplingParams) -> None:
    assert generate_texts("gpu", params) == generate_texts("gpu", params, max_num_steps=1)


@pytest.fixture
def _reset_sync_mode() -> Iterator[None]:
    yield
    set_sync_mode("default")


def set_sync_mode(mode: str) -> None:
    """Set what torch does when a call waits for the device. Hide torch's warning that this is a prototype."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.cuda.set_sync_debug_mode(mode)


@pytest.mark.usefixtures("_reset_sync_mode")
def test_no_overlapped_step_waits_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Launching and sampling a step do not synchronize with the device.

    In mode "error", torch raises an error if a call synchronizes.
    """
    penalized_params = replace(SAMPLED, frequency_penalty=0.5, logit_bias={5: 1.0})
    with LLM("demo", quantization_encoding="float32", devices="gpu", max_num_steps=1) as llm:
        for params in (GREEDY, SAMPLED, penalized_params):
            llm.generate(PROMPTS, params)  # compiles the kernels and captures the graphs
        calls: list[str] = []
        waits: list[str] = []
        for name in ("launch", "sample"):
            method = getattr(OverlappedSteps, name)

            def call_and_check(self: Any, *arguments: Any, name: str = name, method: Any = method) -> Any:
                calls.append(name)
                try:
                    set_sync_mode("error")
                    return method(self, *arguments)
                except RuntimeError as error:  # the scheduler would hide the error by repeating the step
                    waits.append(f"{name}: {error}")
                    raise
                finally:
                    set_sync_mode("default")

            monkeypatch.setattr(OverlappedSteps, name, call_and_check)
        for params in (GREEDY, SAMPLED, penalized_params):
            llm.generate(PROMPTS, params)
    assert not waits
    assert len(calls) > 100


@pytest.mark.parametrize("encoding", ["bfloat16", "int8", "int4"])
def test_batched_texts_equal_single_texts(encoding: str) -> None:
    with LLM("demo", quantization_encoding=encoding, devices="gpu", deterministic=True) as llm:
        batch_texts = [output.text for output in llm.generate(PROMPTS, SAMPLED)]
        assert [llm.generate(prompt, SAMPLED)[0].text for prompt in PROMPTS] == batch_texts


def test_replayed_steps_have_the_bits_of_eager_steps() -> None:
    """With `deterministic`, the padded block table of a captured step changes no bits of its results."""
    with LLM("demo", devices=DEVICE, deterministic=True, quantization_encoding="bfloat16") as llm:
        results = []
        for uses_graphs in (True, True, False):
            llm.pipeline.session.use_graphs = uses_graphs
            outputs = llm.generate(PROMPTS, SAMPLED, logprobs=5)
            results.append([(output.token_ids, output.log_probabilities) for output in outputs])
        assert results[1] == results[2]


@pytest.mark.parametrize("name", ["llava", "qwen2_5_vl", "idefics3"])
@torch.inference_mode()
def test_images_are_encoded_by_graphs(name: str, tmp_path: Path) -> None:
    """Replays with other pixels equal eager operations, and do not change the results of earlier replays."""
    folder = write_vision_checkpoint(name, tmp_path)
    compiled_encoder, eager_encoder = (
        open_vision(folder, "bfloat16", compiled=is_compiled, devices=DEVICE) for is_compiled in (True, False)
    )
    model: Any = compiled_encoder.model
    compiled_rows, eager_rows = [], []
    for seed in range(4):
        for example_image in make_images(name):
            image = with_random_pixels(example_image, seed)
            compiled_rows.append(encode_images(compiled_encoder, [image]))
            eager_rows.append(encode_images(eager_encoder, [image]))
    assert model.encoder_graphs.status.startswith("compiled: ")
    assert all(map(torch.equal, compiled_rows, eager_rows))


def test_graphs_of_many_shapes_stay_within_their_budget() -> None:
    with LLM("demo", devices=DEVICE, max_batch_size=64, max_length=256) as llm:
        llm.generate(PROMPTS, GREEDY)
        torch.cuda.empty_cache()
        reserved_bytes_before, total_bytes = torch.cuda.memory_reserved(), torch.cuda.mem_get_info()[1]
        for size in (*range(1, 40), *range(1, 40)):
            llm.generate(["Once"] * size, replace(GREEDY, max_new_tokens=4))
        graphs = llm.pipeline.session.graphs
        assert graphs is not None
        assert graphs.num_graphs > 30
        torch.cuda.empty_cache()
        assert torch.cuda.memory_reserved() - reserved_bytes_before < 0.06 * total_bytes
