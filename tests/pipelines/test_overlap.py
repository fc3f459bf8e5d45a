"""Overlapped steps on a fake asynchronous back end give the outputs of synchronous steps."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.adapters import write_adapter
from support.lazy_queue import LazyQueue, register_lazy
from support.pipeline_steps import random_tokens
from support.random_draws import num_examples
from support.tiny_llm import EOS, MAX_LENGTH, write_tiny_llm

from penstock import LLM
from penstock.assembly import load_pipeline, load_runtime, load_scheduler, load_tokenizer
from penstock.errors import InputError, RequestFailedError
from penstock.kernels import cpu
from penstock.kv_cache import KVCacheManager
from penstock.pipelines import PipelineConfig, TextGenerationPipeline
from penstock.pipelines.core import Grammar, SamplingParams, TextContext
from penstock.pipelines.core.choices import choice_contexts
from penstock.pipelines.overlap import OverlappedStep, OverlappedSteps
from penstock.scheduler import OverlappedScheduler, Scheduler
from penstock.worker.messages import CallResult, Control, Submit
from penstock.worker.process import _Loop

pytestmark = pytest.mark.skipif(not cpu.available_isas(), reason="the C++ kernels are not built")

PROMPT = random_tokens(50, 256, seed=3)
SAMPLED = SamplingParams(temperature=1.0, top_k=-1, seed=5)


@pytest.fixture(scope="module")
def module_patch() -> Iterator[pytest.MonkeyPatch]:
    with pytest.MonkeyPatch.context() as module_patch:
        yield module_patch


@pytest.fixture(scope="module")
def queues(module_patch: pytest.MonkeyPatch) -> list[LazyQueue]:
    return register_lazy(module_patch)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llm(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def common_values(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    names = ("tone", "other")
    folders = [
        write_adapter(folder, tmp_path_factory.mktemp(name), seed) for seed, name in enumerate(names, 1)
    ]
    return {
        "model_path": str(folder),
        "deterministic": True,
        "kv_cache_block_size": 16,
        "max_batch_size": 6,
        "lora": tuple(f"{name}={path}" for name, path in zip(names, folders, strict=True)),
        "max_loras": 1,
    }


@pytest.fixture(scope="module")
def pipelines(
    common_values: dict[str, Any], queues: list[LazyQueue]
) -> Iterator[dict[str, TextGenerationPipeline]]:
    """Return two pipelines of one model: "cpu" runs synchronous steps, "lazy" runs overlapped steps."""
    pipelines = {name: open_from_values(common_values | {"kernels": name}) for name in ("cpu", "lazy")}
    assert pipelines["cpu"].overlapped_steps is None
    assert pipelines["lazy"].overlapped_steps is not None
    yield pipelines
    for pipeline in pipelines.values():
        pipeline.close()


@pytest.fixture(autouse=True)
def no_early_release(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail if a context is released before a launched forward that contains it has run."""
    steps: list[OverlappedStep] = []
    launch, release = OverlappedSteps.launch, KVCacheManager.release

    def record_launch(self: OverlappedSteps, *arguments: Any) -> OverlappedStep:
        steps.append(launch(self, *arguments))
        return steps[-1]

    def check_release(self: KVCacheManager, context: Any) -> None:
        steps[:] = [step for step in steps if not step.forward.has_run]  # type: ignore[attr-defined]
        for step in steps:
            assert all(used_context is not context for used_context in step.contexts), (
                f"{context.request_id} is in use"
            )
        release(self, context)

    monkeypatch.setattr(OverlappedSteps, "launch", record_launch)
    monkeypatch.setattr(KVCacheManager, "release", check_release)


def open_from_values(values: Mapping[str, Any]) -> TextGenerationPipeline:
    config = PipelineConfig.from_flat(values)
    pipeline = load_pipeline(config, load_tokenizer(config))
    assert isinstance(pipeline, TextGenerationPipeline)
    return pipeline


def make_named_context(
    name: str, tokens: Sequence[int], max_new_tokens: int = 12, **fields: Any
) -> TextContext:
    fields.setdefault("eos_token_ids", {EOS})
    fields.setdefault("ignore_eos", not fields["eos_token_ids"])
    return TextContext(
        prompt="",
        tokens=np.array(tokens, np.int64),
        max_length=len(tokens) + max_new_tokens,
        request_id=name,
        **fields,
    )


def run_contexts(
    pipeline: TextGenerationPipeline,
    contexts: Sequence[TextContext],
    *,
    arrival_interval: int = 0,
    cancels: Mapping[str, int] | None = None,
    num_steps: int = 1,
    **limits: Any,
) -> tuple[dict[str, Any], Scheduler[Any, Any]]:
    """Run contexts. Return the outputs by request id, and the scheduler.

    The output of a context is a list: a pair (token, log probabilities) for each token, then the final status
    or the type of the error, then the list of all tokens if the context is done. The list of a context in
    ``cancels`` is cut to its first ``cancels[request_id]`` items, and may then be followed by all tokens.

    Args:
        pipeline: the pipeline.
        contexts: the contexts.
        arrival_interval: number of calls of `step` between two arrivals; 0: all contexts arrive at the start.
        cancels: request id -> number of output tokens after which the request is cancelled.
        num_steps: maximum number of steps in one call.
        limits: further arguments of the scheduler.
    """
    steps = pipeline.overlapped_steps
    scheduler_class = Scheduler if steps is None else partial(OverlappedScheduler, steps=steps)
    options = {"max_batch_size": 6, "min_chunk_size": 4, "ready": pipeline.ready} | limits
    scheduler: Scheduler[Any, Any] = scheduler_class(pipeline, **options)
    arriving_contexts, cancels = deque(contexts), cancels or {}
    outputs: dict[str, Any] = {context.request_id: [] for context in contexts}
    num_calls = 0
    while arriving_contexts or scheduler.has_work:
        while arriving_contexts and (not arrival_interval or num_calls % arrival_interval == 0):
            scheduler.submit(arriving_contexts.popleft())
            if arrival_interval:
                break
        num_calls += 1
        assert num_calls < 100_000, "no progress"
        for name, output in scheduler.step(num_steps).items():
            outputs[name] += [(token.next_token, token.log_probabilities) for token in output.tokens]
            if output.is_done:
                outputs[name].append(output.final_status)
            elif len(outputs[name]) >= cancels.get(name, 1000):
                scheduler.cancel(name)
    for name, error in scheduler.failures.items():
        outputs[name].append(type(error))
    for name, count in cancels.items():
        outputs[name] = outputs[name][:count]
    for context in contexts:  # the tokens of a finished context must not change
        if context.is_done:
            outputs[context.request_id].append(context.all_tokens.tolist())
    pipeline.kv.check_integrity()
    assert pipeline.kv.num_free_blocks == pipeline.kv.num_blocks
    return outputs, scheduler


def compare_outputs(
    pipelines: Mapping[str, TextGenerationPipeline], make_contexts: Any, **options: Any
) -> dict[str, Any]:
    """Assert that overlapped and synchronous steps give equal outputs. Return the outputs."""
    for pipeline in pipelines.values():
        pipeline.kv.forget_prefixes()
    expected, _ = run_contexts(pipelines["cpu"], make_contexts(), **options)
    actual, _ = run_contexts(pipelines["lazy"], make_contexts(), **options)
    assert actual == expected
    return expected


def test_outputs_of_overlapped_steps_equal_those_of_synchronous_steps(
    pipelines: dict[str, TextGenerationPipeline], queues: list[LazyQueue]
) -> None:
    def contexts() -> list[TextContext]:
        lengths = [1, 30, 7, 50, 16, 3, 22, 9]
        return [
            make_named_context(
                str(i),
                PROMPT[:n],
                5 + 3 * i,
                sampling_params=SAMPLED if i % 2 else SamplingParams(),
                eos_token_ids=set(),
            )
            for i, n in enumerate(lengths)
        ]

    num_early_before = queues[0].num_early_reads
    for arrival_interval in (0, 1, 3):
        outputs = compare_outputs(pipelines, contexts, arrival_interval=arrival_interval)
        assert [len(outputs[str(i)]) for i in range(8)] == [5 + 3 * i + 2 for i in range(8)]
    assert queues[0].num_early_reads - num_early_before <= 1, "only the vocabulary size is read early"
    assert not queues[0].num_waiting


@pytest.mark.parametrize("arrival_interval", [0, 1, 3, 9])
def test_a_few_contexts_run_several_steps_in_one_call(
    pipelines: dict[str, TextGenerationPipeline], monkeypatch: pytest.MonkeyPatch, arrival_interval: int
) -> None:
    """The outputs equal those of synchronous steps. Contexts with penalties prevent calls of several steps.

    In the runs without penalties, one context is cancelled.
    """

    def contexts(**penalty: float) -> list[TextContext]:
        return [
            make_named_context(
                str(i), PROMPT[:n], 4 + 7 * i, sampling_params=replace(SAMPLED, temperature=i % 2, **penalty)
            )
            for i, n in enumerate([1, 30, 7, 50])
        ]

    calls: list[int] = []
    execute = TextGenerationPipeline.execute

    def count_execute(self: TextGenerationPipeline, batch: Any, num_steps: int = 1) -> Any:
        if self is pipelines["lazy"]:
            calls.append(num_steps)
        return execute(self, batch, num_steps)

    monkeypatch.setattr(TextGenerationPipeline, "execute", count_execute)
    compare_outputs(pipelines, contexts, arrival_interval=arrival_interval, num_steps=4, cancels={"3": 11})
    assert max(calls) > 1
    calls.clear()
    compare_outputs(
        pipelines, partial(contexts, frequency_penalty=0.5), arrival_interval=arrival_interval, num_steps=4
    )
    assert not calls, "penalties need the tokens of each step"


def test_multi_step_calls_do_not_affect_the_row_limit_of_later_steps(
    pipelines: dict[str, TextGenerationPipeline], monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline, seconds = pipelines["lazy"], 0.0
    steps, execute = pipeline.overlapped_steps, TextGenerationPipeline.execute
    assert steps is not None

    def execute_with_clock(self: TextGenerationPipeline, batch: Any, num_steps: int = 1) -> Any:
        nonlocal seconds
        seconds += len(batch) * num_steps
        return execute(self, batch, num_steps)

    monkeypatch.setattr(TextGenerationPipeline, "execute", execute_with_clock)
    options: dict[str, Any] = {"max_batch_size": 16, "ready": pipeline.ready, "clock": lambda: seconds}

    def count_steps_of_two_clients(scheduler: OverlappedScheduler[Any, Any]) -> int:
        clients = ["one"] * 12 + ["other"]
        for index, client_id in enumerate(clients):
            scheduler.submit(
                make_named_context(f"{index}", PROMPT[:3], client_id=client_id, eos_token_ids=set())
            )
        step_count = 0
        while scheduler.has_work:
            scheduler.step()
            step_count += 1
        return step_count

    new_scheduler, used_scheduler = (OverlappedScheduler(pipeline, steps=steps, **options) for _ in range(2))
    for index in range(3):
        context = make_named_context(f"few {index}", PROMPT[:3], 5 + 7 * index, eos_token_ids=set())
        used_scheduler.submit(context)
    while used_scheduler.has_work:
        used_scheduler.step(4)
    assert seconds > 0, "no call ran several steps"
    assert count_steps_of_two_clients(used_scheduler) == count_steps_of_two_clients(new_scheduler)


def test_idle_time_between_requests_does_not_count_as_step_time(
    pipelines: dict[str, TextGenerationPipeline], monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline, clock_seconds = pipelines["lazy"], 0.0
    recorded_seconds: list[float] = []

    def clock() -> float:
        nonlocal clock_seconds
        clock_seconds += 1
        return clock_seconds

    monkeypatch.setattr("penstock.pipelines.overlap.perf_counter", clock)
    monkeypatch.setattr(pipeline.runner, "record_step", recorded_seconds.append)
    steps = pipeline.overlapped_steps
    assert steps is not None
    scheduler = OverlappedScheduler(pipeline, steps=steps, max_batch_size=6, ready=pipeline.ready)
    for name in "ab":
        clock_seconds += 1000
        scheduler.submit(make_named_context(name, PROMPT[:1], 5, eos_token_ids=set()))
        while scheduler.has_work:
            scheduler.step()
    assert len(recorded_seconds) == 10
    assert 0 < max(recorded_seconds) < 5


def test_steps_overlap(pipelines: dict[str, TextGenerationPipeline], monkeypatch: pytest.MonkeyPatch) -> None:
    """A forward is launched before the tokens of the previous step are on the host."""
    events: list[str] = []
    for name in ("launch", "sample", "collect"):
        method = getattr(OverlappedSteps, name)

        def record_event(self: Any, *arguments: Any, name: str = name, method: Any = method) -> Any:
            events.append(name)
            return method(self, *arguments)

        monkeypatch.setattr(OverlappedSteps, name, record_event)
    run_contexts(pipelines["lazy"], [make_named_context("a", PROMPT, 4, eos_token_ids=set())])
    assert events == ["launch", "sample", *["launch", "collect", "sample"] * 3, "collect"]
    events.clear()
    pipelines["lazy"].kv.forget_prefixes()
    run_contexts(
        pipelines["lazy"], [make_named_context("a", PROMPT, 2, eos_token_ids=set())], max_batch_input_tokens=8
    )
    assert events.count("launch") == 7 + 1, "each chunk of 8 tokens is computed once"


def test_outputs_with_end_tokens_and_end_sequences_equal_those_of_synchronous_steps(
    pipelines: dict[str, TextGenerationPipeline],
) -> None:
    """An overlapped step computes one token after the end, which is dropped."""
    plain_tokens = [
        token
        for token, _ in compare_outputs(pipelines, lambda: [make_named_context("a", PROMPT, 30)])["a"][:-2]
    ]

    def contexts() -> list[TextContext]:
        fields_by_name: dict[str, dict[str, Any]] = {
            **{f"end {i}": {"eos_token_ids": {plain_tokens[i]}} for i in (0, 1, 5, 20)},
            **{f"stop {i}": {"eos_sequences": [plain_tokens[i : i + 2]]} for i in (0, 4, 17)},
        }
        return [
            *(make_named_context(name, PROMPT, 30, **fields) for name, fields in fields_by_name.items()),
            make_named_context("short", PROMPT, 1),
            make_named_context("two", PROMPT, 2),
        ]

    for batch_size in (1, 3, 6):
        outputs = compare_outputs(pipelines, contexts, max_batch_size=batch_size)
        assert len(outputs["end 5"]) <= 7


def test_outputs_with_sampling_rules_equal_those_of_synchronous_steps(
    pipelines: dict[str, TextGenerationPipeline],
) -> None:
    """Penalties, banned sequences and minimum lengths depend on tokens of the previous step."""
    rules = {
        "penalties": {"frequency_penalty": 1.5, "presence_penalty": 0.5, "repetition_penalty": 1.3},
        "sequences": {"banned_sequences": [[t, u] for t in range(0, 256, 3) for u in range(0, 256, 7)]},
        "minimum": {"min_new_tokens": 9},
        "bias": {"logit_bias": {7: 3.0, 9: -4.0}, "banned_token_ids": list(range(40))},
    }

    def contexts() -> list[TextContext]:
        return [
            make_named_context(f"{name} {temperature}", PROMPT[:9], 20, eos_token_ids=set(range(30)))
            for name, values in rules.items()
            for temperature in (0.0, 1.0)
        ]

    def contexts_with_rules() -> list[TextContext]:
        actual = contexts()
        for context, values in zip(actual, [v for v in rules.values() for _ in range(2)], strict=True):
            temperature = float(context.request_id.split()[-1])
            context.sampling_params = SamplingParams(temperature=temperature, top_k=-1, seed=2, **values)
        return actual

    outputs_without_rules = compare_outputs(pipelines, contexts)
    assert compare_outputs(pipelines, contexts_with_rules) != outputs_without_rules


def test_log_probabilities_equal_those_of_synchronous_steps(
    pipelines: dict[str, TextGenerationPipeline],
) -> None:
    def contexts() -> list[TextContext]:
        return [
            make_named_context("plain", PROMPT[:20], 15),
            make_named_context("scored", PROMPT[:9], 9, log_probabilities=2),
            make_named_context("echo", PROMPT[:40], 6, log_probabilities=1, log_probabilities_echo=True),
            make_named_context("ends", PROMPT[:20], 4),
        ]

    for arrival_interval in (0, 2):
        compare_outputs(pipelines, contexts, arrival_interval=arrival_interval, max_batch_input_tokens=24)


GRAMMARS = {
    "schema": Grammar(
        "json_schema",
        '{"type": "object", "properties": {"name": {"enum": ["one", "two"]}, "n": {"type": "integer"}},'
        ' "required": ["name", "n"]}',
    ),
    "forced": Grammar("regex", "(ab|cd){3,20}(yes|no), indeed"),
    "free": Grammar("regex", "[a-z ]{5,40}"),
}


def test_outputs_with_grammars_equal_those_of_synchronous_steps(
    pipelines: dict[str, TextGenerationPipeline],
) -> None:
    pytest.importorskip("xgrammar")
    parameter_sets: dict[str, dict[str, Any]] = {
        "greedy": {},
        "sampled": {"sampling_params": SAMPLED},
        "stops": {"eos_sequences": [[ord("e") - 33, ord("s") - 33]]},
    }

    def contexts() -> list[TextContext]:
        constrained_contexts = [
            make_named_context(f"{name}, {kind}", PROMPT[: 4 + len(name)], 60, grammar=grammar, **fields)
            for name, grammar in GRAMMARS.items()
            for kind, fields in parameter_sets.items()
        ]
        return [
            *constrained_contexts,
            make_named_context("free", PROMPT, 40),
            make_named_context("free too", PROMPT[:3], 50),
        ]

    for arrival_interval in (0, 2):
        outputs = compare_outputs(pipelines, contexts, arrival_interval=arrival_interval)
        assert any(len(output) > 30 for output in outputs.values())


def test_outputs_with_chunks_and_prefix_hits_equal_those_of_synchronous_steps(
    pipelines: dict[str, TextGenerationPipeline],
) -> None:
    def contexts() -> list[TextContext]:
        return [
            make_named_context(str(i), [*PROMPT[: 16 * (i % 4)], i, *PROMPT[:20]], 10 + i) for i in range(10)
        ]

    for budget in (8, 24, 64):
        for arrival_interval in (0, 4):
            options = {"arrival_interval": arrival_interval, "max_batch_input_tokens": budget}
            compare_outputs(pipelines, contexts, **options)
    cached_counts = {}
    for name, pipeline in pipelines.items():
        pipeline.kv.forget_prefixes()
        equal_contexts = [make_named_context(str(i), PROMPT, 5) for i in range(6)]
        run_contexts(pipeline, equal_contexts)
        cached_counts[name] = [context.num_cached_tokens for context in equal_contexts]
    assert cached_counts["lazy"] == cached_counts["cpu"] == [0, 48, 48, 48, 48, 48]


def test_choices_equal_those_of_synchronous_steps(pipelines: dict[str, TextGenerationPipeline]) -> None:
    context = make_named_context("a", PROMPT, 12, sampling_params=SAMPLED)
    outputs = compare_outputs(pipelines, lambda: choice_contexts(context, 5))
    assert len({str(output) for output in outputs.values()}) == 5


def test_outputs_with_adapters_equal_those_of_synchronous_steps(
    pipelines: dict[str, TextGenerationPipeline],
) -> None:
    """Two adapters share one slot. Loading one must not affect running requests of the other adapter."""

    def contexts() -> list[TextContext]:
        names = ["tone", None, "other", "tone", "other", None, "other", "tone"]
        return [make_named_context(str(i), PROMPT[:12], 4 + i, adapter=name) for i, name in enumerate(names)]

    for arrival_interval in (0, 2):
        outputs = compare_outputs(pipelines, contexts, arrival_interval=arrival_interval)
    assert len({str(output[:3]) for output in outputs.values()}) == 3


def test_outputs_of_preempted_requests_equal_those_of_synchronous_steps(
    common_values: dict[str, Any], queues: list[LazyQueue]
) -> None:
    preemptions = {}
    expected: dict[str, Any] = {}
    for kernels in ("cpu", "lazy"):
        pipeline = open_from_values(
            common_values | {"kernels": kernels, "max_length": 96, "enable_prefix_caching": False}
        )
        size = pipeline.memory_plan.kv_cache_size // pipeline.memory_plan.num_blocks[0]
        pipeline = open_from_values(
            common_values
            | {"kernels": kernels, "max_length": 96, "kv_cache_memory": 9 * size, "max_batch_size": 4}
        )
        contexts = [make_named_context(str(i), PROMPT[: 5 + 4 * i], 40, priority=i % 2) for i in range(6)]
        actual, scheduler = run_contexts(pipeline, contexts, max_batch_size=4, arrival_interval=2)
        preemptions[kernels] = scheduler.num_preemptions
        expected = expected or actual
        assert actual == expected
    assert all(preemptions.values()), preemptions


def test_outputs_of_cancelled_requests_equal_those_of_synchronous_steps(
    pipelines: dict[str, TextGenerationPipeline],
) -> None:
    def contexts() -> list[TextContext]:
        return [make_named_context(str(i), PROMPT[: 3 + 5 * i], 30) for i in range(8)]

    for arrival_interval in (0, 3):
        compare_outputs(
            pipelines,
            contexts,
            arrival_interval=arrival_interval,
            cancels={"0": 1, "3": 2, "4": 9},
            max_batch_size=3,
        )
    scheduler = load_scheduler(pipelines["lazy"].config, pipelines["lazy"])
    context = make_named_context("a", PROMPT, 20)
    scheduler.submit(context)
    scheduler.step()  # launches a step whose results are not collected yet
    scheduler.cancel("a")
    assert scheduler.step() == {}
    assert not scheduler.has_work
    assert not context.is_assigned_to_cache
    scheduler.submit(make_named_context("a", PROMPT, 20))  # the id can be used again
    while scheduler.has_work:
        scheduler.step()


def test_a_cancelled_id_can_be_resubmitted_while_its_step_runs(
    pipelines: dict[str, TextGenerationPipeline],
) -> None:
    scheduler = load_scheduler(pipelines["lazy"].config, pipelines["lazy"])
    scheduler.submit(make_named_context("a", PROMPT, 20))
    scheduler.step()
    scheduler.step()
    scheduler.cancel("a")
    scheduler._apply_cancels()
    scheduler.submit(make_named_context("a", PROMPT[:7], 20))
    tokens = []
    while scheduler.has_work:
        for output in scheduler.step().values():
            tokens += [response.next_token for response in output.tokens]
    expected, _ = run_contexts(pipelines["cpu"], [make_named_context("a", PROMPT[:7], 20)])
    assert tokens == [token for token, _ in expected["a"][:-2]]


# -- Faults ----------------------------------------------------------------------------------------------


def patch_outputs(pipeline: TextGenerationPipeline, patch: pytest.MonkeyPatch, change: Any) -> None:
    """Replace the outputs of each forward by ``change(lengths [B], outputs)``."""
    execute = pipeline.model.execute
    patch.setattr(pipeline.model, "execute", lambda inputs: change(inputs.kv.lengths, execute(inputs)))


def four_contexts() -> list[TextContext]:
    """Return four contexts; only request "3" grows beyond 40 tokens."""
    lengths = [5, 9, 20, 38]
    prompts = [[i + 1, *PROMPT[: n - 1]] for i, n in enumerate(lengths)]
    return [make_named_context(str(i), prompt, 12, eos_token_ids=set()) for i, prompt in enumerate(prompts)]


def test_a_step_that_fails_once_is_repeated(
    pipelines: dict[str, TextGenerationPipeline], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, _ = run_contexts(pipelines["cpu"], four_contexts())
    for failing_forward in range(1, 14):
        counter = iter(range(1, 1000))

        def fail_once(
            lengths: Any, outputs: Any, failing_forward: int = failing_forward, counter: Any = counter
        ) -> Any:
            if next(counter) == failing_forward:
                raise ArithmeticError("the device failed")
            return outputs

        with monkeypatch.context() as patch:
            patch_outputs(pipelines["lazy"], patch, fail_once)
            actual, _ = run_contexts(pipelines["lazy"], four_contexts(), arrival_interval=2)
        assert actual == expected, failing_forward
        assert next(counter) > failing_forward + 1, "no step failed"


def test_only_the_request_that_causes_an_error_fails(
    pipelines: dict[str, TextGenerationPipeline], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(lengths: Any, outputs: Any) -> Any:
        if lengths.max() > 44:
            raise ArithmeticError("the device failed")
        return outputs

    for pipeline in pipelines.values():
        patch_outputs(pipeline, monkeypatch, fail)
    for arrival_interval in (0, 2):
        outputs = compare_outputs(pipelines, four_contexts, arrival_interval=arrival_interval)
        assert [RequestFailedError in output for output in outputs.values()] == [False] * 3 + [True]


def test_non_finite_logits_fail_only_their_request(
    pipelines: dict[str, TextGenerationPipeline], monkeypatch: pytest.MonkeyPatch
) -> None:
    def set_nan_logits(lengths: Any, outputs: Any) -> Any:
        logits = outputs.next_token_logits.clone()
        logits[lengths > 42] = torch.nan
        return replace(outputs, next_token_logits=logits)

    for pipeline in pipelines.values():
        patch_outputs(pipeline, monkeypatch, set_nan_logits)
    outputs = compare_outputs(pipelines, four_contexts)
    assert [RequestFailedError in output for output in outputs.values()] == [False] * 3 + [True]


def test_outputs_of_refused_requests_equal_those_of_synchronous_steps(
    pipelines: dict[str, TextGenerationPipeline],
) -> None:
    def contexts() -> list[TextContext]:
        invalid_params = SamplingParams(logit_bias={5000: 1.0})
        return [
            *four_contexts(),
            make_named_context("unknown token", PROMPT[:6], 9, sampling_params=invalid_params),
            make_named_context("too long", random_tokens(MAX_LENGTH - 3, 256, seed=1), 10),
        ]

    for arrival_interval in (0, 2):
        outputs = compare_outputs(pipelines, contexts, arrival_interval=arrival_interval)
        assert outputs["unknown token"] == [InputError]
        assert outputs["too long"][-1] is InputError
        assert len(outputs["too long"]) == 5


# -- LLM, worker and random schedules ---------------------------------------------------------------------


def test_llm_outputs_equal_those_of_synchronous_steps(folder: Path, queues: list[LazyQueue]) -> None:
    """The calls use stop strings, several choices, and a stream that is closed before its end."""
    results_by_kernels = {}
    for kernels in ("cpu", "lazy"):
        llm = LLM(str(folder), kernels=kernels, deterministic=True, max_batch_size=4)
        prompts = ["Once upon", "a", "The quick brown fox jumps"]
        greedy = SamplingParams(temperature=0, max_new_tokens=24)
        (first_output,) = llm.generate(prompts[0], greedy)
        actual: list[Any] = [first_output.text]
        for stop in (first_output.text[3:5], first_output.text[10:12]):
            outputs = llm.generate(prompts, replace(greedy, stop=[stop]))
            actual += [(output.text, output.finish_reason) for output in outputs]
        stream = llm.stream(prompts[2], greedy)
        actual.append(next(iter(stream))[:1])
        stream.close()
        outputs = llm.generate(prompts, SamplingParams(temperature=1, max_new_tokens=12, seed=4), n=3)
        actual += [output.text for output in outputs]
        results_by_kernels[kernels] = actual
        llm.close()
    assert results_by_kernels["lazy"] == results_by_kernels["cpu"]
    assert not queues[-1].num_waiting


@pytest.mark.parametrize("log_probabilities", [0, 2])
def test_worker_results_equal_those_of_synchronous_steps(
    common_values: dict[str, Any], queues: list[LazyQueue], log_probabilities: int
) -> None:
    """The cache is discarded after the last result, while a launched step still contains ended requests.

    With log probabilities, the last call launches no step.
    """
    actual = {}
    for kernels in ("cpu", "lazy"):
        reports: list[Any] = []
        socket: Any = None
        loop = _Loop(
            load_runtime(PipelineConfig.from_flat(common_values | {"kernels": kernels})),
            socket,
            reports.append,
        )
        tokens: dict[str, list[int]] = {}
        statuses = {}
        for name, prompt in (("a", PROMPT), ("b", PROMPT[:9])):
            end_tokens = set(range(0, 256, 9))
            context = make_named_context(
                name, prompt, 70, eos_token_ids=end_tokens, log_probabilities=log_probabilities
            )
            loop._handle(Submit(context))
        while loop._contexts:
            loop._step()
        loop._handle(Control(7, "discard_cache"))
        assert reports[-1] == CallResult(7, None)
        assert not loop._scheduler.has_work
        for report in reports[:-1]:
            for result in report.results:
                tokens.setdefault(result.request_id, []).extend(result.tokens)
                statuses[result.request_id] = result.status
        actual[kernels] = tokens
        assert all(status.is_done for status in statuses.values()), "the last result of a request is missing"
    assert actual["lazy"] == actual["cpu"]
    assert all(0 < len(value) < 70 for value in actual["cpu"].values()), "the requests end by an end token"
    assert not queues[-1].num_waiting


def test_overlap_is_off_with_drafts_or_by_setting(
    common_values: dict[str, Any], queues: list[LazyQueue]
) -> None:
    config = common_values | {"kernels": "lazy", "overlap_steps": False}
    assert open_from_values(config).overlapped_steps is None
    with_drafts = open_from_values(common_values | {"kernels": "lazy", "speculative_method": "ngram"})
    assert with_drafts.overlapped_steps is None
    assert type(load_scheduler(with_drafts.config, with_drafts)) is Scheduler


@st.composite
def requests(draw: st.DrawFn) -> dict[str, Any]:
    grammar = draw(st.sampled_from([None, None, *GRAMMARS.values()]))
    return {
        "tokens": draw(st.lists(st.integers(0, 3), min_size=1, max_size=50)),
        "max_new_tokens": draw(st.integers(1, 30)),
        "adapter": draw(st.sampled_from([None, "tone", "other"])),
        "grammar": grammar,
        "priority": draw(st.integers(0, 1)),
        "client_id": draw(st.sampled_from(["", "one", "two"])),
        "log_probabilities": draw(st.sampled_from([None, None, None, 2])),
        "log_probabilities_echo": draw(st.booleans()),
        "eos_sequences": draw(st.sampled_from([[], [[3, 4]]])),
        "eos_token_ids": draw(st.sampled_from([{EOS}, {EOS, *range(20)}])),
        "sampling_params": SamplingParams(
            temperature=draw(st.sampled_from([0.0, 1.0])),
            top_k=-1,
            seed=draw(st.integers(0, 9)),
            frequency_penalty=draw(st.sampled_from([0.0, 0.8])),
            banned_token_ids=draw(st.sampled_from([None, [5, 64]])) if grammar is None else None,
        ),
    }


@settings(max_examples=num_examples(6))
@given(
    batch=st.lists(requests(), min_size=1, max_size=9),
    arrival_interval=st.sampled_from([0, 1, 3]),
    max_batch_input_tokens=st.sampled_from([12, 40, 400]),
    max_batch_size=st.sampled_from([1, 3, 6]),
    cancels=st.dictionaries(st.sampled_from("0123"), st.integers(1, 9), max_size=2),
)
def test_outputs_of_any_schedule_equal_those_of_synchronous_steps(
    small_caches: dict[str, TextGenerationPipeline],
    batch: list[dict[str, Any]],
    arrival_interval: int,
    max_batch_input_tokens: int,
    max_batch_size: int,
    cancels: dict[str, int],
) -> None:
    def contexts() -> list[TextContext]:
        return [make_named_context(str(i), **request) for i, request in enumerate(batch)]

    cancels = {name: count for name, count in cancels.items() if int(name) < len(batch)}
    compare_outputs(
        small_caches,
        contexts,
        arrival_interval=arrival_interval,
        cancels=cancels,
        max_batch_input_tokens=max_batch_input_tokens,
        max_batch_size=max_batch_size,
    )


@pytest.fixture(scope="module")
def small_caches(
    common_values: dict[str, Any], queues: list[LazyQueue]
) -> Iterator[dict[str, TextGenerationPipeline]]:
    """Return two pipelines with so few blocks that contexts can be preempted."""
    pytest.importorskip("xgrammar")
    pipelines = {}
    for kernels in ("cpu", "lazy"):
        plan = open_from_values(common_values | {"kernels": kernels}).memory_plan
        memory = 12 * plan.kv_cache_size // plan.num_blocks[0]
        pipelines[kernels] = open_from_values(common_values | {"kernels": kernels, "kv_cache_memory": memory})
    yield pipelines
    for pipeline in pipelines.values():
        pipeline.close()
