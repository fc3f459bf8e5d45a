"""Completions: the OpenAI format, prompts, choices, limits, seeds, echo, log probabilities and usage."""

from __future__ import annotations

from typing import Any

import pytest
from openai.types import Completion
from support.in_process_server import parse_events, run_in_process

from penstock.dtype import DType
from penstock.kv_cache import KVCacheManager, KVCacheSpec, KVGroup
from penstock.pipelines.core import TextContext
from penstock.testing import FakePipeline


async def test_a_response_has_the_openai_format() -> None:
    async with run_in_process() as server:
        answer = await server.complete(prompt="Hi")
        assert Completion.model_validate(answer).to_dict() == answer
        assert answer["id"].startswith("cmpl-")
        assert answer["object"] == "text_completion"
        [choice] = answer["choices"]
        assert choice == {"index": 0, "text": "Hello!", "logprobs": None, "finish_reason": "stop"}
        assert (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]) == (2, 7)
        response = await server.post("/v1/completions", prompt="Hi", stream=True)
        *chunks, end_event = parse_events(response.text)
        assert end_event == "[DONE]"
        assert all(chunk.keys() == answer.keys() - {"usage"} for chunk in chunks)
        assert [chunk["choices"][0]["finish_reason"] for chunk in chunks][-1] == "stop"


async def test_an_output_without_tokens_has_empty_log_probabilities() -> None:
    async with run_in_process() as server:
        for prompt, max_tokens in (("Hi", 0), (["a", "b"], 0)):
            answer = await server.complete(prompt=prompt, logprobs=2, max_tokens=max_tokens)
            for choice in answer["choices"]:
                assert choice["logprobs"] == {
                    name: [] for name in ("text_offset", "token_logprobs", "tokens", "top_logprobs")
                }


async def test_the_default_limit_is_sixteen_tokens() -> None:
    async with run_in_process(FakePipeline(lambda context: ord("a"))) as server:
        answer = await server.complete()
        assert answer["choices"][0]["text"] == "a" * 16
        assert answer["choices"][0]["finish_reason"] == "length"
    async with run_in_process(
        FakePipeline(lambda context: ord("a")), default_max_tokens_completions=3
    ) as server:
        assert (await server.complete())["choices"][0]["text"] == "aaa"


@pytest.mark.parametrize(
    ("prompt", "prompt_texts"),
    [
        ("ab", ["ab"]),
        (["ab", "c"], ["ab", "c"]),
        ([97, 98], ["ab"]),
        ([[97, 98], [99]], ["ab", "c"]),
        (["é"], ["é"]),
    ],
)
async def test_each_prompt_format_is_completed(prompt: Any, prompt_texts: list[str]) -> None:
    async with run_in_process(FakePipeline.answering(lambda prompt: f"<{prompt}>")) as server:
        answer = await server.complete(prompt=prompt, n=2)
        texts = [choice["text"] for choice in answer["choices"]]
        assert texts == [f"<{text}>" for text in prompt_texts for _ in range(2)]
        assert [choice["index"] for choice in answer["choices"]] == list(range(len(prompt_texts) * 2))
        assert answer["usage"]["prompt_tokens"] == sum(len(text.encode()) for text in prompt_texts)
        assert answer["usage"]["completion_tokens"] == 2 * sum(
            len(text.encode()) + 3 for text in prompt_texts
        )


async def test_equal_prompts_have_different_seeds_unless_a_seed_is_sent() -> None:
    seeds: dict[str, int] = {}

    def choose(context: TextContext) -> int:
        seeds[context.request_id] = context.sampling_params.seed
        return ord("a")

    async with run_in_process(FakePipeline(choose)) as server:
        await server.complete(prompt=["a", "a"], n=2)
        assert len(set(seeds.values())) == len(seeds) == 4
        seeds.clear()
        await server.complete(prompt=["a", "a"], n=2, seed=5)
        assert len(seeds) == 4
        assert len(set(seeds.values())) == 2


async def test_echo_returns_the_prompt() -> None:
    async with run_in_process() as server:
        for prompt, text in (("né", "né"), ([110, 195, 169], "né")):
            answer = await server.complete(prompt=prompt, echo=True, logprobs=1)
            [choice] = answer["choices"]
            assert choice["text"] == f"{text}Hello!"
            rows = choice["logprobs"]
            assert rows["tokens"] == ["n", "bytes:\\xc3", "bytes:\\xa9", *"Hello!"]
            assert rows["text_offset"] == [0, 1, 2, 2, 3, 4, 5, 6, 7]
            assert rows["token_logprobs"] == [None, *[0.0] * 8]
            assert rows["top_logprobs"][0] is None
            assert rows["top_logprobs"][3:] == [{letter: 0.0} for letter in "Hello!"]
            assert answer["usage"]["completion_tokens"] == 7
        prompt_response = await server.complete(prompt="né", echo=True, logprobs=0, max_tokens=0)
        assert prompt_response["choices"][0]["text"] == "né"
        assert len(prompt_response["choices"][0]["logprobs"]["tokens"]) == 3
        assert prompt_response["choices"][0]["finish_reason"] == "length"
        assert prompt_response["usage"]["completion_tokens"] == 0


@pytest.mark.parametrize("stream", [False, True])
async def test_prompt_log_probabilities_are_computed_once_per_prompt_unless_streamed(stream: bool) -> None:
    echo_flags: list[bool] = []

    def choose(context: TextContext) -> int:
        if not len(context.generated_tokens):
            echo_flags.append(context.log_probabilities_echo)
        return 33

    async with run_in_process(FakePipeline(choose)) as server:
        fields = {"prompt": ["abc", "de"], "n": 2, "echo": True, "logprobs": 1, "max_tokens": 1}
        response = await server.post("/v1/completions", **fields, stream=stream)
        texts = {}
        for item in parse_events(response.text)[:-1] if stream else [response.json()]:
            for choice in item["choices"]:
                texts.setdefault(choice["index"], []).extend((choice["logprobs"] or {"tokens": []})["tokens"])
        assert texts == {0: [*"abc!"], 1: [*"abc!"], 2: [*"de!"], 3: [*"de!"]}
    # In a stream, the second choice of a prompt can be sent before the first choice. Each choice therefore
    # computes the log probabilities of its prompt.
    assert sorted(echo_flags) == ([True] * 4 if stream else [False, False, True, True])


async def test_token_ids_are_returned_on_request() -> None:
    async with run_in_process() as server:
        answer = await server.complete(prompt=["a", "bc"], n=2, return_token_ids=True, max_tokens=2)
        assert [choice["prompt_token_ids"] for choice in answer["choices"]] == [
            [97],
            [97],
            [98, 99],
            [98, 99],
        ]
        assert all(choice["token_ids"] == list(b"He") for choice in answer["choices"])


async def test_usage_has_the_number_of_cached_tokens() -> None:
    spec = KVCacheSpec(groups=(KVGroup(layers=(0,), kv_heads=1, head_dim=4, dtype=DType.float32),))
    manager = KVCacheManager(spec, (64,), 16)
    async with run_in_process(FakePipeline.saying("ok", kv=manager)) as server:
        cached_counts = []
        for n in (1, 3):
            answer = await server.complete(prompt="x" * 50, n=n)
            cached_counts.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
            assert answer["usage"]["prompt_tokens"] == 50
        assert cached_counts == [0, 48]
        # The usage does not count blocks that the first of three choices has computed for the others.
        new_prompt_response = await server.complete(prompt="y" * 50, n=3)
        assert new_prompt_response["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
