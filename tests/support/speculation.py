"""Helpers for tests of speculation: a proposer of given tokens, contexts, and functions that run contexts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from support.pipeline_steps import make_context, random_tokens

from penstock.pipelines import TextGenerationPipeline
from penstock.pipelines.core import SamplingParams, TextContext
from penstock.scheduler import Scheduler

VOCABULARY = 130
PROMPT = random_tokens(30, VOCABULARY, seed=7)
REPETITIVE_PROMPT = [*PROMPT[:9], *PROMPT[:9], *PROMPT[:4]]


class OracleProposer:
    """A proposer that drafts given outputs. The draft of output token j is wrong if ``is_wrong(j)``."""

    def __init__(self, texts: Mapping[str, list[int]], is_wrong: Callable[[int], bool], length: int) -> None:
        self.texts, self.is_wrong, self.length = texts, is_wrong, length
        self.released: list[str] = []
        self.observed: list[tuple[list[int], int]] = []

    def propose(self, contexts: Sequence[TextContext], limits: Sequence[int]) -> list[list[int]]:
        drafts = []
        for context in contexts:
            num_generated = len(context.generated_tokens)
            next_tokens = self.texts[context.request_id][num_generated : num_generated + self.length]
            drafts.append(
                [
                    (token + 1) % VOCABULARY if self.is_wrong(num_generated + j) else token
                    for j, token in enumerate(next_tokens)
                ]
            )
        return drafts

    def observe(
        self, contexts: Sequence[TextContext], drafts: Sequence[list[int]], accepted: Sequence[int]
    ) -> None:
        self.observed += list(zip(drafts, accepted, strict=True))

    def release(self, context: TextContext) -> None:
        self.released.append(context.request_id)


def mixed_contexts() -> list[TextContext]:
    """Return contexts of several lengths: greedy, sampled, with penalties, log probabilities and echo."""
    sampled_params = [SamplingParams(temperature=1.0, top_k=-1, seed=seed) for seed in (3, 4)]
    penalized_params = SamplingParams(
        temperature=0.8, seed=5, frequency_penalty=0.7, presence_penalty=0.3, repetition_penalty=1.2
    )
    return [
        make_context(PROMPT, 40, request_id="greedy"),
        make_context(REPETITIVE_PROMPT, 50, request_id="repeating"),
        make_context(PROMPT[:5], 23, request_id="sampled", sampling_params=sampled_params[0]),
        make_context(PROMPT, 40, request_id="sampled too", sampling_params=sampled_params[1]),
        make_context(REPETITIVE_PROMPT, 30, request_id="penalized", sampling_params=penalized_params),
        make_context(PROMPT[:7], 20, request_id="scored", log_probabilities=3),
        make_context(
            PROMPT[:8],
            20,
            request_id="echoed",
            log_probabilities=2,
            log_probabilities_echo=True,
            sampling_params=sampled_params[0],
        ),
    ]


def run_directly(
    pipeline: TextGenerationPipeline, contexts: Sequence[TextContext], **options: Any
) -> dict[str, list[Any]]:
    """Run the contexts as one batch. Return their (token, log probabilities) pairs and their status."""
    results: dict[str, list[Any]] = {context.request_id: [] for context in contexts}
    running_contexts = {context.request_id: context for context in contexts}
    while running_contexts:
        for request_id, response in pipeline.execute(running_contexts, **options).items():
            results[request_id] += [(token.next_token, token.log_probabilities) for token in response.tokens]
            if response.is_done:
                results[request_id].append(response.final_status)
                pipeline.release(running_contexts.pop(request_id))
    pipeline.kv.check_integrity()
    assert not pipeline.failures
    return results


def output_tokens(results: Mapping[str, list[Any]]) -> dict[str, list[int]]:
    return {request_id: [token for token, _ in result[:-1]] for request_id, result in results.items()}


def run_scheduled(
    pipeline: TextGenerationPipeline, contexts: Sequence[TextContext], *, num_steps: int = 1, **limits: Any
) -> Any:
    """Run the contexts with a scheduler. Return the results as in `run_directly`, and the scheduler."""
    scheduler = Scheduler(pipeline, **limits)
    for context in contexts:
        scheduler.submit(context)
    results: dict[str, list[Any]] = {context.request_id: [] for context in contexts}
    while scheduler.has_work:
        for request_id, response in scheduler.step(num_steps).items():
            results[request_id] += [(token.next_token, token.log_probabilities) for token in response.tokens]
            if response.is_done:
                results[request_id].append(response.final_status)
    assert not scheduler.failures
    return results, scheduler
