"""``tokenizer.decode`` call by call: joined, the texts are the text of all tokens."""

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

NAMES = ("tinyllama", "qwen3", "gpt2", "bert-base-uncased")
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
def opened(shared_data: Path) -> Callable[[str], TextTokenizer]:
    tokenizers: dict[str, TextTokenizer] = {}

    def open_one(name: str) -> TextTokenizer:
        if name not in tokenizers:
            tokenizers[name] = TextTokenizer(shared_data / "tokenizers" / name)
        return tokenizers[name]

    return open_one


def ids_of(tokenizer: TextTokenizer, text: str, special: bool = False) -> list[int]:
    return tokenizer.encode_text(text, special, limited=False).tolist()


def context_with(prompt: list[int], generated: list[int] | None = None) -> TextContext:
    context = TextContext(prompt=prompt, max_length=10_000, tokens=np.array(prompt))
    for token in generated or ():
        context.update(token)
    return context


async def joined(tokenizer: TextTokenizer, context: TextContext, ids: list[int], size: int = 1) -> str:
    pieces = [ids[start : start + size] for start in range(0, len(ids), size)]
    return "".join([await tokenizer.decode(context, piece) for piece in pieces])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("text", TEXTS)
async def test_pieces_of_what_was_generated(
    name: str, text: str, size: int, opened: Callable[[str], TextTokenizer]
) -> None:
    tokenizer = opened(name)
    prompt, ids = ids_of(tokenizer, "One day", True), ids_of(tokenizer, text)
    context = context_with(prompt, ids)
    whole = text_after_prompt(tokenizer, prompt, ids)
    assert await joined(tokenizer, context, ids, size) == whole
    assert await tokenizer.decode(context, ids) == whole
    assert await joined(tokenizer, context, ids) == whole  # and from the beginning again


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("text", TEXTS)
async def test_step_by_step(name: str, text: str, opened: Callable[[str], TextTokenizer]) -> None:
    """Decoded token by token, while another request is decoded."""
    tokenizer = opened(name)
    prompt, ids = ids_of(tokenizer, "One day", True), ids_of(tokenizer, text)
    contexts = [context_with(prompt), context_with(ids_of(tokenizer, "x"))]
    answers = ["", ""]
    for token in ids:
        for index, context in enumerate(contexts):
            context.update(token)
            answers[index] += await tokenizer.decode(context, np.int64(token))  # type: ignore[arg-type]
    assert answers == [text_after_prompt(tokenizer, context.prompt_tokens, ids) for context in contexts]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("text", ["Once upon a time there was", "a  b\n\n c ", "naïve 🎉🎉 中文 ﬁ end"])
async def test_pieces_of_other_tokens(
    name: str, text: str, special: bool, size: int, opened: Callable[[str], TextTokenizer]
) -> None:
    tokenizer = opened(name)
    ids = ids_of(tokenizer, text, special)
    whole = tokenizer.decode_ids(ids)
    for generated in ([], ids_of(tokenizer, "zzz")):
        context = context_with(ids_of(tokenizer, "One day", True), generated)
        assert await joined(tokenizer, context, ids, size) == whole
        assert await tokenizer.decode(context, ids) == whole
        assert await tokenizer.decode(context, ids) == whole
        assert await joined(tokenizer, context, ids, size) == whole


@pytest.mark.parametrize("name", ["tinyllama", "qwen3"])
@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_pieces_of_random_sizes(
    name: str, data: st.DataObject, opened: Callable[[str], TextTokenizer]
) -> None:
    tokenizer = opened(name)
    ids = ids_of(tokenizer, data.draw(st.text("ab é🎉中\n▁\ufffd", max_size=12)))
    prompt = ids_of(tokenizer, data.draw(st.text("ab é🎉中 ", min_size=1, max_size=4)))
    cuts = sorted(data.draw(st.sets(st.integers(0, len(ids)))) | {0, len(ids)})
    context = context_with(prompt, ids)
    context.update_status(TextGenerationStatus.MAXIMUM_LENGTH)

    async def text() -> str:
        return "".join([await tokenizer.decode(context, ids[a:b]) for a, b in pairwise(cuts)])

    assert asyncio.run(text()) == text_after_prompt(tokenizer, prompt, ids)


@pytest.mark.parametrize("name", ["tinyllama", "qwen3"])
async def test_an_incomplete_character_is_emitted_at_the_end(
    name: str, opened: Callable[[str], TextTokenizer]
) -> None:
    tokenizer = opened(name)
    prompt, ids = ids_of(tokenizer, "One"), ids_of(tokenizer, " a\U00013000")[:-1]
    context = context_with(prompt, ids)
    assert await joined(tokenizer, context, ids) == " a"
    context = context_with(prompt, ids)
    context.update_status(TextGenerationStatus.CANCELLED)
    assert await joined(tokenizer, context, ids) == text_after_prompt(tokenizer, prompt, ids)
    assert "\N{REPLACEMENT CHARACTER}" in text_after_prompt(tokenizer, prompt, ids)


async def test_a_repeated_word_of_other_tokens(opened: Callable[[str], TextTokenizer]) -> None:
    tokenizer = opened("tinyllama")
    ids = ids_of(tokenizer, "the the the")
    assert await joined(tokenizer, context_with([1]), ids) == "the the the"


async def test_special_tokens(opened: Callable[[str], TextTokenizer]) -> None:
    tokenizer = opened("tinyllama")
    ids = [*ids_of(tokenizer, "a b"), 2, *ids_of(tokenizer, "c d")]
    context = context_with([1], ids)
    assert await joined(tokenizer, context, ids) == tokenizer.decode_ids(ids) == "a b c d"
    shown = [await tokenizer.decode(context, one, skip_special_tokens=False) for one in ids]
    assert "".join(shown) == tokenizer.decode_ids(ids, False)


async def test_calls_at_once_keep_their_order(opened: Callable[[str], TextTokenizer]) -> None:
    tokenizer = opened("tinyllama")
    ids = ids_of(tokenizer, " ".join(map(str, range(300))))
    context = context_with([1], ids)
    pieces = await asyncio.gather(*(tokenizer.decode(context, one) for one in ids))
    assert "".join(pieces) == tokenizer.decode_ids(ids)


async def test_a_decode_after_tokens_that_were_not_decoded(opened: Callable[[str], TextTokenizer]) -> None:
    tokenizer = opened("tinyllama")
    context = context_with([1], ids_of(tokenizer, "one two three"))
    last = int(context.generated_tokens[-1])
    assert [await tokenizer.decode(context, last) for _ in range(2)] == [" three", " three"]
    assert await tokenizer.decode(context, []) == ""


async def test_decoding_resumes_after_a_whole_decode(opened: Callable[[str], TextTokenizer]) -> None:
    tokenizer = opened("tinyllama")
    the = ids_of(tokenizer, "the")
    context = context_with([1], [*the, *ids_of(tokenizer, "cat")])
    assert await tokenizer.decode(context, context.generated_tokens) == "the cat"
    context.update(the[0])
    assert await tokenizer.decode(context, the[0]) == " the"
    assert await tokenizer.decode(context, context.generated_tokens) == "the cat the"


async def test_a_refused_call_changes_nothing(opened: Callable[[str], TextTokenizer]) -> None:
    tokenizer = opened("tinyllama")
    ids = ids_of(tokenizer, "one two")
    context = context_with([1], ids)
    with pytest.raises(TypeError, match="unknown parameter skip_special; the keyword is skip_special_tokens"):
        await tokenizer.decode(context, ids[:1], skip_special=True)
    assert await joined(tokenizer, context, ids) == "one two"
