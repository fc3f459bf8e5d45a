"""The joined bytes of tokens equal the text, except with WordPiece, which is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import xgrammar as xgr

import penstock.demo
from penstock.errors import UnsupportedFeatureError
from penstock.grammar.vocabulary import NO_TEXT, token_bytes
from penstock.testing import FakeTokenizer
from penstock.text.tokenizer import TextTokenizer

TEXTS = ['{"name": "Ünïcode 😀", "x": [1, 2.5e-3]}\n\tend  of', "Hello world", "a<0x41>b ▁ c", "日本語\x00"]


def find_tokenizer(shared_data: Path, name: str) -> Path:
    folder = shared_data / "tokenizers" / name
    if not folder.is_dir():
        pytest.skip(f"the shared data have no tokenizer {name}")
    return folder


def assert_joined_bytes(tokenizer: TextTokenizer, texts: list[str]) -> None:
    tokens = token_bytes(tokenizer.backend, tokenizer.vocab_size + 5)
    assert tokens[-5:] == [b""] * 5  # ids beyond the vocabulary have no bytes
    for text in texts:
        ids = tokenizer.backend.encode(text, add_special_tokens=False).ids
        joined_text = b"".join(tokens[token] for token in ids)
        # Some tokenizers add a space before the first word.
        assert joined_text.removeprefix(b" ") == text.encode()


def test_the_bytes_of_tokens_join_to_the_text() -> None:
    assert_joined_bytes(FakeTokenizer(), TEXTS)
    assert_joined_bytes(TextTokenizer(Path(penstock.demo.__file__).parent), TEXTS)


@pytest.mark.parametrize("name", ["gpt2", "tinyllama", pytest.param("qwen3", marks=pytest.mark.slow)])
def test_the_bytes_of_real_tokenizers_equal_the_text_and_those_of_xgrammar_except_special_tokens(
    name: str, shared_data: Path
) -> None:
    folder = find_tokenizer(shared_data, name)
    tokenizer = TextTokenizer(folder)
    # The tokenizer of tinyllama encodes a space as ▁, so it cannot distinguish these two characters.
    assert_joined_bytes(tokenizer, [text for text in TEXTS if "▁" not in text or name != "tinyllama"])
    transformers = pytest.importorskip("transformers")
    reference = transformers.AutoTokenizer.from_pretrained(str(folder))
    reference_bytes = xgr.TokenizerInfo.from_huggingface(
        reference, vocab_size=tokenizer.vocab_size
    ).decoded_vocab
    our_bytes = token_bytes(tokenizer.backend, tokenizer.vocab_size)
    differing_ids = [
        token for token in range(tokenizer.vocab_size) if our_bytes[token] != reference_bytes[token]
    ]
    assert all(our_bytes[token].startswith(NO_TEXT) for token in differing_ids)


def test_special_tokens_have_the_no_text_prefix() -> None:
    assert token_bytes(FakeTokenizer().backend, 257)[FakeTokenizer.EOS] == NO_TEXT + b"<|end|>"


def test_wordpiece_is_refused(shared_data: Path) -> None:
    tokenizer = TextTokenizer(find_tokenizer(shared_data, "bert-base-uncased"))
    with pytest.raises(UnsupportedFeatureError, match="WordPiece"):
        token_bytes(tokenizer.backend, 100)
