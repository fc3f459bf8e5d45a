"""Builds completion responses in OpenAI's format: one object, or the chunks of a stream."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from penstock.serve.api.chat_response import Envelope
from penstock.serve.api.choice_decoder import ChoiceDecoder, ChoiceDelta, PromptScore, TopTokens
from penstock.serve.api.json_parts import Parts, array, event_parts, with_members
from penstock.serve.api.token_scores import CompletionScores
from penstock.serve.api.usage import Usage
from penstock.serve.http.sse import DONE, EventTemplate, OpenAIStream, event

OBJECT_TYPE = "text_completion"
PromptScoreEncoder: TypeAlias = Callable[[Sequence[int], Sequence[PromptScore]], Parts]
"""Function that encodes ``prompt_logprobs`` from the tokens of a prompt and their scores."""


@dataclass(frozen=True)
class Echo:
    """A prompt that the response repeats before the output (request field ``echo``)."""

    text: str
    token_ids: list[int]


class CompletionResponse(OpenAIStream):
    """Builds the object or the stream events of one completion response.

    Args:
        envelope: the members that all objects share.
        choices: the decoders of all choices of all prompts.
        prompt_token_ids: the prompt tokens of each choice; None if token ids are not requested. If given, the
            choices also have the token ids of the output.
        echoes: the prompt of each choice; None if the response does not repeat the prompts.
        n: number of choices per prompt.
        scores: the encoder of log probabilities for each choice; None if they are not requested.
        encode_prompt_scores: encodes the log probabilities of a prompt; None if they are not requested. A
            stream cannot have them.
        include_usage: whether each chunk has the member ``usage`` and the last chunk has the total usage. In
            the other chunks, the value is null unless `events` gets a usage.
    """

    def __init__(
        self,
        envelope: Envelope,
        choices: Sequence[ChoiceDecoder],
        *,
        prompt_token_ids: Sequence[list[int]] | None = None,
        echoes: Sequence[Echo] | None = None,
        n: int = 1,
        scores: Sequence[CompletionScores] | None = None,
        encode_prompt_scores: PromptScoreEncoder | None = None,
        include_usage: bool = False,
    ) -> None:
        self._envelope = envelope
        self._choices = choices
        self._prompt_token_ids = prompt_token_ids
        self._echoes = echoes
        self._n = n
        self._scores = scores
        self._encode_prompt_scores = encode_prompt_scores
        self._include_usage = include_usage
        self._started_choices: set[int] = set()
        self._templates: dict[int, EventTemplate] = {}

    def whole_response(self, outputs: Sequence[ChoiceDelta], usage: Usage) -> Parts:
        """Yield the JSON of a response that is not streamed."""
        choices = (
            with_members(self._choice(index, output, is_first=True), **self._members(index, output))
            for index, output in enumerate(outputs)
        )
        return self._envelope.parts(OBJECT_TYPE, {"choices": array(choices)}, usage=usage)

    def events(self, index: int, delta: ChoiceDelta, usage: Usage | None = None) -> Iterable[bytes]:
        """Return the event of a delta.

        Returns an empty tuple if the event would have neither text, requested token ids, requested log
        probabilities nor a finish reason.

        Args:
            index: the index of the choice.
            delta: the new output of the choice.
            usage: the usage up to and including `delta`, if every chunk must have a usage, else None.
        """
        is_first = index not in self._started_choices
        text = delta.content
        is_plain = self._scores is None and self._prompt_token_ids is None and usage is None
        if is_plain and delta.finish_reason is None and not (is_first and self._echoes):
            return (self._template(index).with_value(text),) if text else ()
        choice = self._choice(index, delta, is_first=is_first)
        has_scores = self._scores is not None and (delta.scores or (is_first and self._echoes))
        has_ids = self._prompt_token_ids is not None and (is_first or delta.token_ids)
        if not (choice["text"] or has_scores or delta.finish_reason or has_ids):
            return ()
        self._started_choices.add(index)
        scores = self._logprobs(index, delta, is_first=is_first)
        extra_members = self._usage_field(usage)
        if scores is None:
            return (
                event(
                    self._envelope.response_object(
                        OBJECT_TYPE, [{**choice, "logprobs": None}], **extra_members
                    )
                ),
            )
        choices_with_logprobs = array([with_members(choice, logprobs=scores)])
        return event_parts(
            self._envelope.parts(OBJECT_TYPE, {"choices": choices_with_logprobs}, **extra_members)
        )

    def begin(self) -> bytes:
        """Return no events. Completions have none before the first delta."""
        return b""

    def end(self, usage: Usage) -> bytes:
        """Return the events after the last delta: the total usage, if requested, and ``[DONE]``."""
        return (self._usage_event(usage) if self._include_usage else b"") + DONE

    def _usage_event(self, usage: Usage) -> bytes:
        return event(self._envelope.response_object(OBJECT_TYPE, [], usage=usage))

    def _template(self, index: int) -> EventTemplate:
        if index not in self._templates:
            choice = {
                "index": index,
                "text": EventTemplate.PLACEHOLDER,
                "logprobs": None,
                "finish_reason": None,
            }
            chunk = self._envelope.response_object(OBJECT_TYPE, [choice], **self._usage_field(None))
            self._templates[index] = EventTemplate(chunk)
        return self._templates[index]

    def _usage_field(self, usage: Usage | None) -> dict[str, object]:
        return {"usage": usage} if self._include_usage or usage is not None else {}

    def _choice(self, index: int, delta: ChoiceDelta, *, is_first: bool) -> dict[str, object]:
        """Return a choice without its log probabilities."""
        echo = self._echoes[index] if self._echoes is not None and is_first else None
        choice: dict[str, object] = {
            "index": index,
            "text": (echo.text if echo else "") + delta.content,
            "finish_reason": delta.finish_reason,
        }
        if self._prompt_token_ids is not None:
            if is_first:
                choice["prompt_token_ids"] = self._prompt_token_ids[index]
            choice["token_ids"] = delta.token_ids
        return choice

    def _members(self, index: int, delta: ChoiceDelta) -> dict[str, Iterable[bytes]]:
        """Return the member ``logprobs`` and, if requested, ``prompt_logprobs`` of a whole choice."""
        scores = self._logprobs(index, delta, is_first=True)
        members: dict[str, Iterable[bytes]] = {"logprobs": (b"null",) if scores is None else scores}
        if self._encode_prompt_scores is not None:
            ids = self._choices[index].prompt_token_ids
            members["prompt_logprobs"] = self._encode_prompt_scores(ids, self._prompt_scores_at(index))
        return members

    def _logprobs(self, index: int, delta: ChoiceDelta, *, is_first: bool) -> Parts | None:
        """Return the JSON of a delta's log probabilities; None if they are not requested.

        If the delta has none, returns empty lists for the first delta of the choice, and None for later ones.
        With echo, the first delta includes the log probabilities of the prompt.
        """
        if self._scores is None:
            return None
        ids = [score.token_id for score in delta.scores]
        logprobs: list[float | None] = [score.logprob for score in delta.scores]
        top_tokens_by_position: list[TopTokens | None] = [score.top for score in delta.scores]
        if self._echoes is not None and is_first:
            echo, prompt_scores = self._echoes[index], self._prompt_scores_at(index)
            assert len(prompt_scores) == len(echo.token_ids) - 1, (
                "all prompt tokens but the first have scores"
            )
            ids = [*echo.token_ids, *ids]
            logprobs = [None, *(logprob for logprob, _ in prompt_scores), *logprobs]
            top_tokens_by_position = [None, *(top for _, top in prompt_scores), *top_tokens_by_position]
        return self._scores[index].parts(ids, logprobs, top_tokens_by_position) if ids or is_first else None

    def _prompt_scores_at(self, index: int) -> Sequence[PromptScore]:
        """Return the prompt scores of a choice; if it has none, those of the first choice of its prompt."""
        return self._choices[index].prompt_scores or self._choices[index - index % self._n].prompt_scores
