"""`Detokenizer`: the joined texts of all calls equal the text of all ids decoded in one call.

The text begins after the text of the prompt, and ends before the first stop string.
"""

from __future__ import annotations

import doctest
from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from support.random_draws import num_examples
from tokenizers import Tokenizer, decoders, models

import penstock.text.detokenizer
from penstock.testing import FakeTokenizer
from penstock.text.detokenizer import Detokenizer, prompt_text, text_after_prompt
from penstock.text.tokenizer import TextTokenizer
from penstock.text.tokenizer_files import TokenizerFiles

TOKENIZERS = ["tokenizers/bert-base-uncased", "tokenizers/gpt2", "tokenizers/qwen3", "tokenizers/tinyllama"]
TOKENIZERS += ["models/stories260K"]
BYTE_TOKENIZER = FakeTokenizer()


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("skip_special_tokens", [True, False])
def test_appended_texts_join_to_the_text_of_all_ids(
    name: str, skip_special_tokens: bool, shared_data: Path
) -> None:
    tokenizer = load_tokenizer(shared_data / name)

    @given(ids=token_id_lists(tokenizer))
    @settings(max_examples=num_examples(30))
    def check(ids: list[int]) -> None:
        detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip_special_tokens)
        texts = [detokenizer.append(token_id) for token_id in ids] + [detokenizer.finish()]
        assert "".join(texts) == detokenizer.text == tokenizer.decode_ids(ids, skip_special_tokens)
        assert detokenizer.num_tokens == len(ids)

    check()


@pytest.mark.parametrize(
    "decoder",
    [
        None,
        decoders.Metaspace(),
        decoders.BPEDecoder(),
        decoders.WordPiece(),
        decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]),
    ],
    ids=str,
)
@given(ids=st.lists(st.integers(0, 12), max_size=40))
def test_decoded_text_equals_that_of_the_library(decoder: decoders.Decoder | None, ids: list[int]) -> None:
    vocabulary = ["▁", "▁a", "b", "c</w>", "##d", " ", ".", "'t", "\N{REPLACEMENT CHARACTER}"]
    vocabulary += ["<0xC3>", "<0xA9>", "<0x0A>"]
    backend = Tokenizer(models.WordLevel({token: i for i, token in enumerate(vocabulary)}, unk_token="b"))
    backend.add_special_tokens(["<s>"])
    if decoder is not None:
        backend.decoder = decoder
    tokenizer = TextTokenizer(TokenizerFiles(backend, {}, {}, (), "test", 13, None))
    detokenizer = Detokenizer(tokenizer)
    texts = [detokenizer.append(token_id) for token_id in ids] + [detokenizer.finish()]
    assert "".join(texts) == backend.decode(ids)


@given(ids=st.lists(st.integers(0, BYTE_TOKENIZER.EOS), max_size=60))
def test_random_bytes_join_to_the_text_of_all_ids(ids: list[int]) -> None:
    detokenizer = Detokenizer(BYTE_TOKENIZER)
    texts = [detokenizer.append(token_id) for token_id in ids] + [detokenizer.finish()]
    assert "".join(texts) == BYTE_TOKENIZER.decode_ids(ids)


@given(text=st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\N{REPLACEMENT CHARACTER}")))
def test_a_character_is_emitted_with_its_last_byte(text: str) -> None:
    detokenizer = Detokenizer(BYTE_TOKENIZER)
    for character in text:
        *leading_bytes, last_byte = character.encode()
        assert [detokenizer.append(byte) for byte in leading_bytes] == [""] * len(leading_bytes)
        assert detokenizer.append(last_byte) == character
    assert detokenizer.finish() == ""


@given(text=st.text("ab\n\u00e9", max_size=20), stop=st.lists(st.text("ab\n\u00e9", max_size=4), max_size=3))
def test_text_ends_before_the_first_stop_string(text: str, stop: list[str]) -> None:
    detokenizer = Detokenizer(BYTE_TOKENIZER, stop)
    ids = list(text.encode())
    visible_text = detokenizer.append(ids) + detokenizer.finish()
    assert (visible_text, detokenizer.stop_match, detokenizer.num_tokens) == search_stop_strings(text, stop)


@pytest.mark.parametrize("name", ["tokenizers/gpt2", "tokenizers/tinyllama", "models/stories260K"])
def test_the_text_and_the_first_stop_match_do_not_depend_on_chunks(name: str, shared_data: Path) -> None:
    tokenizer = load_tokenizer(shared_data / name)
    text = st.text("ab \n\u00e9\U0001f389", max_size=30)

    @given(
        text=text, stop=st.lists(st.text("ab \n\u00e9", min_size=1, max_size=3), max_size=3), data=st.data()
    )
    @settings(max_examples=num_examples(60))
    def check(text: str, stop: list[str], data: st.DataObject) -> None:
        ids = tokenizer.encode_text(text).tolist()
        single_detokenizer, chunk_detokenizer = Detokenizer(tokenizer, stop), Detokenizer(tokenizer, stop)
        for token_id in ids:
            single_detokenizer.append(token_id)
        boundaries = sorted(data.draw(st.lists(st.integers(0, len(ids)), max_size=4)))
        for start, end in zip([0, *boundaries], [*boundaries, len(ids)], strict=True):
            chunk_detokenizer.append(ids[start:end])
        single_detokenizer.finish()
        chunk_detokenizer.finish()
        assert chunk_detokenizer.text == single_detokenizer.text
        assert (chunk_detokenizer.stop_match, chunk_detokenizer.num_tokens) == (
            single_detokenizer.stop_match,
            single_detokenizer.num_tokens,
        )
        decoded_texts = [tokenizer.decode_ids(ids[:count]) for count in range(len(ids) + 1)]
        match_ends = [
            count for count, prefix in enumerate(decoded_texts) if any(string in prefix for string in stop)
        ]
        assert single_detokenizer.num_tokens == (match_ends[0] if match_ends else len(ids))
        assert (single_detokenizer.stop_match is not None) == bool(match_ends)

    check()


def test_a_stop_string_that_is_a_byte_token_matches_at_this_token(shared_data: Path) -> None:
    tokenizer = load_tokenizer(shared_data / "tokenizers/tinyllama")
    newline, hello = 13, 15043
    assert tokenizer.byte_tokens[newline] == ord("\n")
    detokenizer = Detokenizer(tokenizer, ["\n"])
    assert detokenizer.append(hello) == "Hello"
    assert detokenizer.append(newline) == ""
    assert (detokenizer.stop_match, detokenizer.num_tokens) == ("\n", 2)


def test_text_is_held_back_only_if_it_may_begin_a_stop_string() -> None:
    detokenizer = Detokenizer(BYTE_TOKENIZER, ["</stop>", "\n\n"])
    assert detokenizer.append(list(b"one <")) == "one "
    assert detokenizer.append(list(b"/st")) == ""
    assert detokenizer.append(list(b"ep>")) == "</step>"
    assert detokenizer.append(list(b"\n")) == ""
    assert detokenizer.append(list(b"<")) == "\n"
    assert detokenizer.finish() == "<"
    assert detokenizer.stop_match is None


@pytest.mark.parametrize(
    ("stop", "text", "match", "visible_text"),
    [
        (["bc", "abcd"], "xabcd", "bc", "xa"),  # "bc" is complete before "abcd"
        # If both stop strings are complete at the same character, the longer one matches.
        (["bc", "abc"], "xabc", "abc", "x"),
        (["ab", "abc"], "xabc", "ab", "x"),
        (["aab"], "aaab", "aab", "a"),
        ("stop", "a stop", "stop", "a "),  # a string is one stop string, not a list of characters
        (["", "b"], "ab", "b", "a"),  # an empty stop string is ignored
    ],
)
def test_the_stop_string_that_is_complete_first_matches(
    stop: str | list[str], text: str, match: str, visible_text: str
) -> None:
    for chunk in (1, 2, len(text)):
        detokenizer = Detokenizer(BYTE_TOKENIZER, stop)
        for start in range(0, len(text), chunk):
            detokenizer.append(list(text.encode())[start : start + chunk])
        assert (detokenizer.stop_match, detokenizer.text) == (match, visible_text)


def test_no_text_is_emitted_after_a_stop_string() -> None:
    detokenizer = Detokenizer(BYTE_TOKENIZER, ["b"])
    assert detokenizer.append([*b"abc", 0xC3]) == "a"
    assert detokenizer.append(list(b"def")) == ""
    assert detokenizer.finish() == ""
    assert (detokenizer.text, detokenizer.num_tokens) == ("a", 2)


def test_a_numpy_integer_is_accepted_as_an_id() -> None:
    detokenizer = Detokenizer(BYTE_TOKENIZER)
    assert detokenizer.append(np.int64(ord("x"))) == "x"  # type: ignore[arg-type]


def test_an_incomplete_character_is_flushed_at_the_end() -> None:
    detokenizer = Detokenizer(BYTE_TOKENIZER)
    assert detokenizer.append(list("é".encode()[:1])) == ""
    assert detokenizer.finish() == "\N{REPLACEMENT CHARACTER}"


def test_ids_outside_the_vocabulary_have_no_text() -> None:
    detokenizer = Detokenizer(BYTE_TOKENIZER)
    assert detokenizer.append([ord("a"), 70_000, ord("b")]) == "ab"


@pytest.mark.parametrize("num_invalid_bytes", range(40))
@pytest.mark.parametrize("invalid_byte", [0xFF, 0xF0, 0x80])
def test_characters_after_invalid_bytes_are_emitted(num_invalid_bytes: int, invalid_byte: int) -> None:
    ids = [invalid_byte] * num_invalid_bytes + list("🎉é".encode())
    detokenizer = Detokenizer(BYTE_TOKENIZER)
    texts = [detokenizer.append(token_id) for token_id in ids]
    assert texts[-1] == "é"
    assert "".join(texts) == BYTE_TOKENIZER.decode_ids(ids)


@pytest.mark.parametrize("ids", [list(b"text "), [0xE2], [0xFF], list("é".encode()), [BYTE_TOKENIZER.EOS]])
def test_at_most_20_ids_are_decoded_per_appended_id(ids: list[int]) -> None:
    tokenizer = CountingDecoder(BYTE_TOKENIZER)
    Detokenizer(tokenizer, ["stop"]).append(ids * 1000)
    assert tokenizer.num_decoded <= 20 * len(ids) * 1000


@pytest.mark.parametrize("name", TOKENIZERS)
def test_text_continues_from_the_end_of_the_prompt(name: str, shared_data: Path) -> None:
    """For chunks of any size, the text of the output is the end of the text of prompt and output together."""
    tokenizer = load_tokenizer(shared_data / name)
    special_ids = [i for i in range(tokenizer.vocab_size) if not tokenizer.is_visible(i)]
    text = st.text(" ab\n\u00e9\u6f22\U0001f389", max_size=30)

    @given(text=text, answer=token_id_lists(tokenizer), data=st.data())
    @settings(max_examples=num_examples(60))
    def check(text: str, answer: list[int], data: st.DataObject) -> None:
        ids = tokenizer.encode_text(text, add_special_tokens=False).tolist()
        # Unknown words are encoded as a special token.
        ids = [token_id for token_id in ids if tokenizer.is_visible(token_id)]
        prompt_length = data.draw(st.integers(0, len(ids)), "end of the prompt")
        continues_text = data.draw(st.booleans(), "the output continues the text")
        answer = ids[prompt_length:] if continues_text else answer
        prompt_ids = ids[:prompt_length]
        candidates = [
            tokenizer.decode_ids(ids[:end]).rstrip("\N{REPLACEMENT CHARACTER}")
            for end in range(prompt_length + 1)
        ]
        decoded_prompt = max(filter(tokenizer.decode_ids(ids).startswith, candidates), key=len)
        start = data.draw(st.lists(st.sampled_from([*ids, *special_ids, 5]), max_size=9))
        prompt = [*start, special_ids[0], *prompt_ids] if special_ids and start else prompt_ids
        assert prompt_text(tokenizer, prompt_ids) == decoded_prompt
        decoded_text = tokenizer.decode_ids([*prompt_ids, *answer])
        # Invalid bytes can change how earlier bytes are decoded.
        assume(decoded_text.startswith(decoded_prompt))
        expected = decoded_text[len(decoded_prompt) :]
        assert text_after_prompt(tokenizer, prompt, answer) == expected
        detokenizer = Detokenizer(tokenizer, prompt=np.array(prompt, dtype=np.int64))
        boundaries = [0, *sorted(data.draw(st.lists(st.integers(0, len(answer)), max_size=6))), len(answer)]
        texts = [detokenizer.append(answer[start:end]) for start, end in pairwise(boundaries)]
        assert "".join(texts) + detokenizer.finish() == detokenizer.text == expected

    check()


@pytest.mark.parametrize("name", [name for name in TOKENIZERS if "bert" not in name])
@pytest.mark.parametrize("prompt", ["Once upon a time", "a ", "line\n", "caf\u00e9", "\u6f22\u5b57"])
def test_output_text_equals_the_text_that_transformers_decodes_after_the_prompt(
    name: str, prompt: str, shared_data: Path
) -> None:
    reference = load_transformers_tokenizer(shared_data / name)
    tokenizer = load_tokenizer(shared_data / name)
    ids = reference(prompt).input_ids
    for answer in (" there was", "there", "\n\nOne day", "  two", "\U0001f389!", ""):
        output = reference(f"x{answer}", add_special_tokens=False).input_ids
        output = output[len(reference("x", add_special_tokens=False).input_ids) :]
        decoded_text, decoded_prompt = (
            reference.decode(sequence, skip_special_tokens=True) for sequence in ([*ids, *output], ids)
        )
        assert decoded_text.startswith(decoded_prompt)
        assert text_after_prompt(tokenizer, ids, output) == decoded_text[len(decoded_prompt) :]


def test_the_first_word_has_a_space_only_directly_after_text(shared_data: Path) -> None:
    tokenizer = load_tokenizer(shared_data / "models/stories260K")
    prompt, answer = (tokenizer.encode_text(text, add_special_tokens=False) for text in ("One day", "the"))
    for ids, text in (
        (prompt.tolist(), " the"),
        ([*prompt.tolist(), 1], "the"),
        ([], "the"),
        ([1], "the"),
    ):
        for stop in ([], ["zzz"]):
            detokenizer = Detokenizer(tokenizer, stop, prompt=ids)
            assert detokenizer.append(answer.tolist()) + detokenizer.finish() == text
        assert text_after_prompt(tokenizer, ids, answer.tolist()) == text


def test_a_character_that_begins_in_the_prompt_belongs_to_the_output(shared_data: Path) -> None:
    tokenizer = load_tokenizer(shared_data / "models/stories260K")
    byte_ids = {value: token_id for token_id, value in tokenizer.byte_tokens.items()}
    for decoder, prompt_ids, output_ids in (
        (BYTE_TOKENIZER, list("né\n漢".encode()[:-1]), [list("漢".encode())[-1]]),
        (tokenizer, [byte_ids[value] for value in "né\n漢".encode()[:-1]], [byte_ids["漢".encode()[-1]]]),
    ):
        assert prompt_text(decoder, prompt_ids) == "né\n"
        detokenizer = Detokenizer(decoder, ["漢"], prompt=prompt_ids)
        assert detokenizer.append(output_ids) == ""
        assert (detokenizer.stop_match, detokenizer.num_tokens) == ("漢", 1)
        detokenizer = Detokenizer(decoder, ["\n漢"], prompt=prompt_ids)
        assert detokenizer.append(output_ids) + detokenizer.finish() == "漢"
        assert detokenizer.stop_match is None  # the newline is in the prompt, so it is not part of a match


@pytest.mark.parametrize("num_characters", range(1, 9))
def test_a_prompt_may_end_within_a_multibyte_character(shared_data: Path, num_characters: int) -> None:
    tokenizer = load_tokenizer(shared_data / "models/stories260K")
    byte_ids = {value: token_id for token_id, value in tokenizer.byte_tokens.items()}
    character = [byte_ids[value] for value in "漢".encode()]
    for num_bytes in range(3):
        prompt = character * num_characters + character[:num_bytes]
        assert text_after_prompt(tokenizer, prompt, character[num_bytes:] + character) == "漢漢"
        detokenizer = Detokenizer(tokenizer, ["漢漢"], prompt=prompt)
        detokenizer.append(character[num_bytes:] + character)
        assert (detokenizer.stop_match, detokenizer.num_tokens) == ("漢漢", 6 - num_bytes)


def test_only_the_end_of_a_long_prompt_is_decoded(shared_data: Path) -> None:
    tokenizer = CountingDecoder(load_tokenizer(shared_data / "models/stories260K"))
    detokenizer = Detokenizer(tokenizer, prompt=[400] * 100_000)
    detokenizer.append([401, 402])
    assert tokenizer.num_decoded < 50


@pytest.mark.parametrize(("first_byte", "stop"), [(ord("x"), "\n\r"), (0xFF, "\n")])
def test_a_long_run_of_byte_tokens_is_decoded_in_linear_time(
    first_byte: int, stop: str, shared_data: Path
) -> None:
    tokenizer = CountingDecoder(load_tokenizer(shared_data / "models/stories260K"))
    byte_ids = {value: token_id for token_id, value in tokenizer.byte_tokens.items()}
    ids = [byte_ids[first_byte], *[byte_ids[ord("\n")]] * 3000]
    detokenizer = Detokenizer(tokenizer, [stop])
    detokenizer.append(ids)
    detokenizer.finish()
    assert tokenizer.num_decoded <= 2 * len(ids)
    assert detokenizer.text == tokenizer.decode_ids(ids)


class CountingDecoder:
    """A tokenizer that counts the ids that it decodes."""

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self.num_decoded = 0
        self.byte_tokens = tokenizer.byte_tokens
        self.is_visible = tokenizer.is_visible
        self._tokenizer = tokenizer

    def decode_ids(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        self.num_decoded += len(ids)
        return self._tokenizer.decode_ids(ids, skip_special_tokens)


def test_the_example_in_the_docstring_runs() -> None:
    assert doctest.testmod(penstock.text.detokenizer).failed == 0


def search_stop_strings(text: str, stop: list[str]) -> tuple[str, str | None, int]:
    """Search the prefixes of a text for the first stop string.

    Return the text before the stop string, the stop string, and the number of bytes up to the end of the
    stop string. If no stop string occurs, return the text, None, and the number of bytes of the text.
    """
    for end in range(len(text) + 1):
        matches = [string for string in stop if string and text[:end].endswith(string)]
        if matches:
            stop_string = max(matches, key=len)
            return text[: end - len(stop_string)], stop_string, len(text[:end].encode())
    return text, None, len(text.encode())


def token_id_lists(tokenizer: TextTokenizer) -> st.SearchStrategy[list[int]]:
    """Return a strategy for lists of ids with many byte tokens and special tokens."""
    id_strategies = [st.integers(0, tokenizer.vocab_size - 1)]
    if tokenizer.byte_tokens:
        id_strategies += [
            st.sampled_from(sorted(tokenizer.byte_tokens)),
            st.sampled_from(byte_tokens_of_some_characters(tokenizer)),
        ]
    if special_ids := [i for i in range(tokenizer.vocab_size) if not tokenizer.is_visible(i)]:
        id_strategies += [st.sampled_from(special_ids)]
    return st.lists(st.one_of(id_strategies), max_size=40)


def byte_tokens_of_some_characters(tokenizer: TextTokenizer) -> list[int]:
    byte_ids = {value: token_id for token_id, value in tokenizer.byte_tokens.items()}
    return [byte_ids[value] for value in "é漢\n ".encode()]


@cache
def load_transformers_tokenizer(folder: Path) -> Any:
    return pytest.importorskip("transformers").AutoTokenizer.from_pretrained(folder)


@cache
def load_tokenizer(folder: Path) -> TextTokenizer:
    return TextTokenizer(folder)


@pytest.mark.parametrize("is_one_call", [False, True])
def test_the_stop_string_is_kept_if_requested(is_one_call: bool) -> None:
    ids = [*b"go END\xc3\xa9 on"]
    for stop, text, num_tokens in ((["END"], "go END", 6), (["x", "\u00e9 o"], "go END\u00e9 o", 10)):
        detokenizer = Detokenizer(FakeTokenizer(), stop=stop, keeps_stop=True)
        for chunk in [ids] if is_one_call else [[token_id] for token_id in ids]:
            detokenizer.append(chunk)
        detokenizer.finish()
        assert (detokenizer.text, detokenizer.num_tokens) == (text, num_tokens)
