"""Responses with many log probabilities: the limit of their number, and their encoding in short slices."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from support.in_process_server import InProcessServer, parse_events, run_in_process, user_message
from support.joined_streams import drop_variable_fields, join_chat, join_completion

import penstock.serve.api.json_parts
from penstock.pipelines.core import LogProbabilities, TextContext
from penstock.serve.api.choice_decoder import Score, top_tokens
from penstock.serve.api.json_parts import EncodingTurns, JsonResponse, collect_parts
from penstock.serve.api.token_fragments import MAX_PART_COST, TokenFragments
from penstock.serve.api.token_scores import ChatScores, CompletionScores, prompt_parts
from penstock.testing import FakePipeline, FakeTokenizer
from penstock.worker.messages import PackedLogProbabilities

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
TOKENIZER = FakeTokenizer()
MAX_BYTES = 100 * MAX_PART_COST
"""Maximum size of a part in bytes. A log probability has fewer than 100 bytes and a cost of at least 1."""


def make_score(token_id: int, num_top: int) -> Score:
    return Score(token_id, -0.5, {item % 256: -0.25 - item for item in range(token_id, token_id + num_top)})


SCORES = [make_score(index % 200, 21) for index in range(3000)]


def encode_chat() -> list[bytes]:
    return [*ChatScores(TokenFragments(TOKENIZER), 20).parts(SCORES)]


def encode_completion() -> list[bytes]:
    scores = CompletionScores(TOKENIZER, TokenFragments(TOKENIZER), 20)
    ids = [score.token_id for score in SCORES]
    return [*scores.parts(ids, [score.logprob for score in SCORES], [score.top for score in SCORES])]


def encode_prompt_scores() -> list[bytes]:
    ids, rows = [0, *(score.token_id for score in SCORES)], [(score.logprob, score.top) for score in SCORES]
    return [*prompt_parts(TokenFragments(TOKENIZER), ids, rows, 20, 20)]


@pytest.mark.parametrize("encode", [encode_chat, encode_completion, encode_prompt_scores])
def test_the_size_of_the_parts_of_a_long_response_is_bounded(encode: Any) -> None:
    json_parts = encode()
    assert len(json_parts) >= 3000 * 21 // MAX_PART_COST
    assert max(map(len, json_parts)) < MAX_BYTES
    json.loads(b"".join(json_parts))


def test_the_first_encoding_of_tokens_gives_more_parts_than_the_second() -> None:
    fragments = TokenFragments(TOKENIZER)
    lengths = []
    for _ in range(2):
        json_parts = [
            *ChatScores(fragments, 20).parts([make_score(index, 21) for index in range(0, 200, 20)])
        ]
        lengths.append(len(json_parts))
    assert lengths[0] > lengths[1]


async def test_the_slices_of_two_responses_alternate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(penstock.serve.api.json_parts, "SLICE_SECONDS", 0.0)
    turns, encoding_order = EncodingTurns(), list[str]()

    def encode_parts(name: str) -> Any:
        for _ in range(3):
            encoding_order.append(name)
            yield name.encode()

    bodies = await asyncio.gather(
        collect_parts(encode_parts("a"), turns), collect_parts(encode_parts("b"), turns)
    )
    assert [b"".join(item) for item in bodies] == [b"aaa", b"bbb"]
    assert encoding_order == ["a", "b"] * 3


async def test_each_event_loop_iteration_after_the_first_encodes_at_most_two_parts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(penstock.serve.api.json_parts, "SLICE_SECONDS", 0.0)
    turns, num_parts = EncodingTurns(), 0
    parts_per_iteration: list[int] = []

    def encode_parts() -> Any:
        nonlocal num_parts
        for _ in range(20):
            num_parts += 1
            yield b"x"

    tasks = [asyncio.ensure_future(collect_parts(encode_parts(), turns)) for _ in range(8)]
    while not all(task.done() for task in tasks):
        num_parts_before = num_parts
        await asyncio.sleep(0)
        parts_per_iteration.append(num_parts - num_parts_before)
    assert num_parts == 160
    assert max(parts_per_iteration[1:]) <= 2


async def test_a_long_document_is_sent_in_several_messages() -> None:
    messages: list[Any] = []

    async def send(message: Any) -> None:
        messages.append(message)

    async def receive() -> Any:
        raise AssertionError

    parts = [b"x" * 100_000] * 12
    await JsonResponse(parts)({"type": "http"}, receive, send)
    bodies = [message for message in messages if message["type"] == "http.response.body"]
    assert b"".join(body["body"] for body in bodies) == b"".join(parts)
    assert max(len(body["body"]) for body in bodies) < 400_000
    assert [body["more_body"] for body in bodies] == [True] * (len(bodies) - 1) + [False]
    assert dict(messages[0]["headers"])[b"content-length"] == b"1200000"


def test_packed_log_probabilities_are_unpacked_for_encoding() -> None:
    packed_log_probabilities = PackedLogProbabilities.pack(LogProbabilities([-1.0], [{3: -1.0, 4: -2.0}]))
    (top_entries,) = packed_log_probabilities.top_log_probabilities
    assert not isinstance(top_entries, dict)
    assert top_tokens(top_entries) == {3: -1.0, 4: -2.0}


def choose_letters(context: TextContext) -> int:
    return 97 + len(context.generated_tokens) % 26


async def test_joined_stream_chunks_equal_the_response(monkeypatch: pytest.MonkeyPatch) -> None:
    for seconds in (10.0, 0.0):
        monkeypatch.setattr(penstock.serve.api.json_parts, "SLICE_SECONDS", seconds)
        async with run_in_process(FakePipeline(choose_letters), max_batch_size=8) as server:
            await check_both_routes(server)


async def check_both_routes(server: InProcessServer) -> None:
    stream_fields = {"stream": True, "stream_options": {"include_usage": True}}
    chat_fields = {
        "messages": [user_message("Hi")],
        "max_tokens": 70,
        "n": 3,
        "logprobs": True,
        "top_logprobs": 2,
        "seed": 0,
    }
    response = drop_variable_fields((await server.post(CHAT, **chat_fields)).json())
    assert join_chat(parse_events((await server.post(CHAT, **chat_fields, **stream_fields)).text)) == response
    for choice in response["choices"]:
        tokens = [score["token"] for score in choice["logprobs"]["content"]]
        assert "".join(tokens) == choice["message"]["content"]
    completion_fields = {"prompt": "né", "max_tokens": 70, "n": 3, "logprobs": 2, "echo": True, "seed": 0}
    response = drop_variable_fields((await server.post(COMPLETIONS, **completion_fields)).json())
    assert (
        join_completion(
            parse_events((await server.post(COMPLETIONS, **completion_fields, **stream_fields)).text)
        )
        == response
    )


TOO_MANY_LOGPROBS: list[tuple[str, dict[str, Any], str, list[str]]] = [
    (
        CHAT,
        {"n": 4, "max_tokens": 60, "logprobs": True, "top_logprobs": 4},
        "top_logprobs",
        ["1200", "4 choice(s) x 60 tokens x 5"],
    ),
    (CHAT, {"logprobs": True, "max_tokens": 1500}, "top_logprobs", ["1500", "1 choice(s) x 1500 tokens x 1"]),
    (COMPLETIONS, {"n": 4, "max_tokens": 60, "logprobs": 4}, "logprobs", ["1200"]),
    (
        COMPLETIONS,
        {"prompt": "x" * 600, "echo": True, "max_tokens": 0, "logprobs": 1},
        "logprobs",
        ["1200 of the prompt"],
    ),
]


@pytest.mark.parametrize(("path", "fields", "param", "message_parts"), TOO_MANY_LOGPROBS)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_with_too_many_log_probabilities_is_refused_before_it_runs(
    path: str, fields: dict[str, Any], param: str, message_parts: list[str], stream: bool
) -> None:
    body = {"messages": [user_message("Hi")]} if path == CHAT else {"prompt": "Hi"}
    async with run_in_process(max_logprobs_per_request=1000) as server:
        error = await server.expect_refusal(path, **{**body, **fields, "stream": stream})
        assert error["param"] == param
        for part in [*message_parts, "at most 1000", "--max-logprobs-per-request"]:
            assert part in error["message"]
        assert server.pipeline.batches == []
    async with run_in_process(max_logprobs_per_request=2500) as server:
        response = await server.post(path, **{**body, **fields, "stream": stream})
        assert response.status_code == 200, response.text


async def test_without_an_output_limit_the_log_probability_limit_ends_the_output() -> None:
    body = {"messages": [user_message("Hi")], "logprobs": True, "top_logprobs": 4, "n": 2}
    async with run_in_process(FakePipeline.saying("Hello! " * 9), max_logprobs_per_request=100) as server:
        response = await server.post(CHAT, **body)
        assert response.status_code == 200, response.text
        for choice in response.json()["choices"]:
            assert choice["finish_reason"] == "length"
            assert len(choice["logprobs"]["content"]) == 10  # limit 100 / (2 choices x 5 log probabilities)
        error = await server.expect_refusal(CHAT, **{**body, "max_tokens": 11})
        assert "110" in error["message"]
