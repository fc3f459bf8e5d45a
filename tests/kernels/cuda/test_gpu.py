"""The CUDA back end on a GPU: texts, graphs and determinism of the demo model."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from penstock import LLM, SamplingParams
from penstock.pipelines.overlap import OverlappedSteps

pytestmark = pytest.mark.gpu

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
def test_texts_equal_those_of_the_cpu(params: SamplingParams) -> None:
    assert generate_texts("gpu", params) == generate_texts("cpu", params)


def test_decode_steps_run_as_graphs_with_the_eager_text() -> None:
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
    """Set what torch does when a call waits for the device. Hides the warning that this is a prototype."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.cuda.set_sync_debug_mode(mode)


@pytest.mark.usefixtures("_reset_sync_mode")
def test_no_overlapped_step_waits_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Launching and sampling a step must not synchronize with the device. torch raises if they do."""
    penalised_params = replace(SAMPLED, frequency_penalty=0.5, logit_bias={5: 1.0})
    with LLM("demo", quantization_encoding="float32", devices="gpu", max_num_steps=1) as llm:
        for params in (GREEDY, SAMPLED, penalised_params):
            llm.generate(PROMPTS, params)  # compiles the kernels and captures the graphs
        calls: list[str] = []
        waits: list[str] = []
        for name in ("launch", "sample"):
            method = getattr(OverlappedSteps, name)

            def watched(self: Any, *arguments: Any, name: str = name, method: Any = method) -> Any:
                calls.append(name)
                try:
                    set_sync_mode("error")
                    return method(self, *arguments)
                except RuntimeError as error:  # the scheduler would hide the error by repeating the step
                    waits.append(f"{name}: {error}")
                    raise
                finally:
                    set_sync_mode("default")

            monkeypatch.setattr(OverlappedSteps, name, watched)
        for params in (GREEDY, SAMPLED, penalised_params):
            llm.generate(PROMPTS, params)
    assert not waits
    assert len(calls) > 100


@pytest.mark.parametrize("encoding", ["bfloat16", "int8", "int4"])
def test_batched_texts_equal_single_texts(encoding: str) -> None:
    with LLM("demo", quantization_encoding=encoding, devices="gpu", deterministic=True) as llm:
        batch_texts = [output.text for output in llm.generate(PROMPTS, SAMPLED)]
        assert [llm.generate(prompt, SAMPLED)[0].text for prompt in PROMPTS] == batch_texts
