"""Decodes the tokens of one choice to text, reasoning, tool calls, log probabilities and a finish reason."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

import msgspec

from penstock.pipelines.core import LogProbabilities, TextContext, TextGenerationStatus
from penstock.serve.parsers import Content, Event, OutputParser, Reasoning
from penstock.text.detokenizer import AnyTokenIds, Detokenizer, TokenDecoder, text_after_prompt
from penstock.worker.messages import PackedLogProbabilities

AnyLogProbabilities: TypeAlias = LogProbabilities | PackedLogProbabilities
"""The log probabilities of one or more positions."""
TopTokens: TypeAlias = Mapping[int, float] | msgspec.Raw
"""Token id -> log probability for the top tokens of one position: a mapping, or its msgpack encoding."""
PromptScore: TypeAlias = tuple[float, TopTokens]
"""The log probability of a prompt token, and the top tokens of its position."""

_decode_top = msgspec.msgpack.Decoder(dict[int, float]).decode


def top_tokens(top: TopTokens) -> Mapping[int, float]:
    """Return the top tokens as a mapping."""
    return _decode_top(top) if isinstance(top, msgspec.Raw) else top


@dataclass(frozen=True, slots=True)
class Score:
    """The log probability of a token, and the top tokens of its position."""

    token_id: int
    logprob: float
    top: TopTokens


@dataclass(slots=True)
class ChoiceDelta:
    """The output that new tokens add to a choice. The concatenated deltas of a choice are its output."""

    events: list[Event]
    """Content, reasoning and tool calls, in the order of the output."""
    token_ids: list[int]
    scores: list[Score]
    """One score per token that has log probabilities; empty if they are not requested."""
    finish_reason: str | None = None
    """Set only in the last delta."""
    num_tokens: int = 0
    """Number of tokens to add to the usage, including the token that ended the output, if any."""

    @property
    def content(self) -> str:
        """The text without reasoning and tool calls."""
        return "".join([event.text for event in self.events if isinstance(event, Content)])

    @property
    def reasoning(self) -> str:
        """The text of the reasoning."""
        return "".join([event.text for event in self.events if isinstance(event, Reasoning)])


def finish_reason(status: TextGenerationStatus, *, ended_by_text: bool, has_tool_calls: bool) -> str:
    """Return OpenAI's finish reason of a choice.

    >>> finish_reason(TextGenerationStatus.MAXIMUM_LENGTH, ended_by_text=False, has_tool_calls=True)
    'length'
    """
    if not ended_by_text and status is not TextGenerationStatus.END_OF_SEQUENCE:
        return "length"
    return "tool_calls" if has_tool_calls else "stop"


class ChoiceDecoder:
    """Converts the tokens that the worker sends for one choice to deltas.

    Args:
        context: the context of the choice.
        tokenizer: the tokenizer of the model.
        parser: splits the text into reasoning, tool calls and content. Without a parser, all text is content.
        skip_special_tokens: whether special tokens are left out of the text. Must be False if the parser's
            markup consists of special tokens.
        parses_each_token: whether the text is parsed after each token. If False, reasoning tokens are not
            counted. If True and only one tool call is allowed, this call ends the choice at its last token.
        keeps_stop: whether the text includes the stop string that ended the choice.
        may_decode_at_end: whether all tokens may be decoded together at the end, because the response is not
            streamed.
    """

    def __init__(
        self,
        context: TextContext,
        tokenizer: TokenDecoder,
        *,
        parser: OutputParser | None = None,
        skip_special_tokens: bool = True,
        parses_each_token: bool = False,
        may_decode_at_end: bool = False,
        keeps_stop: bool = False,
    ) -> None:
        params = context.sampling_params
        self._prompt = context.prompt_tokens
        self.num_tokens = 0
        """Number of tokens in ``usage``: the tokens of the output and the token that ended it, if any."""
        self.num_cached_tokens = 0
        self.num_reasoning_tokens = 0
        self.finish_reason: str | None = None
        self.prompt_scores: list[PromptScore] = []
        """Scores of all prompt tokens except the first one. Empty if they are not requested.

        Complete when the first output token arrives.
        """
        self._parser = parser
        self._text_decoder: _TextDecoder
        if may_decode_at_end and not params.stop and not parses_each_token:
            self._text_decoder = _DeferredDetokenizer(tokenizer, context.prompt_tokens, skip_special_tokens)
        else:
            self._text_decoder = Detokenizer(
                tokenizer,
                params.stop or (),
                prompt=context.prompt_tokens,
                skip_special_tokens=skip_special_tokens,
                keeps_stop=keeps_stop,
            )
        self.decodes_at_end = isinstance(self._text_decoder, _DeferredDetokenizer)
        """Whether the text is decoded only at the end.

        No stop string or tool call can then end the choice.
        """
        self._parses_each_token = parses_each_token
        self._has_answer_begun = False  # whether output other than reasoning has been parsed
        self._has_reasoning = False
        self._has_tool_calls = False
        self._num_output_tokens = 0
        # Number of output tokens up to the end of the stop string or tool call that ended the choice.
        self._end_position: int | None = None
        # With max_tokens 0, the prefill step still samples a token. The token is dropped.
        self._has_output = params.max_new_tokens != 0

    @property
    def prompt_token_ids(self) -> list[int]:
        """The tokens of the prompt."""
        ids: list[int] = self._prompt.tolist()
        return ids

    @property
    def is_done(self) -> bool:
        """Whether the choice has ended.

        The worker may still be generating, for example after a stop string.
        """
        return self.finish_reason is not None

    @property
    def stop_match(self) -> str | None:
        """The stop string that ended the choice; None if another condition ended it."""
        return self._text_decoder.stop_match

    @property
    def ended_by_text(self) -> bool:
        """Whether a stop string or the only allowed tool call ended the choice.

        In this case the caller must cancel the generation, because the worker does not decode text.
        """
        return self._end_position is not None

    def take(
        self,
        token_ids: Sequence[int],
        status: TextGenerationStatus,
        log_probabilities: Sequence[AnyLogProbabilities | None] = (),
        prompt_log_probabilities: AnyLogProbabilities | None = None,
    ) -> ChoiceDelta:
        """Decode the next tokens of the choice. Returns an empty delta after the end of the choice.

        Args:
            token_ids: the tokens that the worker has generated.
            status: whether the worker has finished the choice, and why.
            log_probabilities: one entry per token; empty if they are not requested.
            prompt_log_probabilities: the log probabilities of the prompt, if the worker sends them without a
                token.
        """
        if self.is_done:
            return ChoiceDelta([], [], [])
        if prompt_log_probabilities is not None:
            self._add_prompt_scores(prompt_log_probabilities)
        if not self._has_output:
            self._score(token_ids, log_probabilities)
            token_ids = ()
        ids = list(token_ids)
        events = self._parse_each_token(ids) if self._parses_each_token else self._parse_all_tokens(ids)
        if self._end_position is not None:
            del ids[self._end_position - self._num_output_tokens :]
        num_tokens_before = self.num_tokens
        self._num_output_tokens += len(ids)
        if self._end_position is not None or status.is_done:
            events += self._finish(status)
        self.num_tokens = self._num_output_tokens
        if self._end_position is None and self.finish_reason in ("stop", "tool_calls"):
            self.num_tokens += 1  # the token that ended the output
        if self._has_reasoning and not self._has_answer_begun:
            self.num_reasoning_tokens = self._num_output_tokens
        scores = self._score(ids, log_probabilities)
        return ChoiceDelta(events, ids, scores, self.finish_reason, self.num_tokens - num_tokens_before)

    def _parse_all_tokens(self, ids: Sequence[int]) -> list[Event]:
        events = self._parse(self._text_decoder.append(ids))
        if self._text_decoder.stop_match is not None:
            self._end_position = self._text_decoder.num_tokens
        return events

    def _parse_each_token(self, ids: Sequence[int]) -> list[Event]:
        events: list[Event] = []
        for num_earlier_tokens, token_id in enumerate(ids, self._num_output_tokens):
            new_events = self._parse(self._text_decoder.append([token_id]))
            if not self._has_answer_begun and any(not isinstance(event, Reasoning) for event in new_events):
                self._has_answer_begun = True
                self.num_reasoning_tokens = num_earlier_tokens if self._has_reasoning else 0
            self._has_reasoning |= any(isinstance(event, Reasoning) for event in new_events)
            events += new_events
            if self._text_decoder.stop_match is not None or (self._parser is not None and self._parser.done):
                self._end_position = num_earlier_tokens + 1
                break
        return events

    def _parse(self, text: str) -> list[Event]:
        if not text:
            return []
        events: list[Event] = [Content(text)] if self._parser is None else self._parser.push(text)
        self._has_tool_calls |= any(not isinstance(event, Content | Reasoning) for event in events)
        return events

    def _finish(self, status: TextGenerationStatus) -> list[Event]:
        events = self._parse(self._text_decoder.finish())
        if self._parser is not None:
            last_events = self._parser.finish()
            self._has_tool_calls |= any(not isinstance(event, Content | Reasoning) for event in last_events)
            events = [*events, *last_events]
        if not self._has_output:
            status = TextGenerationStatus.MAXIMUM_LENGTH
        self.finish_reason = finish_reason(
            status, ended_by_text=self._end_position is not None, has_tool_calls=self._has_tool_calls
        )
        return events

    def _score(
        self, token_ids: Sequence[int], log_probabilities: Sequence[AnyLogProbabilities | None]
    ) -> list[Score]:
        """Return the scores of generated tokens, and append scores of prompt tokens to `prompt_scores`.

        Each entry of `log_probabilities` belongs to one generated token. An entry that is not None has one or
        more positions. The last position belongs to the generated token, the earlier positions to the prompt.
        """
        scores = []
        for token_id, position_logprobs in zip(token_ids, log_probabilities, strict=False):
            if position_logprobs is not None:
                *prompt_scores, (logprob, top) = _position_scores(position_logprobs)
                self.prompt_scores += prompt_scores
                scores.append(Score(token_id, logprob, top))
        return scores

    def _add_prompt_scores(self, position_logprobs: AnyLogProbabilities) -> None:
        self.prompt_scores += _position_scores(position_logprobs)


def _position_scores(position_logprobs: AnyLogProbabilities) -> Iterator[PromptScore]:
    top_tokens_by_position: Sequence[TopTokens] = position_logprobs.top_log_probabilities
    return zip(position_logprobs.token_log_probabilities, top_tokens_by_position, strict=True)


class _TextDecoder(Protocol):
    stop_match: str | None
    num_tokens: int

    def append(self, token_ids: Sequence[int]) -> str: ...

    def finish(self) -> str: ...


@dataclass
class _DeferredDetokenizer:
    """Decodes all tokens together at the end.

    The text is the same as with a `Detokenizer`, but decoding takes less time.
    """

    tokenizer: TokenDecoder
    prompt: AnyTokenIds
    skip_special_tokens: bool
    stop_match: str | None = None
    num_tokens: int = 0
    _ids: list[int] = field(default_factory=list)

    def append(self, token_ids: Sequence[int]) -> str:
        self._ids += token_ids
        self.num_tokens += len(token_ids)
        return ""

    def finish(self) -> str:
        return text_after_prompt(self.tokenizer, self.prompt, self._ids, self.skip_special_tokens)
