"""Stop strings are converted to token sequences, which end the output of ``next_token``."""

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

TOKENIZER_NAMES = ("tinyllama", "qwen3", "gpt2")


@pytest.fixture(scope="module")
def open_tokenizer(shared_data: Path) -> Callable[[str], TextTokenizer]:
    tokenizers: dict[str, TextTokenizer] = {}

    def open_named_tokenizer(name: str) -> TextTokenizer:
        if name not in tokenizers:
            tokenizers[name] = TextTokenizer(shared_data / "tokenizers" / name)
        return tokenizers[name]

    return open_named_tokenizer


def find_sequences(tokenizer: TextTokenizer, stop: str) -> list[list[int]]:
    request = TokenGeneratorRequest("1", 0, "m", prompt="x", stop=stop)
    return tokenizer.build_context(request).eos_sequences


@pytest.mark.parametrize("name", TOKENIZER_NAMES)
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
def test_a_sequence_ends_the_text_at_the_stop_string(
    name: str, stop: str, text: str, open_tokenizer: Callable[[str], TextTokenizer]
) -> None:
    tokenizer = open_tokenizer(name)
    ids = tokenizer.encode_text(text, add_special_tokens=False, limited=False).tolist()
    sequences = find_sequences(tokenizer, stop)
    ends = [
        end
        for end in range(1, len(ids) + 1)
        if any(ids[:end][-len(sequence) :] == sequence for sequence in sequences)
    ]
    token_bytes = [tokenizer.token_bytes(token_id) for token_id in ids]
    expected = next(end for end in range(1, len(ids) + 1) if stop.encode() in b"".join(token_bytes[:end]))
    assert ends[:1] == [expected]


@pytest.mark.parametrize("name", TOKENIZER_NAMES)
@settings(deadline=None, max_examples=40)
@given(stop=st.text("aE\n .é中", min_size=1, max_size=6))
def test_each_sequence_after_the_first_contains_the_stop_string(
    name: str, stop: str, open_tokenizer: Callable[[str], TextTokenizer]
) -> None:
    tokenizer = open_tokenizer(name)
    first_sequence, *other_sequences = find_sequences(tokenizer, stop)
    assert first_sequence
    for sequence in other_sequences:
        assert stop.encode() in b"".join(map(tokenizer.token_bytes, sequence))


def test_a_tokenizer_that_changes_case_has_one_sequence(
    open_tokenizer: Callable[[str], TextTokenizer],
) -> None:
    tokenizer = open_tokenizer("bert-base-uncased")
    assert tokenizer.backend.token_to_id("end") is not None
    assert find_sequences(tokenizer, "END") == [[tokenizer.backend.token_to_id("end")]]


def test_a_string_without_tokens_has_no_sequences() -> None:
    assert stop_sequences("x", lambda texts: [[] for _ in texts], lambda token_id: b"") == []


async def test_a_fake_pipeline_drops_the_token_that_completes_the_stop_string() -> None:
    tokenizer, pipeline = FakeTokenizer(), FakePipeline.saying("one END two")
    context = await tokenizer.new_context(TokenGeneratorRequest("1", 0, "fake", prompt="x", stop="END"))
    tokens = pipeline.execute({"1": context}, num_steps=20)["1"].tokens
    assert (tokenizer.decode_ids([int(token.next_token) for token in tokens]), context.is_done) == (
        "one EN",
        True,
    )


@pytest.mark.parametrize("num_steps", [1, 5])
async def test_next_token_of_a_model_ends_at_the_stop_string(num_steps: int) -> None:
    config = PipelineConfig.from_flat({"model_path": "demo"})
    tokenizer = load_tokenizer(config)
    pipeline = load_pipeline(config, tokenizer)
    params = SamplingParams(max_new_tokens=40, stop=["."])
    plain_params = SamplingParams(max_new_tokens=40)
    texts = []
    for sampling_params in (params, plain_params):
        context = await tokenizer.new_context(
            TokenGeneratorRequest("1", 0, "demo", prompt="Once upon a time", sampling_params=sampling_params)
        )
        text = ""
        while not context.is_done:
            for step in pipeline.next_token({"1": context}, num_steps):
                text += await tokenizer.decode(context, step["1"].next_token)
        pipeline.release(context)
        texts.append(text)
    assert "." in texts[1]
    assert texts[0] == texts[1].partition(".")[0]
