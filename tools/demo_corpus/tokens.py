"""Converts documents to rows of tokens: tokenizer, chat template, held-out split, packing.

A row begins with the start of a document. ``<|endoftext|>`` ends each document. A checksum of a document's
text determines whether the document is held out. Therefore no list of held-out documents is needed, and all
copies of a document are on the same side of the split.
"""

import json
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from . import Document, make_documents

TEMPLATE_PATH = Path(__file__).parent / "chat_template.jinja"
END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIAL_TOKENS = [END_OF_TEXT, TURN_START, TURN_END]
MARKUP_TOKENS = ["<tool_call>", "</tool_call>"]
MARKUP = re.compile("|".join(map(re.escape, SPECIAL_TOKENS + MARKUP_TOKENS)))
# A word or a run of signs, each with the space before it; one digit; or white space. Each digit is a token,
# so that equal numbers always have the same tokens.
WORD_PATTERN = r" ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
HELD_OUT_DIVISOR = 50  # one document in fifty is held out
PROMPT_WEIGHT = 0.1  # loss weight of chats outside the assistant's messages, and of odd texts

Row = tuple[np.ndarray, np.ndarray]
"""Token ids and loss weights of a document or of a row."""


class ChatTemplate:
    """The chat template of the demo model, rendered in the same way as by transformers."""

    def __init__(self, path: Path = TEMPLATE_PATH) -> None:
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
        self._template = environment.from_string(path.read_text())

    def render(self, document: Document) -> str:
        """Return a document as text: a chat is rendered by the template, other documents are unchanged."""
        if document.text:
            return document.text
        return self._template.render(messages=document.messages, tools=document.tools or None)


def train_tokenizer(seed: int, vocab_size: int, count: int = 20_000) -> Tokenizer:
    """Return a byte-level BPE tokenizer trained on ``count`` documents. Its vocabulary contains all bytes."""
    template = ChatTemplate()
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORD_PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(MARKUP_TOKENS),
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    texts = (MARKUP.sub(" ", template.render(doc)) for doc in make_documents(seed, count))
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in MARKUP_TOKENS])
    return tokenizer


def is_held_out(text: str) -> bool:
    """Return whether the document with this text is held out from training."""
    return zlib.crc32(text.encode()) % HELD_OUT_DIVISOR == 0


class Encoder:
    """Encodes texts as token ids and loss weights. The last token is ``<|endoftext|>``."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._special_token_ids = {token: tokenizer.token_to_id(token) for token in SPECIAL_TOKENS}
        self._role_token_ids = tokenizer.encode("assistant\n").ids

    def encode(self, text: str, *, is_odd: bool = False) -> Row:
        """Return ids and loss weights of a document. In an odd text only the end has weight 1."""
        ids = [*self._tokenizer.encode(text).ids, self._special_token_ids[END_OF_TEXT]]
        weights = np.ones(len(ids), np.float32)
        if is_odd:
            weights[:-1] = PROMPT_WEIGHT
        if ids[0] == self._special_token_ids[TURN_START]:
            weights[:] = PROMPT_WEIGHT
            for start, end in self._answers(ids):
                weights[start:end] = 1.0
        return np.asarray(ids, np.int64), weights

    def _answers(self, ids: list[int]) -> Iterator[tuple[int, int]]:
        """Yield start and end of each message of the assistant, including the token that ends its turn."""
        for position, token in enumerate(ids):
            start = position + 1 + len(self._role_token_ids)
            is_turn_start = token == self._special_token_ids[TURN_START]
            if is_turn_start and ids[position + 1 : start] == self._role_token_ids:
                yield start, ids.index(self._special_token_ids[TURN_END], start) + 1


@dataclass
class Packer:
    """Packs an endless, seeded stream of documents into rows of tokens.

    ``num_documents`` is the number of documents in the rows so far. ``distinct`` leaves out repeated texts,
    so that each text counts once in measurements.
    """

    encoder: Encoder
    seed: int
    held_out: bool = False
    distinct: bool = False
    num_documents: int = 0

    def __post_init__(self) -> None:
        self._template = ChatTemplate()
        self._documents = self._encode_documents()

    def _encode_documents(self) -> Iterator[Row]:
        """Yield the ids and weights of the documents of this part of the split."""
        seen_texts: set[str] = set()
        for document in make_documents(self.seed, 100_000_000):
            text = self._template.render(document)
            if is_held_out(text) != self.held_out or text in seen_texts:
                continue
            if self.distinct:
                seen_texts.add(text)
            yield self.encoder.encode(text, is_odd=document.kind == "odd text")

    def row(self, length: int) -> Row:
        """Return a row of ``length + 1`` tokens.

        The inputs are all tokens except the last, the targets are all tokens except the first.

        The last document is cut at the end of the row, and the remainder of this document is dropped.
        Therefore no row begins in the middle of a document, and no position is unused.
        """
        document_parts: list[Row] = []
        num_remaining = length + 1
        while num_remaining > 0:
            ids, weights = next(self._documents)
            self.num_documents += 1
            document_parts.append((ids[:num_remaining], weights[:num_remaining]))
            num_remaining -= len(ids)
        all_ids, all_weights = zip(*document_parts, strict=True)
        return np.concatenate(all_ids), np.concatenate(all_weights)

    def batch(self, num_rows: int, length: int) -> Row:
        """Return ids and weights ``[num_rows, length + 1]`` of the next rows."""
        ids, weights = zip(*(self.row(length) for _ in range(num_rows)), strict=True)
        return np.stack(ids), np.stack(weights)
