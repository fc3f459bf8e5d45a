"""Log probabilities in OpenAI's two shapes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from penstock.pipelines.detokenizer import TokenIds, text_behind
from penstock.pipelines.tokenizer import TextTokenizer
from penstock.serve.choice_text import Score

LEAST = -9999.0
"""OpenAI's number for a token that cannot come; JSON has no infinity."""


class ChatScores:
    """``logprobs`` of chats: ``{"content": [{"token", "logprob", "bytes", "top_logprobs"}]}``."""

    def __init__(self, tokenizer: TextTokenizer, top: int) -> None:
        self._tokenizer = tokenizer
        self._top = top

    def of(self, scores: Iterable[Score]) -> dict[str, Any]:
        """The object for some tokens."""
        return {"content": [self._entry(score) for score in scores], "refusal": None}

    def _entry(self, score: Score) -> dict[str, Any]:
        best = sorted(score.top.items(), key=lambda item: -item[1])[: self._top]
        return {
            **self._token(score.token_id, score.logprob),
            "top_logprobs": [self._token(token_id, logprob) for token_id, logprob in best],
        }

    def _token(self, token_id: int, logprob: float) -> dict[str, Any]:
        written = self._tokenizer.token_bytes(token_id)
        return {
            "token": written.decode(errors="replace"),
            "logprob": max(logprob, LEAST),
            "bytes": list(written),
        }


class CompletionScores:
    """``logprobs`` of completions: lists in parallel, the best tokens keyed by their text.

    Token texts that are not UTF-8 by themselves are written ``bytes:\\xe2\\x80``, as OpenAI does, so that no
    two of them are the same key.

    Args:
        tokenizer: of the model.
        top: how many of the best tokens to show.
        prompt: the tokens of the prompt, unless they are shown themselves.
        skip_special_tokens: whether the text is without them.
    """

    def __init__(
        self,
        tokenizer: TextTokenizer,
        top: int,
        *,
        prompt: TokenIds = (),
        skip_special_tokens: bool = True,
    ) -> None:
        self._tokenizer = tokenizer
        self._top = top
        self._prompt = prompt
        self._is_first = True
        self._skip_special_tokens = skip_special_tokens
        self._offset = 0  # in characters, of the next token in the answer's text

    def of(
        self, token_ids: Sequence[int], logprobs: Sequence[float | None], tops: Sequence[Mapping[int, float]]
    ) -> dict[str, Any]:
        """The object for the next tokens; None is the log probability of a text's first token."""
        offsets = []
        for token_id in token_ids:
            offsets.append(self._offset)
            if self._tokenizer.is_visible(token_id, self._skip_special_tokens):
                self._offset += self._num_characters(token_id)
        return {
            "text_offset": offsets,
            "token_logprobs": [None if logprob is None else max(logprob, LEAST) for logprob in logprobs],
            "tokens": [self._text(token_id) for token_id in token_ids],
            "top_logprobs": [
                None if logprob is None else self._best(token_id, logprob, top)
                for token_id, logprob, top in zip(token_ids, logprobs, tops, strict=True)
            ],
        }

    def _num_characters(self, token_id: int) -> int:
        if self._is_first:  # of a text that begins with it, the tokenizer may drop its space
            self._is_first = False
            return len(text_behind(self._tokenizer, self._prompt, [token_id], self._skip_special_tokens))
        # A character counts where its first byte is written.
        return sum(byte & 0xC0 != 0x80 for byte in self._tokenizer.token_bytes(token_id))

    def _best(self, token_id: int, logprob: float, top: Mapping[int, float]) -> dict[str, float]:
        best = dict(sorted(top.items(), key=lambda item: -item[1])[: self._top])
        best.setdefault(token_id, logprob)
        texts: dict[str, float] = {}
        for one, value in best.items():  # of two tokens with one text the more probable stays
            texts.setdefault(self._text(one), max(value, LEAST))
        return texts

    def _text(self, token_id: int) -> str:
        written = self._tokenizer.token_bytes(token_id)
        try:
            return written.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in written)
