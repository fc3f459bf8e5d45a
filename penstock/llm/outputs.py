"""Outputs of prompts, complete or as a stream of pieces."""

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
    """One generated completion of a prompt."""

    text: str
    """The generated text, up to a stop string. Empty with ``SamplingParams(detokenize=False)``."""
    token_ids: list[int]
    """The generated tokens up to the token that completed a stop string, without the end-of-sequence
    token."""
    prompt_token_ids: list[int]
    """The prompt's token ids, including special tokens."""
    finish_reason: Literal["stop", "length"]
    """``stop``: the model or a stop string ended the text; ``length``: the text reached its limit."""
    num_cached_tokens: int
    """The number of prompt tokens that were found in the prefix cache."""
    num_generated_tokens: int
    """The length of ``token_ids``, plus 1 if an end-of-sequence token ended the text."""
    prompt: str | None
    """The prompt's text, or the rendered chat template; None if the prompt was token ids."""
    index: int = 0
    """The index of this output among the outputs of its prompt."""
    log_probabilities: LogProbabilities | None = None
    """One entry for each of ``token_ids``, computed before penalties and temperature; None unless requested.
    """
    prompt_log_probabilities: LogProbabilities | None = None
    """One entry for each of ``prompt_token_ids`` except the first; None unless requested."""
    score: float | None = None
    """The score by which outputs are ranked: the mean log probability with ``best_of``, or the score of a
    beam; None otherwise."""

    @classmethod
    def from_beam(cls, context: TextContext, index: int, beam: Hypothesis, tokenizer: TokenDecoder) -> Self:
        """Return the output of a finished beam."""
        tokens = beam.token_ids[:-1] if beam.has_end_token else beam.token_ids
        values = beam.log_probabilities[: len(tokens)]
        top_log_probabilities = [{token: value} for token, value in zip(tokens, values, strict=True)]
        return cls(
            text=text_after_prompt(tokenizer, context.prompt_tokens, tokens),
            token_ids=tokens,
            prompt_token_ids=context.prompt_tokens.tolist(),
            finish_reason="stop" if beam.has_end_token else "length",
            num_cached_tokens=context.num_cached_tokens,
            num_generated_tokens=len(beam.token_ids),
            prompt=context.prompt if isinstance(context.prompt, str) else None,
            index=index,
            log_probabilities=LogProbabilities(values, top_log_probabilities),
            score=beam.score,
        )


@dataclass(frozen=True, slots=True)
class OutputOptions:
    """The number of outputs per prompt, and the log probabilities that they report."""

    n: int = 1
    best_of: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    @classmethod
    def from_arguments(
        cls, n: int, best_of: int | None, logprobs: int | None, prompt_logprobs: int | None
    ) -> Self:
        """Return the checked options.

        Raises:
            InputError: an argument is not an integer or is out of range, or ``best_of`` is less than ``n``.
        """
        n = checked_integer("n", n, minimum=1)
        if best_of is not None:
            best_of = checked_integer("best_of", best_of, minimum=1)
        if logprobs is not None:
            logprobs = checked_integer("logprobs", logprobs)
        if prompt_logprobs is not None:
            prompt_logprobs = checked_integer("prompt_logprobs", prompt_logprobs)
        if best_of is not None and best_of < n:
            raise InputError(f"best_of is {best_of}, less than n={n}: raise best_of, or lower n")
        return cls(n, best_of, logprobs, prompt_logprobs)

    @property
    def num_choices(self) -> int:
        """The number of outputs to generate for each prompt."""
        return self.n if self.best_of is None else self.best_of

    @property
    def num_top_tokens(self) -> int:
        """The number of top tokens per position that contexts report.

        The number is at least 1 if log probabilities are needed, otherwise 0.
        """
        if self.logprobs is None and self.prompt_logprobs is None and self.best_of is None:
            return 0
        return max(self.logprobs or 0, self.prompt_logprobs or 0, 1)


_DEFAULT_OPTIONS = OutputOptions()


class OutputBuilder:
    """Collects the output of one context.

    Attributes:
        context: the context.
        is_done: whether the output is complete.
        new_text: the text that the last step added.
        num_new_tokens: the number of tokens that the last step added.
    """

    def __init__(self, context: TextContext, detokenizer: Detokenizer | None) -> None:
        self.context = context
        self.is_done = False
        self.new_text = ""
        self.num_new_tokens = 0
        self._detokenizer = detokenizer
        self._token_ids: list[int] = []
        self._log_probabilities = LogProbabilities([], [])
        self._prompt_log_probabilities: LogProbabilities | None = None
        self._status = TextGenerationStatus.ACTIVE
        # The step that computes the prompt always samples a token. With max_new_tokens = 0 it is dropped.
        self._collects_tokens = context.sampling_params.max_new_tokens != 0

    def take(self, response: TextGenerationResponse) -> None:
        """Add the output of one step."""
        for token_response in response.tokens:
            if token_response.log_probabilities is not None:
                self._take_log_probabilities(token_response.log_probabilities)
        tokens = [int(token.next_token) for token in response.tokens] if self._collects_tokens else []
        num_before = len(self._token_ids)
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
        self.num_new_tokens = len(self._token_ids) - num_before

    @property
    def num_tokens(self) -> int:
        """The number of tokens so far."""
        return len(self._token_ids)

    @property
    def token_ids(self) -> list[int]:
        """The tokens so far."""
        return self._token_ids

    def take_prompt_log_probabilities(self, rows: LogProbabilities) -> None:
        """Store the log probabilities of the prompt, which can arrive before the first output token."""
        self._prompt_log_probabilities = rows

    @property
    def prompt_log_probabilities(self) -> LogProbabilities | None:
        """The log probabilities of the prompt; None if they were not requested or have not arrived."""
        return self._prompt_log_probabilities or self.context.prompt_log_probabilities

    @property
    def mean_log_probability(self) -> float:
        """The mean log probability of the generated tokens; minus infinity if there are none."""
        values = self._log_probabilities.token_log_probabilities[: len(self._token_ids)]
        return fsum(values) / len(values) if values else -inf

    def output(
        self,
        options: OutputOptions = _DEFAULT_OPTIONS,
        index: int = 0,
        prompt_builder: OutputBuilder | None = None,
    ) -> GenerationOutput:
        """Return the finished output.

        Args:
            options: the log probabilities that the output reports.
            index: the index among the outputs of the prompt.
            prompt_builder: the builder that has the prompt's log probabilities; by default this builder.
        """
        is_stopped = self._detokenizer is not None and self._detokenizer.stop_match is not None
        is_end_of_sequence = self._status is TextGenerationStatus.END_OF_SEQUENCE
        has_ended = is_end_of_sequence and not is_stopped and self._collects_tokens
        prompt_tokens = self.context.prompt_tokens.tolist()
        return GenerationOutput(
            text=self._detokenizer.text if self._detokenizer is not None else "",
            token_ids=self._token_ids,
            prompt_token_ids=prompt_tokens,
            finish_reason="stop" if is_stopped or has_ended else "length",
            num_cached_tokens=self.context.num_cached_tokens,
            num_generated_tokens=len(self._token_ids) + has_ended,
            prompt=self.context.prompt if isinstance(self.context.prompt, str) else None,
            index=index,
            log_probabilities=_cut(self._log_probabilities, options.logprobs, self._token_ids),
            prompt_log_probabilities=_cut(
                (prompt_builder or self).prompt_log_probabilities, options.prompt_logprobs, prompt_tokens[1:]
            ),
            score=None if options.best_of is None else self.mean_log_probability,
        )

    def _take_log_probabilities(self, rows: LogProbabilities) -> None:
        """Store the log probabilities of one token.

        If the context echoes the prompt, the rows of the first token begin with the rows of the prompt.
        """
        values, top_log_probabilities = rows.token_log_probabilities, rows.top_log_probabilities
        if self.context.log_probabilities_echo and self._prompt_log_probabilities is None:
            self._prompt_log_probabilities = LogProbabilities(values[:-1], top_log_probabilities[:-1])
        self._log_probabilities.token_log_probabilities.append(values[-1])
        self._log_probabilities.top_log_probabilities.append(top_log_probabilities[-1])


def best_first(choices: Sequence[OutputBuilder], options: OutputOptions) -> list[GenerationOutput]:
    """Return all outputs of one prompt in order, or with ``best_of`` the ``n`` best outputs, best first."""
    ranked_builders = list(choices)
    if options.best_of is not None:
        ranked_builders.sort(key=lambda builder: -builder.mean_log_probability)
    return [
        builder.output(options, index, choices[0])
        for index, builder in enumerate(ranked_builders[: options.n])
    ]


def _cut(rows: LogProbabilities | None, top_n: int | None, tokens: Sequence[int]) -> LogProbabilities | None:
    """Return the rows of ``tokens`` with ``top_n`` top tokens each; None if ``top_n`` is None."""
    if top_n is None:
        return None
    if rows is None:  # a prompt of one token has no rows
        return LogProbabilities([], [])
    end = len(tokens)
    token_rows = LogProbabilities(rows.token_log_probabilities[:end], rows.top_log_probabilities[:end])
    return token_rows.cut(top_n, tokens)


class TextStream(Iterator[str]):
    """The generated text of one prompt as a stream of pieces. The concatenated pieces are ``output.text``.

    >>> stream = llm.stream("Once upon a time")  # doctest: +SKIP
    >>> for piece in stream:  # doctest: +SKIP
    ...     print(piece, end="", flush=True)
    """

    def __init__(
        self,
        builder: OutputBuilder,
        pieces: Generator[str, None, None],
        options: OutputOptions = _DEFAULT_OPTIONS,
    ) -> None:
        self._builder = builder
        self._pieces = pieces
        self._options = options

    @property
    def prompt(self) -> str:
        """The text of the prompt, or the rendered chat template; empty if the prompt was token ids."""
        prompt = self._builder.context.prompt
        return prompt if isinstance(prompt, str) else ""

    @property
    def num_tokens(self) -> int:
        """The number of generated tokens so far. One piece can contain several tokens."""
        return self._builder.num_tokens

    @property
    def output(self) -> GenerationOutput:
        """The finished output.

        Raises:
            InputError: the stream has not ended, or it was closed before its end.
        """
        if not self._builder.is_done:
            raise InputError("the stream has not ended: read all of its pieces first")
        return self._builder.output(self._options)

    def __next__(self) -> str:
        return next(self._pieces)

    def close(self) -> None:
        """Cancel the request. Does nothing if the stream has ended."""
        self._pieces.close()
