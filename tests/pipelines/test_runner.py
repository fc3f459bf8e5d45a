"""`ModelRunner` and `TextGenerationPipeline`: launching and collecting steps."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from support.checkpoints import write_checkpoint
from support.pipeline_steps import generate_tokens, make_context, open_pipeline, random_tokens

from penstock.architectures.llama import tiny_config
from penstock.errors import InputError
from penstock.pipelines import ModelOutputs, PipelineConfig, PipelineModel, TextGenerationPipeline
from penstock.pipelines.core import TextContext
from penstock.scheduler import Scheduler

PROMPT = random_tokens(30, 130, seed=7)
OTHER_PROMPT = random_tokens(11, 130, seed=8)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("llama"), tiny_config())


@pytest.fixture
def pipeline(checkpoint: Path) -> TextGenerationPipeline:
    return open_pipeline(checkpoint, deterministic=True, kv_cache_block_size=16)


class CountingModel(PipelineModel[TextContext]):
    """A model without weights. Token t + 1 follows token t. Records the input tokens of each forward."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.forwards: list[list[int]] = []

    @classmethod
    def calculate_max_seq_len(cls, pipeline_config: Any, huggingface_config: Any) -> int:
        return 64

    def prepare_initial_token_inputs(
        self,
        replica_batches: Sequence[Sequence[TextContext]],
        kv_cache_inputs: Any = None,
        return_n_logits: int | Sequence[int] = 1,
        *,
        drafts: Sequence[Sequence[int]] | None = None,
    ) -> torch.Tensor:
        assert drafts is None
        return torch.tensor([context.next_tokens[-1] for batch in replica_batches for context in batch])

    def prepare_next_token_inputs(self, next_tokens: torch.Tensor, prev_model_inputs: Any) -> torch.Tensor:
        return next_tokens

    def execute(self, model_inputs: torch.Tensor) -> ModelOutputs:
        self.forwards.append(model_inputs.tolist())
        return ModelOutputs(next_token_logits=torch.eye(130)[model_inputs + 1])


def counting_pipeline(checkpoint: Path) -> tuple[TextGenerationPipeline, CountingModel]:
    config = PipelineConfig.from_flat({"model_path": str(checkpoint)})
    pipeline = TextGenerationPipeline(config, CountingModel, -1)
    assert isinstance(pipeline.model, CountingModel)
    return pipeline, pipeline.model


def test_a_step_can_be_launched_before_the_previous_one_is_collected(checkpoint: Path) -> None:
    pipeline, model = counting_pipeline(checkpoint)
    contexts = [make_context([5]), make_context([50, 60])]
    first_handle = pipeline.runner.launch(contexts)
    second_handle = pipeline.runner.launch(contexts, 2, after=first_handle)
    third_handle = pipeline.runner.launch(contexts, after=second_handle)
    assert model.forwards == [[5, 60], [6, 61], [7, 62], [8, 63]]
    assert [context.current_length for context in contexts] == [1, 2], "launching changes no context"
    collected_results = [
        pipeline.runner.collect(handle) for handle in (third_handle, first_handle, second_handle)
    ]
    assert [[result.tokens for result in results] for results in collected_results] == [
        [[9], [64]],
        [[6], [61]],
        [[7, 8], [62, 63]],
    ]
    assert [context.current_length for context in contexts] == [1, 2], "collecting changes no context"


def test_the_second_launched_batch_can_be_collected_first(checkpoint: Path) -> None:
    pipeline, _ = counting_pipeline(checkpoint)
    a, b = make_context([5]), make_context([50, 60])
    handle_a, handle_b = pipeline.launch({"a": a}), pipeline.launch({"b": b}, num_steps=3)
    assert (a.current_length, b.current_length) == (1, 2), "launching adds no token"
    assert [token.next_token for token in pipeline.collect(handle_b)["b"].tokens] == [61, 62, 63]
    assert (a.current_length, b.current_length) == (1, 5)
    assert [token.next_token for token in pipeline.collect(handle_a)["a"].tokens] == [6]


@pytest.mark.parametrize("num_steps", [1, 3])
@pytest.mark.parametrize("use_graphs", [True, False])
def test_continued_launches_give_the_tokens_of_single_steps(
    pipeline: TextGenerationPipeline, num_steps: int, use_graphs: bool
) -> None:
    """A launch with ``after`` reads the tokens of the earlier, uncollected step on the device."""
    pipeline.session.use_graphs = use_graphs
    expected = generate_tokens(pipeline, [make_context(PROMPT, 11), make_context(OTHER_PROMPT, 11)])
    contexts = [make_context(PROMPT, 11), make_context(OTHER_PROMPT, 11)]
    for context in contexts:
        pipeline.kv.claim(context)
        pipeline.kv.reserve(context, 10)
    handles = [pipeline.runner.launch(contexts)]
    for _ in range(9 // num_steps):
        handles.append(pipeline.runner.launch(contexts, num_steps, after=handles[-1]))
    tokens: list[list[int]] = [[], []]
    for results in map(pipeline.runner.collect, handles):
        for context_tokens, result in zip(tokens, results, strict=True):
            context_tokens += result.tokens
    assert tokens == [expected_tokens[:10] for expected_tokens in expected]
    for context in contexts:
        pipeline.release(context)


def test_launch_and_collect_give_the_tokens_of_execute(pipeline: TextGenerationPipeline) -> None:
    expected = generate_tokens(pipeline, [make_context(PROMPT, 5)])
    context, tokens = make_context(PROMPT, 5), []
    while not context.is_done:
        tokens += pipeline.collect(pipeline.launch({"a": context}))["a"].tokens
    assert [[token.next_token for token in tokens]] == expected


def test_nothing_is_launched_for_an_invalid_number_of_steps(checkpoint: Path) -> None:
    pipeline, model = counting_pipeline(checkpoint)
    with pytest.raises(InputError, match="at least 1, was 0"):
        pipeline.launch({"a": make_context([5])}, num_steps=0)
    assert not model.forwards


# -- Reservations ----------------------------------------------------------------------------------------


@pytest.fixture
def reserved_ids(pipeline: TextGenerationPipeline, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list that receives the request id of each call of `KVCacheManager.reserve`."""
    calls: list[str] = []
    reserve = pipeline.kv.reserve

    def record_reserve(context: Any, lookahead: int = 0) -> None:
        calls.append(context.request_id)
        reserve(context, lookahead)

    monkeypatch.setattr(pipeline.kv, "reserve", record_reserve)
    return calls


@pytest.mark.parametrize("num_steps", [1, 4])
def test_a_scheduled_step_reserves_blocks_once_per_context(
    pipeline: TextGenerationPipeline, reserved_ids: list[str], num_steps: int
) -> None:
    scheduler: Scheduler[TextContext, Any] = Scheduler(pipeline, max_batch_size=4)
    for name in "abc":
        scheduler.submit(make_context(PROMPT, 20, request_id=name))
    while scheduler.has_work:
        reserved_ids.clear()
        outputs = scheduler.step(num_steps)
        assert sorted(reserved_ids) == sorted(outputs)


@pytest.mark.parametrize("num_steps", [1, 4])
def test_a_direct_call_reserves_blocks_once_per_context(
    pipeline: TextGenerationPipeline, reserved_ids: list[str], num_steps: int
) -> None:
    batch = {name: make_context(PROMPT, 20, request_id=name) for name in "abc"}
    for _ in range(3):
        reserved_ids.clear()
        steps = pipeline.next_token(batch, num_steps)
        assert len(steps) == num_steps
        assert sorted(reserved_ids) == sorted(batch)
