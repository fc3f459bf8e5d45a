"""What comes back for a prompt: piece by piece, and as a whole."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from math import fsum, inf
from typing import Literal, Self

from penstock.errors import InputError
from penstock.llm.beam_search import Hypothesis
from penstock.pipelines.core import (
    LogProbabilities,
    TextContext,
    TextGenerationResponse,
    TextGenerationStatus,
)
from penstock.plain_numbers import checked_integer
from penstock.text.detokenizer import Detokenizer, TokenDecoder, text_after_prompt


@dataclass(frozen=True, slots=True)
class GenerationOutput:
    """What came of one prompt."""

    text: str
    """The generated text; it ends before a stop string. Empty with ``SamplingParams(detokenize=False)``."""
    token_ids: list[int]
    """The generated tokens, up to the one that completed a stop string, without an end-of-sequence token."""
    prompt_token_ids: list[int]
    """The prompt as the model read it."""
    finish_reason: Literal["stop", "length"]
    """``stop``: the model ended the text, or a stop string did; ``length``: it reached its limit."""
    num_cached_tokens: int
    """How many prompt tokens were found in the prefix cache."""
    num_generated_tokens: int
    """Length of ``token_ids``, and one more where the model ended the text with a token of its own."""
    prompt: str | None
    """The prompt's text, messages as the chat template puts them; None where tokens were given."""
    index: int = 0
    """Which of the outputs of its prompt this is."""
    log_probabilities: LogProbabilities | None = None
    """Of ``token_ids``, one entry each; None unless asked for. Before penalties and temperature."""
    prompt_log_probabilities: LogProbabilities | None = None
    """Of ``prompt_token_ids`` without the first, which nothing predicts; None unless asked for."""
    score: float | None = None
    """What outputs were ranked by: the mean log probability under ``best_of``, the score of a beam."""

    @classmethod
    def of_beam(cls, context: TextContext, index: int, beam: Hypothesis, tokenizer: TokenDecoder) -> Self:
        """The output that a finished beam is."""
        tokens = beam.token_ids[:-1] if beam.ended else beam.token_ids
        values = beam.log_probabilities[: len(tokens)]
        tops = [{token: value} for token, value in zip(tokens, values, strict=True)]
        return cls(
            text=text_after_prompt(tokenizer, context.prompt_tokens, tokens),
            token_ids=tokens,
            prompt_token_ids=context.prompt_tokens.tolist(),
            finish_reason="stop" if beam.ended else "length",
            num_cached_tokens=context.num_cached_tokens,
            num_generated_tokens=len(beam.token_ids),
            prompt=context.prompt if isinstance(context.prompt, str) else None,
            index=index,
            log_probabilities=LogProbabilities(values, tops),
            score=beam.score,
        )


@dataclass(frozen=True, slots=True)
class OutputOptions:
    """How many answers to a prompt are wanted, and what is to be told of each."""

    n: int = 1
    best_of: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    @classmethod
    def of(cls, n: int, best_of: int | None, logprobs: int | None, prompt_logprobs: int | None) -> Self:
        """What a caller asks for.

        Raises:
            InputError: a number is out of range.
        """
        n = checked_integer("n", n, minimum=1)
        if best_of is not None:
            best_of = checked_integer("best_of", best_of, minimum=1)
        if logprobs is not None:
            logprobs = checked_integer("logprobs", logprobs)
        if prompt_logprobs is not None:
            prompt_logprobs = checked_integer("prompt_logprobs", prompt_logprobs)
        if best_of is not None and best_of < n:
            raise InputError(f"best_of is {best_of}, less than the n={n} outputs that are wanted of them")
        return cls(n, best_of, logprobs, prompt_logprobs)

    @property
    def num_choices(self) -> int:
        """How many answers are made of each prompt."""
        return self.n if self.best_of is None else self.best_of

    @property
    def num_top(self) -> int:
        """How many top tokens contexts report; 0 where nothing needs any."""
        if self.logprobs is None and self.prompt_logprobs is None and self.best_of is None:
            return 0
        return max(self.logprobs or 0, self.prompt_logprobs or 0, 1)


_NOTHING_MORE = OutputOptions()


class OutputBuilder:
    """What has come back for one context so far."""

    def __init__(self, context: TextContext, detokenizer: Detokenizer | None) -> None:
        self.context = context
        self.is_done = False
        self.new_text = ""
        self.num_new_tokens = 0
        self._detokenizer = detokenizer
        self._token_ids: list[int] = []
        self._log_probabilities = LogProbabilities([], [])
        self._of_prompt: LogProbabilities | None = None
        self._status = TextGenerationStatus.ACTIVE
        # The step that computes the prompt samples a token all the same.
        self._wants_tokens = context.sampling_params.max_new_tokens != 0

    def take(self, response: TextGenerationResponse) -> None:
        """Adds what one step brought."""
        for part in response.tokens:
            if part.log_probabilities is not None:
                self._take_log_probabilities(part.log_probabilities)
        tokens = [int(token.next_token) for token in response.tokens] if self._wants_tokens else []
        before = len(self._token_ids)
        self._token_ids += tokens
        self._status = response.final_status
        self.is_done = response.is_done
        self.new_text = ""
        if self._detokenizer is not None:
            self.new_text = self._detokenizer.append(tokens)
            if self.is_done:
                self.new_text += self._detokenizer.finish()
            if self._detokenizer.stop_match is not None:
                del self._token_ids[self._detokenizer.num_tokens :]
                self.is_done = True
        self.num_new_tokens = len(self._token_ids) - before

    @property
    def num_tokens(self) -> int:
        """Tokens that have come so far."""
        return len(self._token_ids)

    @property
    def prompt_log_probabilities(self) -> LogProbabilities | None:
        """Those of the prompt, if the context was to echo it."""
        return self._of_prompt or self.context.prompt_log_probabilities

    @property
    def mean_log_probability(self) -> float:
        """Of the generated tokens; of none it is minus infinity."""
        values = self._log_probabilities.token_log_probabilities[: len(self._token_ids)]
        return fsum(values) / len(values) if values else -inf

    def output(
        self, report: OutputOptions = _NOTHING_MORE, index: int = 0, of_prompt: OutputBuilder | None = None
    ) -> GenerationOutput:
        """The whole, once it is done.

        Args:
            report: what it is to tell.
            index: its place among the outputs of its prompt.
            of_prompt: the answer that knows the prompt's log probabilities; by default this one.
        """
        stopped = self._detokenizer is not None and self._detokenizer.stop_match is not None
        at_end = self._status is TextGenerationStatus.END_OF_SEQUENCE
        ended = at_end and not stopped and self._wants_tokens
        prompt_tokens = self.context.prompt_tokens.tolist()
        return GenerationOutput(
            text=self._detokenizer.text if self._detokenizer is not None else "",
            token_ids=self._token_ids,
            prompt_token_ids=prompt_tokens,
            finish_reason="stop" if stopped or ended else "length",
            num_cached_tokens=self.context.num_cached_tokens,
            num_generated_tokens=len(self._token_ids) + ended,
            prompt=self.context.prompt if isinstance(self.context.prompt, str) else None,
            index=index,
            log_probabilities=_cut(self._log_probabilities, report.logprobs, self._token_ids),
            prompt_log_probabilities=_cut(
                (of_prompt or self).prompt_log_probabilities, report.prompt_logprobs, prompt_tokens[1:]
            ),
            score=None if report.best_of is None else self.mean_log_probability,
        )

    def _take_log_probabilities(self, rows: LogProbabilities) -> None:
        """Those of one token, behind those of the prompt where it is the first and the prompt is echoed."""
        values, tops = rows.token_log_probabilities, rows.top_log_probabilities
        if self.context.log_probabilities_echo and self._of_prompt is None:
            self._of_prompt = LogProbabilities(values[:-1], tops[:-1])
        self._log_probabilities.token_log_probabilities.append(values[-1])
        self._log_probabilities.top_log_probabilities.append(tops[-1])


def best_first(choices: Sequence[OutputBuilder], report: OutputOptions) -> list[GenerationOutput]:
    """The outputs of one prompt: all its answers as they come, or under ``best_of`` the best of them."""
    ranked = list(choices)
    if report.best_of is not None:
        ranked.sort(key=lambda answer: -answer.mean_log_probability)
    return [answer.output(report, index, choices[0]) for index, answer in enumerate(ranked[: report.n])]


def _cut(rows: LogProbabilities | None, top_n: int | None, tokens: Sequence[int]) -> LogProbabilities | None:
    """The rows of ``tokens`` with the wanted number of top tokens; None where none were wanted."""
    if top_n is None:
        return None
    if rows is None:  # a prompt of one token has no rows
        return LogProbabilities([], [])
    end = len(tokens)
    of_tokens = LogProbabilities(rows.token_log_probabilities[:end], rows.top_log_probabilities[:end])
    return of_tokens.cut(top_n, tokens)


class TextStream(Iterator[str]):
    """The text of one prompt, piece by piece; the pieces joined are ``output.text``.

    >>> stream = llm.stream("Once upon a time")  # doctest: +SKIP
    >>> for piece in stream:  # doctest: +SKIP
    ...     print(piece, end="", flush=True)
    """

    def __init__(
        self, answer: OutputBuilder, pieces: Generator[str, None, None], report: OutputOptions = _NOTHING_MORE
    ) -> None:
        self._answer = answer
        self._pieces = pieces
        self._report = report

    @property
    def num_tokens(self) -> int:
        """Tokens that have been generated so far; several may come with one piece."""
        return self._answer.num_tokens

    @property
    def output(self) -> GenerationOutput:
        """The whole, once the stream has ended.

        Raises:
            InputError: there is more to come, or it was closed before.
        """
        if not self._answer.is_done:
            raise InputError("the stream has not come to its end: read on, or take the pieces alone")
        return self._answer.output(self._report)

    def __next__(self) -> str:
        return next(self._pieces)

    def close(self) -> None:
        """Drops the rest; a no-op at the end."""
        self._pieces.close()
