"""What the routes work with, as one object: ``request.app.state.services``."""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from fastapi import Request

from penstock.config import PipelineConfig
from penstock.errors import OverloadedError
from penstock.pipelines.core import PipelineTask
from penstock.serve.api.json_parts import Turns
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


LARGE_BODY_BYTES = 512 * 1024
"""Bytes; a body above that has more text than nearly every model's prompts."""


_MAX_LARGE_BODIES = 8

_PROMPTS_OF_IDS = 4


class LargeBodyLimiter:
    """How many long bodies are read and worked on: they wait in memory for one thread, so they are few."""

    def __init__(self, most: int = _MAX_LARGE_BODIES) -> None:
        self._most = most
        self.num_inside = 0

    def enter(self) -> None:
        """Lets one in.

        Raises:
            OverloadedError: as many as may are inside.
        """
        if self.num_inside >= self._most:
            raise OverloadedError(
                f"{self.num_inside} requests with bodies of more than {LARGE_BODY_BYTES // 1024} KiB are "
                "being read already: try again later",
                retry_after=5,
            )
        self.num_inside += 1

    def leave(self) -> None:
        """One that was let in is done with."""
        assert self.num_inside > 0
        self.num_inside -= 1


@dataclass(frozen=True, kw_only=True)
class Services:
    """Made once at start; nobody replaces a part of it later."""

    config: ServeConfig
    pipeline_config: PipelineConfig
    tokenizer: TextTokenizer
    worker: EngineClient
    metrics: Metrics
    pool: ThreadPoolExecutor
    """Where tokenising, templates and schema work run: never on the event loop."""
    large_body_pool: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(1, thread_name_prefix="penstock-long")
    )
    """Where they run for long bodies, which take many seconds: the others do not wait behind those."""
    decoder: JsonDecoder = field(default_factory=JsonDecoder)
    """Decodes bodies that would hold up the event loop."""
    long_decoder: JsonDecoder = field(default_factory=lambda: JsonDecoder(niceness=10))
    """Decodes long bodies: the others do not wait behind those, and the model does not share its cores."""
    large_bodies: LargeBodyLimiter = field(default_factory=LargeBodyLimiter)
    parsers: ParserFactory
    log: logging.Logger = field(default_factory=lambda: logging.getLogger("penstock.serve"))
    gate: Gate = field(default_factory=Gate)
    """Whether requests are let in, and how many are inside."""
    tracing: Tracing | None = None
    task: PipelineTask = PipelineTask.TEXT_GENERATION
    """The task that the model is loaded for."""
    turns: Turns = field(default_factory=Turns)
    """Shared by the requests whose answers take long to encode."""

    def fragments_for(self, body: GenerationBody) -> TokenFragments:
        """Return the JSON of the model's tokens in the form that a request asks for."""
        return self.token_id_fragments if body.return_tokens_as_token_ids else self.token_fragments

    @cached_property
    def token_fragments(self) -> TokenFragments:
        """The JSON of the model's tokens, for log probabilities."""
        return TokenFragments(self.tokenizer)

    @cached_property
    def token_id_fragments(self) -> TokenFragments:
        """The same with token ids in place of texts."""
        return TokenFragments(self.tokenizer, as_ids=True)

    def pool_for(self, num_bytes: int) -> ThreadPoolExecutor:
        """Where the work on a body of some length belongs."""
        return self.large_body_pool if num_bytes > LARGE_BODY_BYTES else self.pool

    def decoder_for(self, num_bytes: int) -> JsonDecoder:
        """Returns where a body of some length is decoded."""
        return self.long_decoder if num_bytes > LARGE_BODY_BYTES else self.decoder

    @property
    def json_limits(self) -> tuple[int, int]:
        """Most objects, arrays and keys of a body, and most elements and members.

        Token ids cost less than the others, and there is room for some prompts of them.
        """
        most, max_length = self.config.max_json_values, self.tokenizer.max_length
        return most, max(most, _PROMPTS_OF_IDS * (max_length or 0))

    @classmethod
    def of(cls, request: Request) -> Services:
        """The services of the application that got the request."""
        services = request.app.state.services
        assert isinstance(services, cls)
        return services

    @property
    def model_name(self) -> str:
        """What the model is called in requests and answers."""
        return self.pipeline_config.model.name
