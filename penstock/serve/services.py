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
"""A body with more bytes than this counts as large."""
_MAX_LARGE_BODIES = 8
_MAX_WARNINGS = 1000
_MAX_TOKEN_ID_PROMPTS = 4


class LargeBodyLimiter:
    """Limits the number of large request bodies in memory, because a single thread processes large bodies."""

    def __init__(self, limit: int = _MAX_LARGE_BODIES) -> None:
        self._max_active = limit
        self.num_active = 0

    def acquire(self) -> None:
        """Take a slot for a large body.

        Raises:
            OverloadedError: all slots are taken.
        """
        if self.num_active >= self._max_active:
            raise OverloadedError(
                f"{self.num_active} requests with bodies of more than {LARGE_BODY_BYTES // 1024} KiB are "
                "being processed already: try again later",
                retry_after=5,
            )
        self.num_active += 1

    def release(self) -> None:
        """Release a slot."""
        assert self.num_active > 0
        self.num_active -= 1


class RouteStates:
    """The states of route families, by type. A state is created on first use."""

    def __init__(self) -> None:
        self._states: dict[type, Closable] = {}

    def get_or_make(self, state_type: type[State], make: Callable[[], State]) -> State:
        """Return the state of this type. The first call creates the state with `make`."""
        if state_type not in self._states:
            self._states[state_type] = make()
        return self.of(state_type)

    def of(self, state_type: type[State]) -> State:
        """Return the state of this type, which must exist."""
        state = self._states[state_type]
        assert isinstance(state, state_type)
        return state

    def close(self) -> None:
        """Close all states."""
        while self._states:
            self._states.popitem()[1].close()


@dataclass(frozen=True, kw_only=True)
class Services:
    """The objects that the routes use for one model."""

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
    """Runs tokenization, templates and schemas of large bodies, which can take seconds."""
    decoder: JsonDecoder = field(default_factory=JsonDecoder)
    """Decodes bodies that are not large but would block the event loop for too long."""
    large_body_decoder: JsonDecoder = field(default_factory=lambda: JsonDecoder(niceness=10))
    """Decodes large bodies in a process of low priority, which leaves the CPU cores to the model."""
    large_bodies: LargeBodyLimiter = field(default_factory=LargeBodyLimiter)
    parsers: ParserFactory
    log: logging.Logger = field(default_factory=lambda: logging.getLogger("penstock.serve"))
    gate: Gate = field(default_factory=Gate)
    """Tracks whether the server accepts requests, and counts the active requests."""
    tracing: Tracing | None = None
    task: PipelineTask = PipelineTask.TEXT_GENERATION
    """The task that the model is loaded for."""
    states: RouteStates = field(default_factory=RouteStates)
    """State that belongs to a family of routes, such as stored responses."""
    logged_warnings: set[str] = field(default_factory=set)
    """The warnings that `warn_once` has logged."""
    encoding_turns: EncodingTurns = field(default_factory=EncodingTurns)
    """Lets one long response at a time be encoded on the event loop."""

    def warn_once(self, warnings: Iterable[str]) -> None:
        """Log a warning for each requested feature that the server skips.

        Logs the same text only once, and at most `_MAX_WARNINGS` different texts.

        Args:
            warnings: texts that complete "a request has ...".
        """
        for warning in warnings:
            if warning not in self.logged_warnings and len(self.logged_warnings) < _MAX_WARNINGS:
                self.logged_warnings.add(warning)
                self.log.warning("a request has %s; it is skipped, and not reported again", warning)

    def fragments_for(self, body: GenerationBody) -> TokenFragments:
        """Return the JSON texts of tokens for log probabilities.

        They contain the texts of the tokens, or token ids if the body sets ``return_tokens_as_token_ids``.
        """
        return self.token_id_fragments if body.return_tokens_as_token_ids else self.token_fragments

    @cached_property
    def token_fragments(self) -> TokenFragments:
        """The JSON texts of the model's tokens, for log probabilities."""
        return TokenFragments(self.tokenizer)

    @cached_property
    def token_id_fragments(self) -> TokenFragments:
        """The JSON texts of the model's token ids, for log probabilities."""
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

        Token ids need less memory than other values. If the maximum length is known, the second limit is
        therefore high enough for four prompts of token ids, or for ``max_inputs_per_request`` inputs if the
        task is not text generation.
        """
        max_values, max_length = self.config.max_json_values, self.tokenizer.max_length
        is_text = self.task is PipelineTask.TEXT_GENERATION
        num_prompts = _MAX_TOKEN_ID_PROMPTS if is_text else self.config.max_inputs_per_request
        return max_values, max(max_values, num_prompts * (max_length or 0))

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
