"""Encodes log probabilities of chats, completions and prompts as JSON, in parts that take about 1 ms each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeVar

from penstock.serve.api.choice_decoder import PromptScore, Score, TopTokens, top_tokens
from penstock.serve.api.json_parts import Parts, encode
from penstock.serve.api.token_fragments import (
    MAX_PART_COST,
    UNCACHED_TOKEN_COST,
    NumberWriter,
    TokenFragments,
    encoded_numbers,
)
from penstock.text.detokenizer import AnyTokenIds, text_after_prompt
from penstock.text.tokenizer import TextTokenizer

T = TypeVar("T")


class ChatScores:
    """Encodes ``logprobs`` of chats.

    The object is ``{"content": [{"token", "logprob", "bytes", "top_logprobs"}], "refusal": null}``.

    Args:
        fragments: the cache of JSON fragments.
        num_top: number of top tokens per position.
    """

    def __init__(self, fragments: TokenFragments, num_top: int) -> None:
        self._fragments = fragments
        self._num_top = num_top

    def parts(self, scores: Sequence[Score]) -> Parts:
        """Yield the JSON of the ``logprobs`` object of consecutive tokens of a choice."""
        yield b'{"content":['
        writer, entries = NumberWriter(self._fragments), self._fragments.chat_entries
        separator = b""
        for score in scores:
            prefix, _, suffix = entries[score.token_id]
            ids, values = best_tokens(score.top, self._num_top)
            template = prefix, b"", suffix[:-1] + b',"top_logprobs":['
            writer.add_row(separator, [template], [score.logprob], b"" if ids else b"]}")
            if ids:
                writer.add_row(b"", map(entries.__getitem__, ids), values, b"]}")
            separator = b","
            if writer.is_full:
                yield writer.part()
        yield writer.part()
        yield b'],"refusal":null}'


class CompletionScores:
    """Encodes ``logprobs`` of completions: lists with one entry per token.

    An entry of ``top_logprobs`` is an object: text of a top token -> log probability.

    Args:
        tokenizer: the tokenizer of the model.
        fragments: the cache of JSON fragments.
        num_top: number of top tokens per position.
        prompt: the tokens of the prompt; empty if the text of the response begins with the prompt.
        skip_special_tokens: whether special tokens are left out of the text.
    """

    def __init__(
        self,
        tokenizer: TextTokenizer,
        fragments: TokenFragments,
        num_top: int,
        *,
        prompt: AnyTokenIds = (),
        skip_special_tokens: bool = True,
    ) -> None:
        self._tokenizer = tokenizer
        self._fragments = fragments
        self._num_top = num_top
        self._prompt = prompt
        self._is_first_token = True
        self._skip_special_tokens = skip_special_tokens
        self._offset = 0  # position of the next token in the text, in characters

    def parts(
        self,
        token_ids: Sequence[int],
        logprobs: Sequence[float | None],
        top_tokens_by_position: Sequence[TopTokens | None],
    ) -> Parts:
        """Yield the JSON of the ``logprobs`` object of the next tokens.

        Args:
            token_ids: the tokens.
            logprobs: the log probability of each token; None for the first token of a prompt.
            top_tokens_by_position: the top tokens of each position; None for the first token of a prompt.
        """
        yield b'{"text_offset":['
        yield from _comma_joined(self._offsets(ids) for ids in _slices(token_ids, UNCACHED_TOKEN_COST))
        yield b'],"token_logprobs":['
        yield from _comma_joined(encoded_numbers(values) for values in _slices(logprobs, MAX_PART_COST))
        yield b'],"tokens":['
        keys = self._fragments.completion_keys
        yield from _comma_joined(
            [keys[token_id][0][1:-1] for token_id in ids] for ids in _slices(token_ids, UNCACHED_TOKEN_COST)
        )
        yield b'],"top_logprobs":['
        yield from self._top_logprobs(token_ids, logprobs, top_tokens_by_position)
        yield b"]}"

    def _offsets(self, token_ids: Sequence[int]) -> list[bytes]:
        offsets = []
        for token_id in token_ids:
            offsets.append(b"%d" % self._offset)
            if self._tokenizer.is_visible(token_id, self._skip_special_tokens):
                self._offset += self._num_characters(token_id)
        return offsets

    def _num_characters(self, token_id: int) -> int:
        if self._is_first_token:  # the tokenizer may remove the leading space of a text
            self._is_first_token = False
            return len(
                text_after_prompt(self._tokenizer, self._prompt, [token_id], self._skip_special_tokens)
            )
        # A character belongs to the token that contains its first byte.
        return sum(byte & 0xC0 != 0x80 for byte in self._tokenizer.token_bytes(token_id))

    def _top_logprobs(
        self,
        token_ids: Sequence[int],
        logprobs: Sequence[float | None],
        top_tokens_by_position: Sequence[TopTokens | None],
    ) -> Parts:
        writer, keys = NumberWriter(self._fragments), self._fragments.completion_keys
        separator = b""
        for token_id, logprob, top in zip(token_ids, logprobs, top_tokens_by_position, strict=True):
            if logprob is None or top is None:
                yield writer.part()
                yield separator + b"null"
                separator = b","
                continue
            ids, values = best_tokens(top, self._num_top)
            if token_id not in ids:
                ids, values = [*ids, token_id], [*values, logprob]
            row = dict(zip(map(keys.__getitem__, ids), values, strict=True))
            if len(row) < len(ids):  # two tokens have the same text, and the more probable token is kept
                row = dict(zip(map(keys.__getitem__, reversed(ids)), reversed(values), strict=True))
            writer.add_row(separator + b"{", row, row.values(), b"}")
            separator = b","
            if writer.is_full:
                yield writer.part()
        yield writer.part()


def prompt_parts(
    fragments: TokenFragments,
    token_ids: Sequence[int],
    scores: Sequence[PromptScore],
    num_top: int,
    num_computed: int,
) -> Parts:
    """Yield the JSON of ``prompt_logprobs``: null for the first prompt token, an object for each later one.

    The keys of an object are token ids. Its values are ``{"logprob", "rank", "decoded_token"}``. An object
    has the top tokens of a position and the prompt token at this position. The rank of the prompt token is
    null if it is not one of the computed top tokens.

    Args:
        fragments: the cache of JSON fragments.
        token_ids: the prompt tokens.
        scores: the scores of all prompt tokens except the first one.
        num_top: number of top tokens per position in the JSON.
        num_computed: number of top tokens per position that the worker has computed. The top tokens of a
            score may have the prompt token as an additional entry.
    """
    assert len(scores) == len(token_ids) - 1, "all prompt tokens but the first have scores"
    yield b"[null"
    writer, entries = NumberWriter(fragments), fragments.prompt_entries
    for token_id, (logprob, top) in zip(token_ids[1:], scores, strict=True):
        ids, values = best_tokens(top, num_computed)
        ranks = {token_id: rank for rank, token_id in enumerate(ids, 1)}
        logprobs_by_id = {token_id: logprob} | dict(zip(ids[:num_top], values[:num_top], strict=True))
        templates = (
            (prefix, b"", b',"rank":%b%b' % (encode(ranks.get(token_id)), suffix))
            for token_id in logprobs_by_id
            for prefix, _, suffix in (entries[token_id],)
        )
        writer.add_row(b",{", templates, logprobs_by_id.values(), b"}")
        if writer.is_full:
            yield writer.part()
    yield writer.part()
    yield b"]"


def best_tokens(top: TopTokens, num_top: int) -> tuple[list[int], list[float]]:
    """Return the ids and log probabilities of the `num_top` most probable tokens in `top`, best first."""
    logprobs_by_id = top_tokens(top)
    ids = sorted(logprobs_by_id, key=logprobs_by_id.__getitem__, reverse=True)[:num_top]
    return ids, [logprobs_by_id[token_id] for token_id in ids]


def _slices(items: Sequence[T], max_items: int) -> Iterator[Sequence[T]]:
    return (items[start : start + max_items] for start in range(0, len(items), max_items))


def _comma_joined(slices: Iterator[list[bytes]]) -> Parts:
    for index, elements in enumerate(slices):
        yield (b"," if index else b"") + b",".join(elements)
