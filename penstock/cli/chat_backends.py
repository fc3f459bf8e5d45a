"""The back ends of `penstock chat`: a model in this process, or a server."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from http.client import HTTPException
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypedDict

from penstock.errors import InputError, RequestFailedError, UnavailableError

if TYPE_CHECKING:
    from http.client import HTTPResponse

    from penstock.llm.llm import LLM

ChatMessages: TypeAlias = Sequence[Mapping[str, object]]

_TIMEOUT_SECONDS = 600.0
"""Seconds without data after which a request to the server fails."""


@dataclass(frozen=True, slots=True)
class AnswerPiece:
    """A part of the text of an answer. The text is empty if the piece has only the number of tokens."""

    text: str
    is_reasoning: bool = False
    num_tokens: int | None = None
    """The number of tokens of the answer so far; None if unknown."""


class ChatBackend(Protocol):
    """The interface of `penstock chat` to a model."""

    name: str
    """The name of the model."""

    def answer(self, messages: ChatMessages, settings: Mapping[str, object]) -> Iterator[AnswerPiece]:
        """Yield the answer in pieces. Closing the iterator cancels the request.

        Raises:
            PenstockError: the conversation cannot be answered.
        """
        ...


class LocalBackend:
    """Generates answers with a model in this process."""

    def __init__(self, llm: LLM) -> None:
        from penstock.serve.parsers import ParserFactory

        self.name = llm.config.model.name
        self._llm = llm
        self._parsers = ParserFactory.choose(llm.tokenizer.chat_template_source, "none", "auto")

    def answer(self, messages: ChatMessages, settings: Mapping[str, object]) -> Iterator[AnswerPiece]:
        """Yield the answer in pieces, each of them reasoning or text."""
        from penstock.serve.parsers import Content, Reasoning

        names = {"max_tokens": "max_new_tokens", "min_tokens": "min_new_tokens"}
        llm_settings: dict[str, Any] = {names.get(name, name): value for name, value in settings.items()}
        params = self._llm.config.default_sampling_params(**llm_settings)
        with closing(self._llm.stream(sampling_params=params, messages=messages)) as stream:
            in_reasoning = self._parsers.prompt_opens_reasoning(stream.prompt)
            parser = self._parsers.new(in_reasoning=in_reasoning)
            for text in stream:
                for event in parser.push(text):
                    if isinstance(event, Content | Reasoning):
                        yield AnswerPiece(event.text, isinstance(event, Reasoning), stream.num_tokens)
            for event in parser.finish():
                if isinstance(event, Content | Reasoning):
                    yield AnswerPiece(event.text, isinstance(event, Reasoning), stream.num_tokens)


class ServerBackend:
    """Requests answers from a server with the OpenAI API.

    Args:
        url: the address of the server, with or without ``/v1``.
        model: the name of the model; None selects the first model that the server lists.
        api_key: the API key, if the server needs one.

    Raises:
        InputError: the URL is not an HTTP URL, or the server lists no model.
        UnavailableError: the server does not answer.
        RequestFailedError: the server refuses the request.
    """

    def __init__(self, url: str, model: str | None, api_key: str | None) -> None:
        if not url.startswith(("http://", "https://")):
            raise InputError(f"--url is {url!r}: it must begin with http:// or https://")
        self._url = url.rstrip("/").removesuffix("/v1")
        self._headers = {"content-type": "application/json"}
        if api_key:
            self._headers["authorization"] = f"Bearer {api_key}"
        if model is None:
            with closing(self._open("/v1/models", None)) as response:
                model_list = json.load(response)["data"]
            if not model_list:
                raise InputError(f"the server at {self._url} lists no model: give the model name as MODEL")
            model = str(model_list[0]["id"])
        self.name = model

    def answer(self, messages: ChatMessages, settings: Mapping[str, object]) -> Iterator[AnswerPiece]:
        """Yield the answer in pieces."""
        body = {
            "model": self.name,
            "messages": [*messages],
            "stream": True,
            "stream_options": {"include_usage": True},
            **settings,
        }
        with closing(self._open("/v1/chat/completions", body)) as response:
            is_finished = False
            for chunk in self._chunks(response):
                is_finished |= any(choice.get("finish_reason") for choice in chunk.get("choices", ()))
                yield from _answer_pieces(chunk)
        if not is_finished:
            raise UnavailableError(f"the server at {self._url} ended the stream before the end of the answer")

    def _chunks(self, response: HTTPResponse) -> Iterator[_Chunk]:
        """Yield the events of a stream up to ``[DONE]`` or the end of the connection.

        Raises:
            RequestFailedError: the data of an event are not JSON.
            UnavailableError: the connection fails, or no data arrive for `_TIMEOUT_SECONDS`.
        """
        try:
            for line in response:
                if not line.startswith(b"data: "):
                    continue
                data = line.removeprefix(b"data: ").strip()
                if data == b"[DONE]":
                    return
                yield json.loads(data)
        except ValueError as error:
            raise RequestFailedError(f"the server sent an event that is not JSON: {error}") from None
        except (OSError, HTTPException) as error:
            raise UnavailableError(
                f"the connection to {self._url} failed during the answer: {error}"
            ) from None

    def _open(self, path: str, body: Mapping[str, object] | None) -> HTTPResponse:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._url + path, data, self._headers)
        try:
            response: HTTPResponse = urllib.request.urlopen(request, timeout=_TIMEOUT_SECONDS)
        except urllib.error.HTTPError as error:
            with error:
                raise RequestFailedError(
                    f"the server refuses the request: {_error_message(error.read())}"
                ) from None
        except OSError as error:
            reason = getattr(error, "reason", error)
            raise UnavailableError(f"no server answers at {self._url}: {reason}") from None
        return response


class _Delta(TypedDict, total=False):
    content: str | None
    reasoning_content: str | None
    reasoning: str | None


class _Choice(TypedDict, total=False):
    delta: _Delta
    finish_reason: str | None


class _Chunk(TypedDict, total=False):
    """The fields of a stream event that this client reads."""

    error: Mapping[str, object]
    usage: Mapping[str, int] | None
    choices: list[_Choice]


def _answer_pieces(chunk: _Chunk) -> Iterator[AnswerPiece]:
    """Yield the pieces of one event of a stream.

    Raises:
        RequestFailedError: the event is an error.
    """
    if "error" in chunk:
        raise RequestFailedError(f"the server ended the answer: {chunk['error'].get('message')}")
    usage = chunk.get("usage")
    if usage:
        yield AnswerPiece("", num_tokens=usage["completion_tokens"])
    for choice in chunk.get("choices", ()):
        delta = choice.get("delta", {})
        if reasoning := delta.get("reasoning_content") or delta.get("reasoning"):
            yield AnswerPiece(reasoning, is_reasoning=True)
        if text := delta.get("content"):
            yield AnswerPiece(text)


def _error_message(body: bytes) -> str:
    """Return the message of an error response."""
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return body[:200].decode(errors="replace")
