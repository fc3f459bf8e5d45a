"""The objects that the routes use: ``request.app.state.services``."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Protocol, TypeVar

from fastapi import Request

from penstock.config import PipelineConfig
from penstock.errors import OverloadedError
from penstock.pipelines.core import PipelineTask
from penstock.serve.api.images import ImageRequests
from penstock.serve.api.json_parts import EncodingTurns
from penstock.serve.api.token_fragments import TokenFragments
from penstock.serve.config import ServeConfig
from penstock.serve.http.gate import Gate
from penstock.serve.http.json_decoder import JsonDecoder
from penstock.serve.observability.metrics import Metrics
from penstock.text.tokenizer import TextTokenizer

if TYPE_CHECKING:
    from penstock.serve.api.schemas import GenerationBody
    from penstock.serve.observability.tracing import Tracing
    from penstock.serve.parsers import ParserFactory
    from penstock.worker.engine_client import EngineClient


class Closable(Protocol):
    """State that is closed when the server stops."""

    def close(self) -> None: ...


State = TypeVar("State", bound=Closable)

LARGE_BODY_BYTES = 512 * 1024
"""A body with more bytes counts as large. The longest prompts of most models are shorter."""


_MAX_LARGE_BODIES = 8
_MAX_WARNINGS = 1000

_MAX_TOKEN_ID_PROMPTS = 4


class LargeBodyLimiter:
    """Limits the number of large request bodies in memory. A single thread processes them one by one."""

    def __init__(self, limit: int = _MAX_LARGE_BODIES) -> None:
        self._limit = limit
        self.num_active = 0

    def acquire(self) -> None:
        """Take a slot for a large body.

        Raises:
            OverloadedError: all slots are taken.
        """
        if self.num_active >= self._limit:
            raise OverloadedError(
                f"{self.num_active} requests with bodies of more than {LARGE_BODY_BYTES // 1024} KiB are "
                "being read already: try again later",
                retry_after=5,
            )
        self.num_active += 1

    def release(self) -> None:
        """Release a slot."""
        assert self.num_active > 0
        self.num_active -= 1


class RouteStates:
    """The state of route families, by type; created on first use."""

    def __init__(self) -> None:
        self._states: dict[type, Closable] = {}

    def get_or_make(self, kind: type[State], make: Callable[[], State]) -> State:
        """Return the state of this type. The first call creates it."""
        if kind not in self._states:
            self._states[kind] = make()
        return self.of(kind)

    def of(self, kind: type[State]) -> State:
        """Return the state of this type, which must exist."""
        state = self._states[kind]
        assert isinstance(state, kind)
        return state

    def close(self) -> None:
        """Close all states."""
        while self._states:
            self._states.popitem()[1].close()


@dataclass(frozen=True, kw_only=True)
class Services:
    """The objects that the routes use. They are created once at the start and never replaced."""

    config: ServeConfig
    pipeline_config: PipelineConfig
    tokenizer: TextTokenizer
    worker: EngineClient
    metrics: Metrics
    pool: ThreadPoolExecutor
    """Runs tokenization, templates and schemas, which must not run on the event loop."""
    large_body_pool: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(1, thread_name_prefix="penstock-long")
    )
    """Runs the same work for large bodies, which takes seconds and would delay other requests in `pool`."""
    decoder: JsonDecoder = field(default_factory=JsonDecoder)
    """Decodes bodies that would block the event loop for too long."""
    large_body_decoder: JsonDecoder = field(default_factory=lambda: JsonDecoder(niceness=10))
    """Decodes large bodies. Its low priority leaves the cores to the model."""
    large_bodies: LargeBodyLimiter = field(default_factory=LargeBodyLimiter)
    parsers: ParserFactory
    log: logging.Logger = field(default_factory=lambda: logging.getLogger("penstock.serve"))
    gate: Gate = field(default_factory=Gate)
    """Whether the server accepts requests, and how many it is serving."""
    tracing: Tracing | None = None
    task: PipelineTask = PipelineTask.TEXT_GENERATION
    """The task that the model is loaded for."""
    states: RouteStates = field(default_factory=RouteStates)
    """State that belongs to a family of routes, such as stored responses."""
    logged_warnings: set[str] = field(default_factory=set)
    """The warnings that `warn_once` has logged."""
    encoding_turns: EncodingTurns = field(default_factory=EncodingTurns)
    """Serialises the encoding of long responses, so that the event loop runs between two slices."""

    def warn_once(self, warnings: Iterable[str]) -> None:
        """Log a warning for each requested feature that the server skips.

        Logs the same text only once, and at most `_MAX_WARNINGS` different texts.
        """
        for warning in warnings:
            if warning not in self.logged_warnings and len(self.logged_warnings) < _MAX_WARNINGS:
                self.logged_warnings.add(warning)
                self.log.warning("a request has %s; it is skipped, and not reported again", warning)

    def fragments_for(self, body: GenerationBody) -> TokenFragments:
        """Return the JSON fragments of tokens: their texts, or ids with ``return_tokens_as_token_ids``."""
        return self.token_id_fragments if body.return_tokens_as_token_ids else self.token_fragments

    @cached_property
    def token_fragments(self) -> TokenFragments:
        """The model's tokens as JSON, for log probabilities."""
        return TokenFragments(self.tokenizer)

    @cached_property
    def token_id_fragments(self) -> TokenFragments:
        """The model's token ids as JSON, for log probabilities."""
        return TokenFragments(self.tokenizer, as_ids=True)

    def pool_for(self, num_bytes: int) -> ThreadPoolExecutor:
        """Return the thread pool for a body of this size."""
        return self.large_body_pool if num_bytes > LARGE_BODY_BYTES else self.pool

    def decoder_for(self, num_bytes: int) -> JsonDecoder:
        """Return the decoder for a body of this size."""
        return self.large_body_decoder if num_bytes > LARGE_BODY_BYTES else self.decoder

    @property
    def json_limits(self) -> tuple[int, int]:
        """Limits for a JSON body: (number of objects, arrays and keys; number of elements and members).

        Token ids need less memory than other values. The second limit is therefore high enough for four
        prompts of token ids, or for all inputs of a request to an embeddings model, if the maximum length is
        known.
        """
        max_values, max_length = self.config.max_json_values, self.tokenizer.max_length
        is_text = self.task is PipelineTask.TEXT_GENERATION
        count = _MAX_TOKEN_ID_PROMPTS if is_text else self.config.max_inputs_per_request
        return max_values, max(max_values, count * (max_length or 0))

    @classmethod
    def of(cls, request: Request) -> Services:
        """Return the services of the application that handles a request."""
        services = request.app.state.services
        assert isinstance(services, cls)
        return services

    @cached_property
    def images(self) -> ImageRequests:
        """Reads the images of requests."""
        return ImageRequests(self.config, self.pipeline_config.vision, self.metrics)

    @property
    def model_name(self) -> str:
        """The name of the model in requests and responses."""
        return self.pipeline_config.model.name
