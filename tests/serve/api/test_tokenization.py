"""Tokenization over HTTP, token texts of log probabilities, and detected properties of chat templates."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from support.in_process_server import run_in_process, user_message

import penstock
from penstock.serve.api.choice_decoder import Score
from penstock.serve.api.token_fragments import TokenFragments
from penstock.serve.api.token_scores import ChatScores, CompletionScores
from penstock.testing import FakeTokenizer
from penstock.text.chat_template import ChatTemplate
from penstock.text.tokenizer import TextTokenizer


async def test_tokenize_returns_ids_and_count() -> None:
    async with run_in_process() as server:
        plain_response = (await server.post("/tokenize", prompt="né<|end|>")).json()
        assert plain_response == {
            "count": 4,
            "max_model_len": 2048,
            "tokens": [110, 195, 169, 256],
            "token_strs": None,
        }
        token_texts = (
            await server.http.post("/tokenize", json={"prompt": "né", "return_token_strs": True})
        ).json()
        assert token_texts["token_strs"] == ["n", "\ufffd", "\ufffd"]
        long_response = (await server.post("/tokenize", prompt="x" * 5000)).json()
        assert long_response["count"] == 5000  # this route accepts prompts above the maximum length
        chat_response = (
            await server.post("/tokenize", messages=[user_message("x" * 5000)], add_generation_prompt=False)
        ).json()
        assert chat_response["count"] == 5006
        tools = [{"type": "function", "function": {"name": "f"}}]
        assert (await server.post("/tokenize", messages=[user_message("x")], tools=tools)).json()[
            "count"
        ] > 50


@pytest.mark.parametrize(("is_allowed", "num_special"), [(False, 0), (True, 1)])
async def test_special_tokens_in_user_messages_are_tokens_only_if_allowed(
    is_allowed: bool, num_special: int
) -> None:
    tokenizer = FakeTokenizer(special_tokens_in_content=is_allowed)
    async with run_in_process(tokenizer=tokenizer) as server:
        tokens = (await server.post("/tokenize", messages=[user_message("a<|end|>b")])).json()["tokens"]
        assert tokens.count(256) == num_special
        answer = await server.chat(messages=[user_message("a<|end|>b")])
        assert answer["usage"]["prompt_tokens"] == len(tokens)
        assert (await server.complete(prompt="a<|end|>b"))["usage"]["prompt_tokens"] == 3
        system_message = [{"role": "system", "content": "<|end|>"}, user_message("a")]
        assert (await server.post("/tokenize", messages=system_message)).json()["tokens"].count(256) == 1


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "prompt"),
        ({"prompt": "a", "messages": [user_message("a")]}, "prompt"),
        ({"prompt": "a", "tools": []}, "tools"),
        ({"prompt": 5}, "prompt"),
        ({"messages": [user_message("a")], "add_special_tokens": True}, "add_special_tokens"),
        ({"messages": [user_message([{"type": "image_url", "image_url": {"url": "data:,"}}])]}, "messages"),
        ({"prompt": "a", "text": "b"}, "text"),
    ],
)
async def test_tokenize_refuses_invalid_fields(body: dict[str, Any], param: str) -> None:
    async with run_in_process() as server:
        assert (await server.expect_refusal("/tokenize", **body))["param"] == param


async def test_detokenize_returns_the_text() -> None:
    async with run_in_process() as server:
        response = await server.post("/detokenize", tokens=[110, 195, 169, 256])
        assert response.json() == {"prompt": "né<|end|>"}
        assert (await server.http.post("/detokenize", json={"tokens": []})).json() == {"prompt": ""}
        assert (await server.expect_refusal("/detokenize", tokens=[1, 257]))["param"] == "tokens[1]"
        assert (await server.expect_refusal("/detokenize", tokens=[1, -1]))["param"] == "tokens[1]"
        response = await server.post("/detokenize", tokens=[1], model="other")
        assert response.status_code == 404


def decode_parts(parts: Iterable[bytes]) -> Any:
    return json.loads(b"".join(parts))


def test_chat_log_probabilities_contain_texts_and_bytes_of_tokens() -> None:
    scores = ChatScores(TokenFragments(FakeTokenizer()), num_top=2)
    score = Score(195, float("-inf"), {97: -2.0, 195: float("-inf"), 98: -1.0})
    [entry] = decode_parts(scores.parts([score]))["content"]
    assert entry == {
        "token": "\ufffd",
        "logprob": -9999.0,
        "bytes": [195],
        "top_logprobs": [
            {"token": "b", "logprob": -1.0, "bytes": [98]},
            {"token": "a", "logprob": -2.0, "bytes": [97]},
        ],
    }


def test_completion_log_probabilities_contain_texts_and_offsets_of_tokens() -> None:
    tokenizer = FakeTokenizer()
    scores = CompletionScores(tokenizer, TokenFragments(tokenizer), num_top=1)
    first_part = decode_parts(scores.parts([110, 256], [None, -3.0], [None, {97: -1.0, 256: -3.0}]))
    assert first_part == {
        "text_offset": [0, 1],
        "token_logprobs": [None, -3.0],
        "tokens": ["n", "<|end|>"],
        "top_logprobs": [None, {"a": -1.0, "<|end|>": -3.0}],
    }
    rows = [{195: 0.0}, {169: 0.0}, {98: 0.0}]
    second_part = decode_parts(scores.parts([195, 169, 98], [0.0, 0.0, 0.0], rows))
    assert second_part["text_offset"] == [1, 2, 2]
    assert second_part["tokens"] == ["bytes:\\xc3", "bytes:\\xa9", "b"]


DEMO = Path(penstock.__file__).parent / "demo"
TEXT = "Hello wörld, 漢字 🎉  \n\tx=1 <|im_start|>"


def test_concatenated_token_bytes_are_the_text() -> None:
    for tokenizer in (FakeTokenizer(), TextTokenizer(DEMO)):
        ids = tokenizer.encode_text(TEXT, False).tolist()
        assert b"".join(map(tokenizer.token_bytes, ids)).decode() == TEXT
        assert tokenizer.token_bytes(10**6) == b""


@pytest.mark.parametrize("name", ["gpt2", "llama2xs", "tinyllama"])
def test_the_bytes_of_published_tokenizers_join_to_the_text(name: str, shared_data: Path) -> None:
    folders = [path.parent for path in shared_data.rglob("tokenizer.json") if path.parent.name == name]
    if not folders:
        pytest.skip(f"no tokenizer {name}")
    tokenizer = TextTokenizer(folders[0])
    ids = tokenizer.encode_text(TEXT, False).tolist()
    # Some tokenizers add a space before the first word and remove it when decoding.
    assert b"".join(map(tokenizer.token_bytes, ids)).decode().removeprefix(" ") == TEXT


def test_mentions_and_argument_objects_of_a_template_are_detected() -> None:
    def make_template(source: str) -> ChatTemplate:
        return ChatTemplate({"default": source}, {}, "test")

    assert make_template("{% if m.role == 'developer' %}{% endif %}").mentions("developer")
    assert not make_template("{{ developers }}").mentions("developer")
    concatenated_calls = "{% for c in m.tool_calls or [] %}{{ 'x' + c.function.arguments }}{% endfor %}"
    concatenating_template = f"{{% for m in messages %}}{concatenated_calls}{{% endfor %}}"
    assert not make_template(concatenating_template).takes_argument_objects
    assert make_template(
        concatenating_template.replace("arguments", "arguments | tojson")
    ).takes_argument_objects
    assert TextTokenizer(DEMO).template_takes_argument_objects
    assert FakeTokenizer().template_mentions("message")
    assert not FakeTokenizer(template=None).template_mentions("message")
    assert not FakeTokenizer(template=None).template_takes_argument_objects
