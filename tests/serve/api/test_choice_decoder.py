"""The text, finish reason and token counts of `ChoiceDecoder`, and the offsets of `CompletionScores`."""

from __future__ import annotations

import doctest
import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.in_process_server import HERMES, THINKING
from support.random_draws import num_examples

import penstock.serve.api.choice_decoder
import penstock.serve.http.sse
from penstock.pipelines.core import (
    LogProbabilities,
    SamplingParams,
    TextContext,
    TextGenerationStatus,
    TokenGeneratorRequest,
)
from penstock.serve.api.choice_decoder import ChoiceDecoder, ChoiceDelta, finish_reason
from penstock.serve.api.token_fragments import TokenFragments
from penstock.serve.api.token_scores import CompletionScores
from penstock.serve.parsers import ParserFactory, ToolCallStart, merge_events
from penstock.testing import FakeTokenizer
from penstock.text.tokenizer import TextTokenizer

ACTIVE, END, LENGTH = (
    TextGenerationStatus.ACTIVE,
    TextGenerationStatus.END_OF_SEQUENCE,
    TextGenerationStatus.MAXIMUM_LENGTH,
)
TOKENIZER = FakeTokenizer()
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
CALL = '<tool_call>{"name": "f", "arguments": {"a": "é"}}</tool_call>'


def make_context(**params: Any) -> TextContext:
    return TOKENIZER.build_context(
        TokenGeneratorRequest("1", 0, "fake", prompt="Hi", sampling_params=SamplingParams(**params))
    )


def make_choice(
    context: TextContext, template: str | None, parallel_calls: bool = True, **decoder_options: Any
) -> ChoiceDecoder:
    parsers = ParserFactory.choose(template)
    parser = parsers.new(tools=TOOLS, parallel=parallel_calls, new_id=lambda: "id") if template else None
    parses_each_token = parsers.reasoning_format_name is not None or not parallel_calls
    return ChoiceDecoder(
        context, TOKENIZER, parser=parser, parses_each_token=parses_each_token, **decoder_options
    )


def decode_in_chunks(
    choice: ChoiceDecoder, ids: Sequence[int], chunk_bounds: Sequence[int], status: TextGenerationStatus
) -> Any:
    """Decode tokens in chunks until the choice ends, and return the output of all chunks.

    Each chunk bound is a position in `ids`, modulo ``len(ids) + 1``. The output is a tuple of the merged
    events, the token ids, the ids of the scored tokens, the finish reason, the number of tokens, and the
    number of reasoning tokens.
    """
    bounds = [0, *sorted(bound % (len(ids) + 1) for bound in chunk_bounds), len(ids)]
    deltas: list[ChoiceDelta] = []
    for start, end in pairwise(bounds):
        log_probabilities = [
            LogProbabilities([-1.0 * token_id], [{token_id: -1.0 * token_id}]) for token_id in ids[start:end]
        ]
        deltas.append(choice.take(ids[start:end], status if end == len(ids) else ACTIVE, log_probabilities))
        if deltas[-1].finish_reason:
            break
    else:
        deltas.append(choice.take([], status))
    return (
        merge_events([event for delta in deltas for event in delta.events]),
        [token_id for delta in deltas for token_id in delta.token_ids],
        [score.token_id for delta in deltas for score in delta.scores],
        deltas[-1].finish_reason,
        choice.num_tokens,
        choice.num_reasoning_tokens,
    )


texts = st.lists(
    st.sampled_from(
        ["a", "b", "é", "🎉", " ", "\n", "<think>", "</think>", "<tool", CALL, "stop", "st", "\ufffd"]
    ),
    max_size=12,
).map("".join)


@settings(max_examples=num_examples(150))
@given(
    text=texts,
    chunk_bounds=st.lists(st.integers(0, 400), max_size=8),
    stop=st.lists(st.sampled_from(["stop", "b<", "é", "op", "</think>a"]), max_size=2),
    template=st.sampled_from([None, HERMES, THINKING]),
    parallel_calls=st.booleans(),
    status=st.sampled_from([END, LENGTH]),
    omits_last_byte=st.booleans(),
)
def test_output_does_not_depend_on_token_chunks(
    text: str,
    chunk_bounds: list[int],
    stop: list[str],
    template: str | None,
    parallel_calls: bool,
    status: TextGenerationStatus,
    omits_last_byte: bool,
) -> None:
    ids = list(text.encode())
    if omits_last_byte:  # the last character is then incomplete if it has several bytes
        ids = ids[:-1]
    context = make_context(stop=stop or None)
    expected = decode_in_chunks(
        make_choice(context, template, parallel_calls, may_decode_at_end=True), ids, [], status
    )
    assert (
        decode_in_chunks(make_choice(context, template, parallel_calls), ids, chunk_bounds, status)
        == expected
    )
    assert (
        decode_in_chunks(
            make_choice(context, template, parallel_calls, may_decode_at_end=True), ids, chunk_bounds, status
        )
        == expected
    )
    assert (
        decode_in_chunks(make_choice(context, template, parallel_calls), ids, range(len(ids)), status)
        == expected
    )
    _, token_ids, scored_ids, reason, num_tokens, num_reasoning_tokens = expected
    assert scored_ids == token_ids == ids[: len(token_ids)]
    assert num_tokens - len(token_ids) == (
        reason != "length" and len(token_ids) == len(ids) and num_tokens > len(ids)
    )
    assert 0 <= num_reasoning_tokens <= len(token_ids)


@pytest.mark.parametrize(
    ("status", "ended_by_text", "has_tool_calls", "reason"),
    [
        (END, False, False, "stop"),
        (END, False, True, "tool_calls"),
        (LENGTH, False, False, "length"),
        (LENGTH, False, True, "length"),
        (ACTIVE, True, False, "stop"),
        (LENGTH, True, False, "stop"),
        (ACTIVE, True, True, "tool_calls"),
    ],
)
def test_each_end_of_an_output_has_its_finish_reason(
    status: TextGenerationStatus, ended_by_text: bool, has_tool_calls: bool, reason: str
) -> None:
    assert finish_reason(status, ended_by_text=ended_by_text, has_tool_calls=has_tool_calls) == reason


def test_the_eos_token_is_counted_but_not_in_the_text() -> None:
    events, ids, _, reason, num_tokens, _ = decode_in_chunks(
        make_choice(make_context(), None), [97, 98], [], END
    )
    assert ([event.text for event in events], ids, reason, num_tokens) == (["ab"], [97, 98], "stop", 3)
    *_, reason, num_tokens, _ = decode_in_chunks(make_choice(make_context(), None), [97, 98], [], LENGTH)
    assert (reason, num_tokens) == ("length", 2)


def test_tokens_after_a_stop_string_are_dropped() -> None:
    choice = make_choice(make_context(stop=["b"]), None)
    events, ids, scored_ids, reason, num_tokens, _ = decode_in_chunks(choice, list(b"aabcc"), [], LENGTH)
    assert ([event.text for event in events], ids, scored_ids) == (["aa"], list(b"aab"), list(b"aab"))
    assert (reason, num_tokens) == ("stop", 3)
    assert choice.ended_by_text
    assert choice.take([99], END).token_ids == []
    assert choice.num_tokens == 3


def test_the_first_call_ends_the_choice_without_parallel_calls() -> None:
    choice = make_choice(make_context(), HERMES, parallel_calls=False)
    events, ids, _, reason, num_tokens, _ = decode_in_chunks(choice, list((CALL + CALL).encode()), [], ACTIVE)
    assert sum(isinstance(event, ToolCallStart) for event in events) == 1
    assert (reason, choice.ended_by_text) == ("tool_calls", True)
    assert num_tokens == len(ids) <= len(CALL.encode())


def test_reasoning_tokens_are_counted() -> None:
    text = "<think>abc</think>de"
    assert decode_in_chunks(make_choice(make_context(), THINKING), list(text.encode()), [], END)[-1] == len(
        "<think>abc</think>"
    )
    assert decode_in_chunks(make_choice(make_context(), THINKING), list(b"<think>abc"), [], LENGTH)[
        -1
    ] == len("<think>abc")
    assert decode_in_chunks(make_choice(make_context(), THINKING), list(b"abc"), [], END)[-1] == 0


@pytest.mark.parametrize("may_decode_at_end", [False, True])
def test_the_text_starts_with_a_space_only_after_a_word_of_the_prompt(
    shared_data: Path, may_decode_at_end: bool
) -> None:
    tokenizer = TextTokenizer(shared_data / "models/stories260K")
    prompt_ids, answer_ids = (
        tokenizer.encode_text(text, add_special_tokens=False) for text in ("One day", "the")
    )
    for prompt_with_bos, text in (([1, *prompt_ids.tolist()], " the"), ([*prompt_ids.tolist(), 1], "the")):
        context = tokenizer.build_context(TokenGeneratorRequest("1", 0, "m", prompt=prompt_with_bos))
        choice = ChoiceDecoder(context, tokenizer, may_decode_at_end=may_decode_at_end)
        assert choice.decodes_at_end == may_decode_at_end
        assert choice.take(answer_ids.tolist(), END).content == text


def test_offsets_count_a_leading_space_only_if_the_text_has_one(shared_data: Path) -> None:
    tokenizer = TextTokenizer(shared_data / "models/stories260K")
    word_ids, prompt_ids = (
        tokenizer.encode_text(text, add_special_tokens=False).tolist() for text in ("the", "One")
    )
    for previous_ids, offsets in ((prompt_ids, [0, 4, 8]), ((), [0, 3, 7])):
        scores = CompletionScores(tokenizer, TokenFragments(tokenizer), 1, prompt=previous_ids)
        json_parts = (
            [*scores.parts(word_ids * 2, [-1.0] * 2, [{}] * 2)],
            [*scores.parts(word_ids, [-1.0], [{}])],
        )
        actual_offsets = [
            offset for part_list in json_parts for offset in json.loads(b"".join(part_list))["text_offset"]
        ]
        assert actual_offsets == offsets


def test_max_tokens_zero_returns_no_tokens() -> None:
    choice = make_choice(make_context(max_new_tokens=0), None)
    rows = LogProbabilities([-1.0, -2.0], [{72: -1.0}, {97: -2.0}])
    delta = choice.take([97], LENGTH, [rows])
    assert (delta.events, delta.token_ids, delta.scores, delta.finish_reason) == ([], [], [], "length")
    assert (choice.prompt_scores, choice.num_tokens) == ([(-1.0, {72: -1.0})], 0)


@pytest.mark.parametrize("module", [penstock.serve.api.choice_decoder, penstock.serve.http.sse])
def test_the_examples_in_the_docstrings_run(module: Any) -> None:
    results = doctest.testmod(module)
    assert results.attempted > 0
    assert results.failed == 0
