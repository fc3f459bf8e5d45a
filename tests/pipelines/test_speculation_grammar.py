"""Speculation with grammars: drafts that a grammar rejects, and tokens that a grammar forces."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from support.pipeline_steps import make_context, open_pipeline
from support.speculation import OracleProposer, output_tokens, run_directly, run_scheduled
from support.tiny_llm import EOS, VOCABULARY, write_tiny_llm
from tokenizers import Tokenizer

from penstock.grammar import forced_tokens
from penstock.pipelines import TextGenerationPipeline
from penstock.pipelines.core import SamplingParams, TextContext, TextGenerationStatus
from penstock.pipelines.speculative import NGramProposer

xgr = pytest.importorskip("xgrammar")

pytestmark = pytest.mark.models

GRAMMARS = {
    "open": '[a-z]+ [0-9]+"',
    "forced": r'\{"name": "[a-z]{2,9}", "description": [0-9]{1,3}, "end": true\}',
    "one text": "exactly this text and nothing else",
}
PARAMETERS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"sampling_params": SamplingParams(temperature=1.0, top_k=-1, seed=3)},
    "penalized": {
        "sampling_params": SamplingParams(temperature=1.0, top_k=-1, seed=4, frequency_penalty=1.5)
    },
    "at least": {"sampling_params": SamplingParams(temperature=1.0, top_k=-1, seed=5, min_new_tokens=8)},
    "scored": {"log_probabilities": 2},
    "stops": {"eos_sequences": [[ord("e") - 33, ord("n") - 33]]},
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llm(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def compiler(checkpoint: Path) -> Any:
    vocabulary = Tokenizer.from_file(str(checkpoint / "tokenizer.json")).get_vocab()
    words = sorted(vocabulary, key=lambda word: vocabulary[word])
    info = xgr.TokenizerInfo(
        words, xgr.VocabType.BYTE_LEVEL, vocab_size=VOCABULARY, stop_token_ids=[EOS], add_prefix_space=False
    )
    return xgr.GrammarCompiler(info, max_threads=1)


@pytest.fixture
def pipeline(checkpoint: Path) -> TextGenerationPipeline:
    pipeline = open_pipeline(checkpoint, deterministic=True, kv_cache_block_size=16)
    run_directly(pipeline, [make_context([1], 1)])
    return pipeline


def grammar_contexts(compiler: Any, max_new_tokens: int = 70) -> list[TextContext]:
    """Return a context for each pair of a grammar and an entry of PARAMETERS, and two without a grammar.

    The entry "at least" is left out if ``max_new_tokens`` is below its minimum number of tokens.
    """
    contexts = []
    for pattern, text in GRAMMARS.items():
        for parameters_name, fields in PARAMETERS.items():
            if parameters_name == "at least" and max_new_tokens < 8:
                continue
            context = TextContext(
                prompt="",
                tokens=make_context([70, 71, 72]).all_tokens,
                max_length=3 + max_new_tokens,
                eos_token_ids={EOS},
                request_id=f"{pattern}, {parameters_name}",
                **fields,
            )
            compiled_grammar = compiler.compile_regex(text)
            context.set_matcher(xgr.GrammarMatcher(compiled_grammar))
            contexts.append(context)
    return [
        *contexts,
        make_context([5, 6, 7], 30, request_id="free"),
        make_context([8], 40, request_id="free too"),
    ]


@pytest.fixture
def plain_results(pipeline: TextGenerationPipeline, compiler: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return the results without drafts and without forced tokens."""
    with monkeypatch.context() as patch:
        patch.setattr("penstock.pipelines.drafting.forced_tokens", lambda *_: [])
        results = run_directly(pipeline, grammar_contexts(compiler))
    assert not pipeline.speculation_stats.num_forced
    decode = Tokenizer.from_file(str(Path(pipeline.config.model.checkpoint) / "tokenizer.json")).decode
    assert decode(output_tokens(results)["one text, sampled"]) == GRAMMARS["one text"]
    assert results["one text, sampled"][-1] is TextGenerationStatus.END_OF_SEQUENCE
    return results


def test_forced_tokens_do_not_change_the_output(
    pipeline: TextGenerationPipeline, compiler: Any, plain_results: Any
) -> None:
    assert run_directly(pipeline, grammar_contexts(compiler)) == plain_results
    assert pipeline.speculation_stats.num_forced > 300
    assert pipeline.speculation_stats.num_proposed == 0


@pytest.mark.parametrize("max_new_tokens", [1, 2, 5, 34, 35, 36])
def test_forced_tokens_do_not_change_the_output_at_any_maximum_length(
    pipeline: TextGenerationPipeline, compiler: Any, max_new_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = run_directly(pipeline, grammar_contexts(compiler, max_new_tokens))
    monkeypatch.setattr("penstock.pipelines.drafting.forced_tokens", lambda *_: [])
    assert run_directly(pipeline, grammar_contexts(compiler, max_new_tokens)) == results


def test_forced_tokens_are_computed_in_one_forward(pipeline: TextGenerationPipeline, compiler: Any) -> None:
    context = grammar_contexts(compiler)[len(PARAMETERS) * 2]
    num_calls = 0
    execute = pipeline.model.execute

    def count_execute(inputs: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        return execute(inputs)

    pipeline.model.execute = count_execute  # type: ignore[method-assign]
    run_directly(pipeline, [context])
    assert num_calls == 1, "one forward computes the prompt and the forced text"


def test_forced_tokens_are_searched_once_for_each_length(
    pipeline: TextGenerationPipeline, compiler: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    searched_lengths: list[int] = []

    def count_call(context: TextContext, *limits: int) -> list[int]:
        searched_lengths.append(context.current_length)
        return forced_tokens(context, *limits)

    monkeypatch.setattr("penstock.pipelines.drafting.forced_tokens", count_call)
    run_directly(pipeline, grammar_contexts(compiler)[:1])
    assert len(searched_lengths) == len(set(searched_lengths)) > 10


@pytest.mark.parametrize("draft_pattern", [0, 1, 3])
def test_drafts_with_grammars_do_not_change_the_output(
    pipeline: TextGenerationPipeline, compiler: Any, plain_results: Any, draft_pattern: int
) -> None:
    is_wrong = {0: lambda position: False, 1: lambda position: True, 3: lambda position: position % 3 == 2}[
        draft_pattern
    ]
    pipeline.proposer = OracleProposer(output_tokens(plain_results), is_wrong, 5)
    assert run_directly(pipeline, grammar_contexts(compiler)) == plain_results
    stats = pipeline.speculation_stats
    assert stats.num_proposed > 20
    assert draft_pattern == 1 or stats.num_accepted > 20


def test_n_gram_drafts_with_grammars_do_not_change_the_output(
    pipeline: TextGenerationPipeline, compiler: Any, plain_results: Any
) -> None:
    pipeline.proposer = NGramProposer(1, 2)
    assert run_directly(pipeline, grammar_contexts(compiler)) == plain_results


def test_small_scheduler_limits_do_not_change_the_output(
    pipeline: TextGenerationPipeline, compiler: Any, plain_results: Any
) -> None:
    pipeline.proposer = NGramProposer(1, 2)
    limits = {"max_batch_size": 4, "max_batch_input_tokens": 9, "min_chunk_size": 2}
    results, _ = run_scheduled(pipeline, grammar_contexts(compiler), **limits)
    assert results == plain_results


def test_a_draft_is_truncated_at_the_first_token_that_the_grammar_refuses(
    pipeline: TextGenerationPipeline, compiler: Any, plain_results: Any
) -> None:
    class EndTokenProposer:
        observed: list[int]

        def __init__(self) -> None:
            self.observed = []

        def propose(self, contexts: Sequence[TextContext], limits: Sequence[int]) -> list[list[int]]:
            return [[EOS, EOS, 1, 2] for _ in contexts]

        def observe(self, contexts: Any, drafts: Sequence[list[int]], num_accepted: Sequence[int]) -> None:
            self.observed += [
                len(draft) for draft, context in zip(drafts, contexts, strict=True) if context.matcher
            ]

        def release(self, context: TextContext) -> None:
            pass

    pipeline.proposer = proposer = EndTokenProposer()
    assert run_directly(pipeline, grammar_contexts(compiler)) == plain_results
    assert max(proposer.observed) == 1, "an end token may be drafted, but no token after it"
