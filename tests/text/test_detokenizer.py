"""The detokenizer against decoding all at once, and its stop strings against a search in the whole text."""

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
from support.random_draws import examples
from tokenizers import Tokenizer, decoders, models

import penstock.text.detokenizer
from penstock.testing import FakeTokenizer
from penstock.text.detokenizer import Detokenizer, prompt_text, text_after_prompt
from penstock.text.tokenizer import TextTokenizer
from penstock.text.tokenizer_files import TokenizerFiles

TOKENIZERS = ["tokenizers/bert-base-uncased", "tokenizers/gpt2", "tokenizers/qwen3", "tokenizers/tinyllama"]
TOKENIZERS += ["models/stories260K"]
FAKE = FakeTokenizer()


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("skip_special_tokens", [True, False])
def test_pieces_join_to_the_text_of_all_ids(name: str, skip_special_tokens: bool, shared_data: Path) -> None:
    tokenizer = real_tokenizer(shared_data / name)

    @given(ids=token_ids(tokenizer))
    @settings(max_examples=examples(30))
    def check(ids: list[int]) -> None:
        detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip_special_tokens)
        pieces = [detokenizer.append(token_id) for token_id in ids] + [detokenizer.finish()]
        assert "".join(pieces) == detokenizer.text == tokenizer.decode_ids(ids, skip_special_tokens)
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
def test_other_decoders(decoder: decoders.Decoder | None, ids: list[int]) -> None:
    pieces = ["▁", "▁a", "b", "c</w>", "##d", " ", ".", "'t", "\N{REPLACEMENT CHARACTER}"]
    pieces += ["<0xC3>", "<0xA9>", "<0x0A>"]
    backend = Tokenizer(models.WordLevel({piece: i for i, piece in enumerate(pieces)}, unk_token="b"))
    backend.add_special_tokens(["<s>"])
    if decoder is not None:
        backend.decoder = decoder
    tokenizer = TextTokenizer(TokenizerFiles(backend, {}, {}, (), "test", 13, None))
    detokenizer = Detokenizer(tokenizer)
    shown = [detokenizer.append(token_id) for token_id in ids] + [detokenizer.finish()]
    assert "".join(shown) == backend.decode(ids)


@given(ids=st.lists(st.integers(0, FAKE.EOS), max_size=60))
def test_any_bytes_join_to_the_text_of_all_ids(ids: list[int]) -> None:
    detokenizer = Detokenizer(FAKE)
    pieces = [detokenizer.append(token_id) for token_id in ids] + [detokenizer.finish()]
    assert "".join(pieces) == FAKE.decode_ids(ids)


@given(text=st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\N{REPLACEMENT CHARACTER}")))
def test_a_character_is_emitted_with_its_last_byte(text: str) -> None:
    detokenizer = Detokenizer(FAKE)
    for character in text:
        *first, last = character.encode()
        assert [detokenizer.append(byte) for byte in first] == [""] * len(first)
        assert detokenizer.append(last) == character
    assert detokenizer.finish() == ""


@given(text=st.text("ab\n\u00e9", max_size=20), stop=st.lists(st.text("ab\n\u00e9", max_size=4), max_size=3))
def test_text_ends_before_the_first_stop_string(text: str, stop: list[str]) -> None:
    detokenizer = Detokenizer(FAKE, stop)
    ids = list(text.encode())
    shown = detokenizer.append(ids) + detokenizer.finish()
    assert (shown, detokenizer.stop_match, detokenizer.num_tokens) == expected(text, stop)


@pytest.mark.parametrize("name", ["tokenizers/gpt2", "tokenizers/tinyllama", "models/stories260K"])
def test_chunks_do_not_matter(name: str, shared_data: Path) -> None:
    tokenizer = real_tokenizer(shared_data / name)
    text = st.text("ab \n\u00e9\U0001f389", max_size=30)

    @given(
        text=text, stop=st.lists(st.text("ab \n\u00e9", min_size=1, max_size=3), max_size=3), data=st.data()
    )
    @settings(max_examples=examples(60))
    def check(text: str, stop: list[str], data: st.DataObject) -> None:
        ids = tokenizer.encode_text(text).tolist()
        one_by_one, in_chunks = Detokenizer(tokenizer, stop), Detokenizer(tokenizer, stop)
        for token_id in ids:
            one_by_one.append(token_id)
        cuts = sorted(data.draw(st.lists(st.integers(0, len(ids)), max_size=4)))
        for start, end in zip([0, *cuts], [*cuts, len(ids)], strict=True):
            in_chunks.append(ids[start:end])
        one_by_one.finish()
        in_chunks.finish()
        assert in_chunks.text == one_by_one.text
        assert (in_chunks.stop_match, in_chunks.num_tokens) == (one_by_one.stop_match, one_by_one.num_tokens)
        decoded = [tokenizer.decode_ids(ids[:count]) for count in range(len(ids) + 1)]
        ends = [count for count, prefix in enumerate(decoded) if any(one in prefix for one in stop)]
        assert one_by_one.num_tokens == (ends[0] if ends else len(ids))
        assert (one_by_one.stop_match is not None) == bool(ends)

    check()


def test_a_line_end_in_bytes_stops_at_its_own_token(shared_data: Path) -> None:
    tokenizer = real_tokenizer(shared_data / "tokenizers/tinyllama")
    newline, hello = 13, 15043
    assert tokenizer.byte_tokens[newline] == ord("\n")
    detokenizer = Detokenizer(tokenizer, ["\n"])
    assert detokenizer.append(hello) == "Hello"
    assert detokenizer.append(newline) == ""
    assert (detokenizer.stop_match, detokenizer.num_tokens) == ("\n", 2)


def test_only_what_may_become_a_stop_string_is_held_back() -> None:
    detokenizer = Detokenizer(FAKE, ["</stop>", "\n\n"])
    assert detokenizer.append(list(b"one <")) == "one "
    assert detokenizer.append(list(b"/st")) == ""
    assert detokenizer.append(list(b"ep>")) == "</step>"
    assert detokenizer.append(list(b"\n")) == ""
    assert detokenizer.append(list(b"<")) == "\n"
    assert detokenizer.finish() == "<"
    assert detokenizer.stop_match is None


@pytest.mark.parametrize(
    ("stop", "text", "match", "shown"),
    [
        (["bc", "abcd"], "xabcd", "bc", "xa"),  # complete first
        (["bc", "abc"], "xabc", "abc", "x"),  # complete at the same character: the longest
        (["ab", "abc"], "xabc", "ab", "x"),
        (["aab"], "aaab", "aab", "a"),
        ("stop", "a stop", "stop", "a "),  # a string is one stop string, not a list of characters
        (["", "b"], "ab", "b", "a"),  # an empty stop string is ignored
    ],
)
def test_which_stop_string_wins(stop: str | list[str], text: str, match: str, shown: str) -> None:
    for chunk in (1, 2, len(text)):
        detokenizer = Detokenizer(FAKE, stop)
        for start in range(0, len(text), chunk):
            detokenizer.append(list(text.encode())[start : start + chunk])
        assert (detokenizer.stop_match, detokenizer.text) == (match, shown)


def test_no_text_is_emitted_after_a_stop_string() -> None:
    detokenizer = Detokenizer(FAKE, ["b"])
    assert detokenizer.append([*b"abc", 0xC3]) == "a"
    assert detokenizer.append(list(b"def")) == ""
    assert detokenizer.finish() == ""
    assert (detokenizer.text, detokenizer.num_tokens) == ("a", 2)


def test_a_single_id_may_be_of_numpy() -> None:
    detokenizer = Detokenizer(FAKE)
    assert detokenizer.append(np.int64(ord("x"))) == "x"  # type: ignore[arg-type]


def test_an_incomplete_character_is_flushed_at_the_end() -> None:
    detokenizer = Detokenizer(FAKE)
    assert detokenizer.append(list("é".encode()[:1])) == ""
    assert detokenizer.finish() == "\N{REPLACEMENT CHARACTER}"


def test_ids_without_a_token_have_no_text() -> None:
    detokenizer = Detokenizer(FAKE)
    assert detokenizer.append([ord("a"), 70_000, ord("b")]) == "ab"


@pytest.mark.parametrize("count", range(40))
@pytest.mark.parametrize("noise", [0xFF, 0xF0, 0x80])
def test_a_character_after_invalid_bytes(count: int, noise: int) -> None:
    ids = [noise] * count + list("🎉é".encode())
    detokenizer = Detokenizer(FAKE)
    pieces = [detokenizer.append(token_id) for token_id in ids]
    assert pieces[-1] == "é"
    assert "".join(pieces) == FAKE.decode_ids(ids)


@pytest.mark.parametrize("ids", [list(b"text "), [0xE2], [0xFF], list("é".encode()), [FAKE.EOS]])
def test_the_window_does_not_grow(ids: list[int]) -> None:
    tokenizer = CountingDecoder(FAKE)
    Detokenizer(tokenizer, ["stop"]).append(ids * 1000)
    assert tokenizer.num_decoded <= 20 * len(ids) * 1000


@pytest.mark.parametrize("name", TOKENIZERS)
def test_text_continues_from_the_end_of_the_prompt(name: str, shared_data: Path) -> None:
    """The result equals the decoding of prompt and output together, for pieces of all lengths."""
    tokenizer = real_tokenizer(shared_data / name)
    special = [i for i in range(tokenizer.vocab_size) if not tokenizer.is_visible(i)]
    text = st.text(" ab\n\u00e9\u6f22\U0001f389", max_size=30)

    @given(text=text, answer=token_ids(tokenizer), data=st.data())
    @settings(max_examples=examples(60))
    def check(text: str, answer: list[int], data: st.DataObject) -> None:
        ids = tokenizer.encode_text(text, add_special_tokens=False).tolist()
        ids = [token_id for token_id in ids if tokenizer.is_visible(token_id)]  # unknown words are special
        cut = data.draw(st.integers(0, len(ids)), "end of the prompt")
        goes_on = data.draw(st.booleans(), "the answer is the rest of the text")
        answer = ids[cut:] if goes_on else answer
        near = ids[:cut]
        begun = [
            tokenizer.decode_ids(ids[:end]).rstrip("\N{REPLACEMENT CHARACTER}") for end in range(cut + 1)
        ]
        before = max(filter(tokenizer.decode_ids(ids).startswith, begun), key=len)
        start = data.draw(st.lists(st.sampled_from([*ids, *special, 5]), max_size=9))
        prompt = [*start, special[0], *near] if special and start else near
        assert prompt_text(tokenizer, near) == before
        whole = tokenizer.decode_ids([*near, *answer])
        assume(whole.startswith(before))  # invalid bytes after valid ones can make all of them invalid
        expected = whole[len(before) :]
        assert text_after_prompt(tokenizer, prompt, answer) == expected
        detokenizer = Detokenizer(tokenizer, prompt=np.array(prompt, dtype=np.int64))
        cuts = [0, *sorted(data.draw(st.lists(st.integers(0, len(answer)), max_size=6))), len(answer)]
        pieces = [detokenizer.append(answer[one:next_one]) for one, next_one in pairwise(cuts)]
        assert "".join(pieces) + detokenizer.finish() == detokenizer.text == expected

    check()


@pytest.mark.parametrize("name", [name for name in TOKENIZERS if "bert" not in name])
@pytest.mark.parametrize("prompt", ["Once upon a time", "a ", "line\n", "caf\u00e9", "\u6f22\u5b57"])
def test_answers_as_transformers_cuts_them(name: str, prompt: str, shared_data: Path) -> None:
    theirs = transformers_tokenizer(shared_data / name)
    tokenizer = real_tokenizer(shared_data / name)
    ids = theirs(prompt).input_ids
    for answer in (" there was", "there", "\n\nOne day", "  two", "\U0001f389!", ""):
        given = theirs(f"x{answer}", add_special_tokens=False).input_ids
        given = given[len(theirs("x", add_special_tokens=False).input_ids) :]
        whole, before = (theirs.decode(some, skip_special_tokens=True) for some in ([*ids, *given], ids))
        assert whole.startswith(before)
        assert text_after_prompt(tokenizer, ids, given) == whole[len(before) :]


def test_the_first_word_keeps_its_space_but_behind_a_special_token(shared_data: Path) -> None:
    tokenizer = real_tokenizer(shared_data / "models/stories260K")
    prompt, answer = (tokenizer.encode_text(text, add_special_tokens=False) for text in ("One day", "the"))
    for before, text in (
        (prompt.tolist(), " the"),
        ([*prompt.tolist(), 1], "the"),
        ([], "the"),
        ([1], "the"),
    ):
        for stop in ([], ["zzz"]):
            detokenizer = Detokenizer(tokenizer, stop, prompt=before)
            assert detokenizer.append(answer.tolist()) + detokenizer.finish() == text
        assert text_after_prompt(tokenizer, before, answer.tolist()) == text


def test_a_character_begun_by_the_prompt_is_the_answers(shared_data: Path) -> None:
    tokenizer = real_tokenizer(shared_data / "models/stories260K")
    byte = {value: token_id for token_id, value in tokenizer.byte_tokens.items()}
    for decoder, first, rest in (
        (FAKE, list("né\n漢".encode()[:-1]), [list("漢".encode())[-1]]),
        (tokenizer, [byte[one] for one in "né\n漢".encode()[:-1]], [byte["漢".encode()[-1]]]),
    ):
        assert prompt_text(decoder, first) == "né\n"
        detokenizer = Detokenizer(decoder, ["漢"], prompt=first)
        assert detokenizer.append(rest) == ""
        assert (detokenizer.stop_match, detokenizer.num_tokens) == ("漢", 1)
        detokenizer = Detokenizer(decoder, ["\n漢"], prompt=first)
        assert detokenizer.append(rest) + detokenizer.finish() == "漢"
        assert detokenizer.stop_match is None  # the prompt has a part of the character


@pytest.mark.parametrize("count", range(1, 9))
def test_a_prompt_of_characters_in_bytes_may_be_cut_anywhere(shared_data: Path, count: int) -> None:
    tokenizer = real_tokenizer(shared_data / "models/stories260K")
    byte = {value: token_id for token_id, value in tokenizer.byte_tokens.items()}
    character = [byte[one] for one in "漢".encode()]
    for begun in range(3):
        prompt = character * count + character[:begun]
        assert text_after_prompt(tokenizer, prompt, character[begun:] + character) == "漢漢"
        detokenizer = Detokenizer(tokenizer, ["漢漢"], prompt=prompt)
        detokenizer.append(character[begun:] + character)
        assert (detokenizer.stop_match, detokenizer.num_tokens) == ("漢漢", 6 - begun)


def test_a_long_prompt_is_not_read_whole(shared_data: Path) -> None:
    tokenizer = CountingDecoder(real_tokenizer(shared_data / "models/stories260K"))
    detokenizer = Detokenizer(tokenizer, prompt=[400] * 100_000)
    detokenizer.append([401, 402])
    assert tokenizer.num_decoded < 50


@pytest.mark.parametrize(("first", "stop"), [(ord("x"), "\n\r"), (0xFF, "\n")])
def test_a_long_run_of_byte_tokens_is_decoded_once(first: int, stop: str, shared_data: Path) -> None:
    tokenizer = CountingDecoder(real_tokenizer(shared_data / "models/stories260K"))
    byte = {value: token_id for token_id, value in tokenizer.byte_tokens.items()}
    ids = [byte[first], *[byte[ord("\n")]] * 3000]
    detokenizer = Detokenizer(tokenizer, [stop])
    detokenizer.append(ids)
    detokenizer.finish()
    assert tokenizer.num_decoded <= 2 * len(ids)
    assert detokenizer.text == tokenizer.decode_ids(ids)


class CountingDecoder:
    """Counts the ids that it decodes."""

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self.num_decoded = 0
        self.byte_tokens = tokenizer.byte_tokens
        self.is_visible = tokenizer.is_visible
        self._tokenizer = tokenizer

    def decode_ids(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        self.num_decoded += len(ids)
        return self._tokenizer.decode_ids(ids, skip_special_tokens)


def test_the_example_in_the_docstring() -> None:
    assert doctest.testmod(penstock.text.detokenizer).failed == 0


def expected(text: str, stop: list[str]) -> tuple[str, str | None, int]:
    """Return the visible text, the stop string and the number of tokens (bytes), by testing every prefix."""
    for end in range(len(text) + 1):
        matches = [one for one in stop if one and text[:end].endswith(one)]
        if matches:
            longest = max(matches, key=len)
            return text[: end - len(longest)], longest, len(text[:end].encode())
    return text, None, len(text.encode())


def token_ids(tokenizer: TextTokenizer) -> st.SearchStrategy[list[int]]:
    """Random ids, with an increased share of byte tokens and special tokens."""
    kinds = [st.integers(0, tokenizer.vocab_size - 1)]
    if tokenizer.byte_tokens:
        kinds += [st.sampled_from(sorted(tokenizer.byte_tokens)), st.sampled_from(text_bytes(tokenizer))]
    special = [i for i in range(tokenizer.vocab_size) if not tokenizer.is_visible(i)]
    if special:
        kinds += [st.sampled_from(special)]
    return st.lists(st.one_of(kinds), max_size=40)


def text_bytes(tokenizer: TextTokenizer) -> list[int]:
    byte = {value: token_id for token_id, value in tokenizer.byte_tokens.items()}
    return [byte[value] for value in "é漢\n ".encode()]


@cache
def transformers_tokenizer(folder: Path) -> Any:
    return pytest.importorskip("transformers").AutoTokenizer.from_pretrained(folder)


@cache
def real_tokenizer(folder: Path) -> TextTokenizer:
    return TextTokenizer(folder)


@pytest.mark.parametrize("together", [False, True])
def test_the_stop_string_is_kept_if_requested(together: bool) -> None:
    ids = [*b"go END\xc3\xa9 on"]
    for stop, text, num_tokens in ((["END"], "go END", 6), (["x", "\u00e9 o"], "go END\u00e9 o", 10)):
        detokenizer = Detokenizer(FakeTokenizer(), stop=stop, keeps_stop=True)
        for some in [ids] if together else [[one] for one in ids]:
            detokenizer.append(some)
        detokenizer.finish()
        assert (detokenizer.text, detokenizer.num_tokens) == (text, num_tokens)
