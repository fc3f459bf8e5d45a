"""Stop strings end the output of ``next_token``, for every split into ordinary tokens."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.assembly import load_pipeline, load_tokenizer
from penstock.pipelines import PipelineConfig, TextTokenizer
from penstock.pipelines.core import SamplingParams, TokenGeneratorRequest
from penstock.testing import FakePipeline, FakeTokenizer
from penstock.text.stop_sequences import stop_sequences

NAMES = ("tinyllama", "qwen3", "gpt2")


@pytest.fixture(scope="module")
def opened(shared_data: Path) -> Callable[[str], TextTokenizer]:
    tokenizers: dict[str, TextTokenizer] = {}

    def open_one(name: str) -> TextTokenizer:
        if name not in tokenizers:
            tokenizers[name] = TextTokenizer(shared_data / "tokenizers" / name)
        return tokenizers[name]

    return open_one


def runs_of(tokenizer: TextTokenizer, stop: str) -> list[list[int]]:
    request = TokenGeneratorRequest("1", 0, "m", prompt="x", stop=stop)
    return tokenizer.build_context(request).eos_sequences


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("stop", "text"),
    [
        ("END", "the END"),
        ("END", "the\nEND"),
        ("END", "END"),
        ("END", "a-END"),
        ("\n\n", "One day.\n\nHe"),
        ("\n\n", "day?\n\n\nHe"),
        ("User:", "Hello!\nUser: you"),
        (".", "One day. He"),
        ("é", "un é"),
        ("```", "x = 1\n```\n"),
        ("###", "Hello\n### Question"),
    ],
)
def test_a_usual_spelling_is_found(
    name: str, stop: str, text: str, opened: Callable[[str], TextTokenizer]
) -> None:
    tokenizer = opened(name)
    ids = tokenizer.encode_text(text, add_special_tokens=False, limited=False).tolist()
    runs = runs_of(tokenizer, stop)
    ends = [end for end in range(1, len(ids) + 1) if any(ids[:end][-len(run) :] == run for run in runs)]
    pieces = [tokenizer.token_bytes(token_id) for token_id in ids]
    expected = next(end for end in range(1, len(ids) + 1) if stop.encode() in b"".join(pieces[:end]))
    assert ends[:1] == [expected]


@pytest.mark.parametrize("name", NAMES)
@settings(deadline=None, max_examples=40)
@given(stop=st.text("aE\n .é中", min_size=1, max_size=6))
def test_every_run_spells_the_string(name: str, stop: str, opened: Callable[[str], TextTokenizer]) -> None:
    tokenizer = opened(name)
    first, *others = runs_of(tokenizer, stop)
    assert first
    for run in others:
        assert stop.encode() in b"".join(map(tokenizer.token_bytes, run))


def test_a_tokenizer_that_rewrites_text(opened: Callable[[str], TextTokenizer]) -> None:
    tokenizer = opened("bert-base-uncased")
    assert tokenizer.backend.token_to_id("end") is not None
    assert runs_of(tokenizer, "END") == [[tokenizer.backend.token_to_id("end")]]


def test_a_string_without_tokens_has_no_sequences() -> None:
    assert stop_sequences("x", lambda texts: [[] for _ in texts], lambda token_id: b"") == []


async def test_next_token_stops_in_a_fake_pipeline() -> None:
    tokenizer, pipeline = FakeTokenizer(), FakePipeline.saying("one END two")
    context = await tokenizer.new_context(TokenGeneratorRequest("1", 0, "fake", prompt="x", stop="END"))
    tokens = pipeline.execute({"1": context}, num_steps=20)["1"].tokens
    assert (tokenizer.decode_ids([int(token.next_token) for token in tokens]), context.is_done) == (
        "one EN",
        True,
    )


@pytest.mark.parametrize("num_steps", [1, 5])
async def test_next_token_stops(num_steps: int) -> None:
    config = PipelineConfig.from_flat({"model_path": "demo"})
    tokenizer = load_tokenizer(config)
    pipeline = load_pipeline(config, tokenizer)
    params = SamplingParams(max_new_tokens=40, stop=["."])
    plain = SamplingParams(max_new_tokens=40)
    texts = []
    for one in (params, plain):
        context = await tokenizer.new_context(
            TokenGeneratorRequest("1", 0, "demo", prompt="Once upon a time", sampling_params=one)
        )
        text = ""
        while not context.is_done:
            for step in pipeline.next_token({"1": context}, num_steps):
                text += await tokenizer.decode(context, step["1"].next_token)
        pipeline.release(context)
        texts.append(text)
    assert "." in texts[1]
    assert texts[0] == texts[1].partition(".")[0]
