"""An error of one context after a forward fails only this context. Logits of minus infinity are valid."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.checkpoints import write_checkpoint
from support.pipeline_steps import generate_tokens, make_context, open_pipeline
from support.speculation import PROMPT, OracleProposer, output_tokens, run_directly

from penstock.architectures.llama import tiny_config
from penstock.errors import InputError, RequestFailedError, UnsupportedFeatureError
from penstock.pipelines import TextGenerationPipeline
from penstock.pipelines.core import Grammar, TextContext
from penstock.scheduler import Scheduler


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("faults"), tiny_config())


@pytest.fixture
def pipeline(checkpoint: Path) -> TextGenerationPipeline:
    return open_pipeline(checkpoint, deterministic=True, kv_cache_block_size=16)


def contexts() -> dict[str, TextContext]:
    prompts = {"good": PROMPT, "bad": PROMPT[:9], "as good": PROMPT[:5]}
    return {name: make_context(prompt, 12, request_id=name) for name, prompt in prompts.items()}


def with_logits(outputs: Any, logits: torch.Tensor) -> Any:
    return replace(outputs, logits=logits, next_token_logits=None)


class RejectingMatcher:
    """A matcher that rejects all tokens from the third on, although its mask allows every token."""

    def __init__(self) -> None:
        self.num_received = 0

    def is_terminated(self) -> bool:
        return False

    def find_jump_forward_string(self) -> str:
        return ""

    def fill_next_token_bitmask(self, bitmask: torch.Tensor, index: int) -> bool:
        return False

    @property
    def stop_token_ids(self) -> list[int]:
        return []

    def accept_token(self, token: int) -> bool:
        self.num_received += 1
        return self.num_received < 3


def test_a_context_whose_matcher_rejects_its_token_fails_alone(
    pipeline: TextGenerationPipeline, caplog: pytest.LogCaptureFixture
) -> None:
    plain_results = output_tokens(run_directly(pipeline, list(contexts().values())))
    batch = contexts()
    matcher: Any = RejectingMatcher()
    batch["bad"].set_matcher(matcher)
    for step in range(3):
        responses = pipeline.execute(batch)
        assert list(responses) == (["good", "bad", "as good"] if step < 2 else ["good", "as good"])
    failure = pipeline.failures.pop("bad")
    assert isinstance(failure, RequestFailedError)
    assert "request bad ended because of an internal error" in str(failure)
    assert "the grammar does not accept" in caplog.text, "the details are logged, but not returned"
    assert "the grammar does not accept" not in str(failure)
    with pytest.raises(InputError, match="request bad has ended"):
        pipeline.execute(batch)
    pipeline.release(batch.pop("bad"))
    assert generate_tokens(pipeline, list(batch.values())) == [
        plain_results["good"][3:],
        plain_results["as good"][3:],
    ]


def test_a_grammar_that_allows_no_token_fails_its_context(pipeline: TextGenerationPipeline) -> None:
    class MatcherWithoutTokens(RejectingMatcher):
        def fill_next_token_bitmask(self, bitmask: torch.Tensor, index: int) -> bool:
            bitmask[index] = 0
            return True

    plain_results = output_tokens(run_directly(pipeline, list(contexts().values())))
    batch = contexts()
    matcher: Any = MatcherWithoutTokens()
    batch["bad"].set_matcher(matcher)
    assert list(pipeline.execute(batch)) == ["good", "as good"]
    failure = pipeline.failures.pop("bad")
    assert str(failure) == (
        "after 0 tokens the grammar allows no token of the model's vocabulary: change the grammar"
    )
    assert isinstance(failure, InputError)
    pipeline.release(batch.pop("bad"))
    assert generate_tokens(pipeline, list(batch.values())) == [
        plain_results["good"][1:],
        plain_results["as good"][1:],
    ]


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize(("num_steps", "num_top"), [(1, None), (4, None), (1, 2)])
def test_non_finite_logits_fail_only_their_context(
    pipeline: TextGenerationPipeline, value: float, num_steps: int, num_top: int | None
) -> None:
    plain_results = output_tokens(run_directly(pipeline, list(contexts().values())))
    num_calls = 0
    execute = pipeline.model.execute

    def execute_with_nan(inputs: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        outputs = execute(inputs)
        logits = outputs.logits.clone()
        if num_calls == 3:
            logits[1, 7] = value
        return with_logits(outputs, logits)

    pipeline.model.execute = execute_with_nan  # type: ignore[method-assign]
    scheduler = Scheduler(pipeline, max_batch_size=4)
    for context in contexts().values():
        context.log_probabilities = num_top
        scheduler.submit(context)
    tokens_by_request: dict[str, list[int]] = {name: [] for name in plain_results}
    while scheduler.has_work:
        for name, response in scheduler.step(num_steps).items():
            tokens_by_request[name] += [token.next_token for token in response.tokens]
    assert list(scheduler.failures) == ["bad"]
    assert "logits that are not finite" in str(scheduler.failures["bad"])
    assert {name: tokens_by_request[name] for name in ("good", "as good")} == {
        name: plain_results[name] for name in ("good", "as good")
    }
    pipeline.kv.check_integrity()


def test_non_finite_logits_after_a_rejected_draft_are_ignored(pipeline: TextGenerationPipeline) -> None:
    plain_results = run_directly(pipeline, list(contexts().values()))
    execute = pipeline.model.execute

    def execute_with_nan(inputs: Any) -> Any:
        outputs = execute(inputs)
        row_ends = inputs.logit_offsets[1:]
        rejected_rows = [number for number, count in enumerate(inputs.drafts or ()) if count == 4]
        logits = outputs.logits.clone()
        logits[row_ends[rejected_rows] - 1] = torch.nan
        return with_logits(outputs, logits)

    pipeline.model.execute = execute_with_nan  # type: ignore[method-assign]
    pipeline.proposer = OracleProposer(output_tokens(plain_results), lambda position: True, 4)
    assert run_directly(pipeline, list(contexts().values())) == plain_results


def test_logits_of_minus_infinity_are_valid(pipeline: TextGenerationPipeline) -> None:
    execute = pipeline.model.execute

    def execute_with_minus_infinity(inputs: Any) -> Any:
        outputs = execute(inputs)
        logits = outputs.logits.clone()
        logits[:, 5:] = -torch.inf
        return with_logits(outputs, logits)

    pipeline.model.execute = execute_with_minus_infinity  # type: ignore[method-assign]
    (tokens,) = generate_tokens(pipeline, [make_context(PROMPT, 9)])
    assert max(tokens) < 5
    assert not pipeline.failures


class SlowCompiler:
    """A grammar compiler that has compiled every grammar from the third call of `ready` on."""

    def __init__(self) -> None:
        self.num_checks = 0

    def ready(self, context: TextContext) -> bool:
        self.num_checks += 1
        if context.grammar is not None and self.num_checks >= 3:
            matcher: Any = RejectingMatcher()
            context.set_matcher(matcher)
        return context.matcher is not None or context.grammar is None


def test_a_context_runs_only_if_its_grammar_is_compiled(pipeline: TextGenerationPipeline) -> None:
    constrained_context = make_context(PROMPT, grammar=Grammar("regex", "a+"))
    assert pipeline.ready(constrained_context)
    with pytest.raises(UnsupportedFeatureError, match="call set_matcher"):
        pipeline.execute({"a": constrained_context})
    grammars: Any = SlowCompiler()
    pipeline.grammars = grammars
    assert pipeline.ready(make_context(PROMPT))
    assert not pipeline.ready(constrained_context)
    with pytest.raises(UnsupportedFeatureError, match="still being compiled"):
        pipeline.execute({"a": constrained_context})
    assert pipeline.ready(constrained_context)
    assert pipeline.execute({"a": constrained_context})["a"].tokens
    pipeline.release(constrained_context)
