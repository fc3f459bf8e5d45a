"""Incremental ``tokenizer.decode``: the joined texts of several calls equal the text of all their tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.pipelines import TextTokenizer
from penstock.pipelines.core import TextContext, TextGenerationStatus
from penstock.text.detokenizer import text_after_prompt

TOKENIZER_NAMES = ("tinyllama", "qwen3", "gpt2", "bert-base-uncased")
TEXTS = [
    "Once upon a time there was",
    "a  b\n\n c ",
    "naïve 🎉🎉 中文 ﬁ end",
    "🎉",
    "x",
    " lead",
    "the the the",
]


@pytest.fixture(scope="module")
def open_tokenizer(shared_data: Path) -> Callable[[str], TextTokenizer]:
    tokenizers: dict[str, TextTokenizer] = {}

    def open_named_tokenizer(name: str) -> TextTokenizer:
        if name not in tokenizers:
            tokenizers[name] = TextTokenizer(shared_data / "tokenizers" / name)
        return tokenizers[name]

    return open_named_tokenizer


def encode(tokenizer: TextTokenizer, text: str, add_special_tokens: bool = False) -> list[int]:
    return tokenizer.encode_text(text, add_special_tokens, limited=False).tolist()


def make_context(prompt: list[int], generated: list[int] | None = None) -> TextContext:
    context = TextContext(prompt=prompt, max_length=10_000, tokens=np.array(prompt))
    for token in generated or ():
        context.update(token)
    return context


async def decode_in_chunks(
    tokenizer: TextTokenizer, context: TextContext, ids: list[int], chunk_size: int = 1
) -> str:
    chunks = [ids[start : start + chunk_size] for start in range(0, len(ids), chunk_size)]
    return "".join([await tokenizer.decode(context, chunk) for chunk in chunks])


@pytest.mark.parametrize("name", TOKENIZER_NAMES)
@pytest.mark.parametrize("chunk_size", [1, 2, 3])
@pytest.mark.parametrize("text", TEXTS)
async def test_chunks_of_generated_tokens_join_to_the_text(
    name: str, text: str, chunk_size: int, open_tokenizer: Callable[[str], TextTokenizer]
) -> None:
    tokenizer = open_tokenizer(name)
    prompt, ids = encode(tokenizer, "One day", True), encode(tokenizer, text)
    context = make_context(prompt, ids)
    expected = text_after_prompt(tokenizer, prompt, ids)
    assert await decode_in_chunks(tokenizer, context, ids, chunk_size) == expected
    assert await tokenizer.decode(context, ids) == expected
    # Passing the first generated tokens again restarts the text.
    assert await decode_in_chunks(tokenizer, context, ids) == expected


@pytest.mark.parametrize("name", TOKENIZER_NAMES)
@pytest.mark.parametrize("text", TEXTS)
async def test_two_requests_can_be_decoded_alternately(
    name: str, text: str, open_tokenizer: Callable[[str], TextTokenizer]
) -> None:
    """Two contexts are decoded alternately, one token at a time."""
    tokenizer = open_tokenizer(name)
    prompt, ids = encode(tokenizer, "One day", True), encode(tokenizer, text)
    contexts = [make_context(prompt), make_context(encode(tokenizer, "x"))]
    texts = ["", ""]
    for token in ids:
        for index, context in enumerate(contexts):
            context.update(token)
            texts[index] += await tokenizer.decode(context, np.int64(token))  # type: ignore[arg-type]
    assert texts == [text_after_prompt(tokenizer, context.prompt_tokens, ids) for context in contexts]


@pytest.mark.parametrize("name", TOKENIZER_NAMES)
@pytest.mark.parametrize("chunk_size", [1, 2])
@pytest.mark.parametrize("add_special_tokens", [False, True])
@pytest.mark.parametrize("text", ["Once upon a time there was", "a  b\n\n c ", "naïve 🎉🎉 中文 ﬁ end"])
async def test_chunks_of_tokens_that_are_not_generated_join_to_the_text(
    name: str,
    text: str,
    add_special_tokens: bool,
    chunk_size: int,
    open_tokenizer: Callable[[str], TextTokenizer],
) -> None:
    tokenizer = open_tokenizer(name)
    ids = encode(tokenizer, text, add_special_tokens)
    expected = tokenizer.decode_ids(ids)
    for generated in ([], encode(tokenizer, "zzz")):
        context = make_context(encode(tokenizer, "One day", True), generated)
        assert await decode_in_chunks(tokenizer, context, ids, chunk_size) == expected
        assert await tokenizer.decode(context, ids) == expected
        assert await tokenizer.decode(context, ids) == expected
        assert await decode_in_chunks(tokenizer, context, ids, chunk_size) == expected


@pytest.mark.parametrize("name", ["tinyllama", "qwen3"])
@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_chunks_of_random_sizes_join_to_the_text(
    name: str, data: st.DataObject, open_tokenizer: Callable[[str], TextTokenizer]
) -> None:
    tokenizer = open_tokenizer(name)
    ids = encode(tokenizer, data.draw(st.text("ab é🎉中\n▁\ufffd", max_size=12)))
    prompt = encode(tokenizer, data.draw(st.text("ab é🎉中 ", min_size=1, max_size=4)))
    boundaries = sorted(data.draw(st.sets(st.integers(0, len(ids)))) | {0, len(ids)})
    context = make_context(prompt, ids)
    context.update_status(TextGenerationStatus.MAXIMUM_LENGTH)

    async def decode_chunks() -> str:
        return "".join(
            [await tokenizer.decode(context, ids[start:end]) for start, end in pairwise(boundaries)]
        )

    assert asyncio.run(decode_chunks()) == text_after_prompt(tokenizer, prompt, ids)


@pytest.mark.parametrize("name", ["tinyllama", "qwen3"])
async def test_an_incomplete_character_is_returned_at_the_end_of_the_output(
    name: str, open_tokenizer: Callable[[str], TextTokenizer]
) -> None:
    tokenizer = open_tokenizer(name)
    prompt, ids = encode(tokenizer, "One"), encode(tokenizer, " a\U00013000")[:-1]
    context = make_context(prompt, ids)
    assert await decode_in_chunks(tokenizer, context, ids) == " a"
    context = make_context(prompt, ids)
    context.update_status(TextGenerationStatus.CANCELLED)
    assert await decode_in_chunks(tokenizer, context, ids) == text_after_prompt(tokenizer, prompt, ids)
    assert "\N{REPLACEMENT CHARACTER}" in text_after_prompt(tokenizer, prompt, ids)


async def test_tokens_that_are_not_generated_may_repeat_words(
    open_tokenizer: Callable[[str], TextTokenizer],
) -> None:
    tokenizer = open_tokenizer("tinyllama")
    ids = encode(tokenizer, "the the the")
    assert await decode_in_chunks(tokenizer, make_context([1]), ids) == "the the the"


async def test_special_tokens_are_skipped_or_decoded(open_tokenizer: Callable[[str], TextTokenizer]) -> None:
    tokenizer = open_tokenizer("tinyllama")
    ids = [*encode(tokenizer, "a b"), 2, *encode(tokenizer, "c d")]
    context = make_context([1], ids)
    assert await decode_in_chunks(tokenizer, context, ids) == tokenizer.decode_ids(ids) == "a b c d"
    texts = [await tokenizer.decode(context, token_id, skip_special_tokens=False) for token_id in ids]
    assert "".join(texts) == tokenizer.decode_ids(ids, False)


async def test_concurrent_calls_keep_their_order(open_tokenizer: Callable[[str], TextTokenizer]) -> None:
    tokenizer = open_tokenizer("tinyllama")
    ids = encode(tokenizer, " ".join(map(str, range(300))))
    context = make_context([1], ids)
    chunks = await asyncio.gather(*(tokenizer.decode(context, token_id) for token_id in ids))
    assert "".join(chunks) == tokenizer.decode_ids(ids)


async def test_the_last_generated_token_can_be_decoded_alone(
    open_tokenizer: Callable[[str], TextTokenizer],
) -> None:
    tokenizer = open_tokenizer("tinyllama")
    context = make_context([1], encode(tokenizer, "one two three"))
    last_token = int(context.generated_tokens[-1])
    assert [await tokenizer.decode(context, last_token) for _ in range(2)] == [" three", " three"]
    assert await tokenizer.decode(context, []) == ""


async def test_incremental_decoding_continues_after_decoding_all_tokens(
    open_tokenizer: Callable[[str], TextTokenizer],
) -> None:
    tokenizer = open_tokenizer("tinyllama")
    word_ids = encode(tokenizer, "the")
    context = make_context([1], [*word_ids, *encode(tokenizer, "cat")])
    assert await tokenizer.decode(context, context.generated_tokens) == "the cat"
    context.update(word_ids[0])
    assert await tokenizer.decode(context, word_ids[0]) == " the"
    assert await tokenizer.decode(context, context.generated_tokens) == "the cat the"


async def test_a_refused_call_does_not_change_the_state(
    open_tokenizer: Callable[[str], TextTokenizer],
) -> None:
    tokenizer = open_tokenizer("tinyllama")
    ids = encode(tokenizer, "one two")
    context = make_context([1], ids)
    with pytest.raises(TypeError, match="unknown parameter skip_special; the keyword is skip_special_tokens"):
        await tokenizer.decode(context, ids[:1], skip_special=True)
    assert await decode_in_chunks(tokenizer, context, ids) == "one two"
