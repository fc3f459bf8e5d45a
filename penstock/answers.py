"""What comes back for a prompt: piece by piece, and as a whole."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import dataclass
from typing import Literal

from penstock.errors import InputError
from penstock.pipelines.core import TextContext, TextGenerationResponse, TextGenerationStatus
from penstock.pipelines.detokenizer import Detokenizer


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


class Answer:
    """What has come back for one context so far."""

    def __init__(self, context: TextContext, detokenizer: Detokenizer | None) -> None:
        self.context = context
        self.is_done = False
        self.new_text = ""
        self.num_new_tokens = 0
        self._detokenizer = detokenizer
        self._token_ids: list[int] = []
        self._status = TextGenerationStatus.ACTIVE
        # The step that computes the prompt samples a token all the same.
        self._wants_tokens = context.sampling_params.max_new_tokens != 0

    def take(self, response: TextGenerationResponse) -> None:
        """Adds what one step brought."""
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

    def output(self) -> GenerationOutput:
        """The whole, once it is done."""
        stopped = self._detokenizer is not None and self._detokenizer.stop_match is not None
        at_end = self._status is TextGenerationStatus.END_OF_SEQUENCE
        ended = at_end and not stopped and self._wants_tokens
        return GenerationOutput(
            text=self._detokenizer.text if self._detokenizer is not None else "",
            token_ids=self._token_ids,
            prompt_token_ids=self.context.prompt_tokens.tolist(),
            finish_reason="stop" if stopped or ended else "length",
            num_cached_tokens=self.context.num_cached_tokens,
            num_generated_tokens=len(self._token_ids) + ended,
            prompt=self.context.prompt if isinstance(self.context.prompt, str) else None,
        )


class TextStream(Iterator[str]):
    """The text of one prompt, piece by piece; the pieces joined are ``output.text``.

    >>> stream = llm.stream("Once upon a time")  # doctest: +SKIP
    >>> for piece in stream:  # doctest: +SKIP
    ...     print(piece, end="", flush=True)
    """

    def __init__(self, answer: Answer, pieces: Generator[str, None, None]) -> None:
        self._answer = answer
        self._pieces = pieces

    @property
    def output(self) -> GenerationOutput:
        """The whole, once the stream has ended.

        Raises:
            InputError: there is more to come, or it was closed before.
        """
        if not self._answer.is_done:
            raise InputError("the stream has not come to its end: read on, or take the pieces alone")
        return self._answer.output()

    def __next__(self) -> str:
        return next(self._pieces)

    def close(self) -> None:
        """Drops the rest; a no-op at the end."""
        self._pieces.close()
