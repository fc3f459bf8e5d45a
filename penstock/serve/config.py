"""How the server listens, whom it lets in, and what it bounds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from math import isfinite
from typing import Any

from penstock.config import ConfigField, Rule
from penstock.config.settings import (
    COUNT,
    FLAG,
    NUM_BYTES,
    TEXT,
    check_fields,
    fields_of,
    one_of,
    setting,
)
from penstock.config.sources import collect_values

_SECONDS = Rule("a number of seconds above 0", lambda value: isfinite(value) and value > 0)
_GRACE = Rule("a number of seconds, 0 or more", lambda value: isfinite(value) and value >= 0)
_PORT = Rule("a port number, 0 for any that is free", lambda value: 0 <= value <= 65535)
_WORDS = Rule(
    "texts without spaces",
    lambda value: (
        isinstance(value, tuple)
        and all(isinstance(one, str) and one and not any(c.isspace() for c in one) for one in value)
    ),
)


def _split(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


@dataclass(frozen=True, kw_only=True)
class ServeConfig:
    """How the server listens, whom it lets in, and what it bounds.

    >>> ServeConfig.from_flat({"port": 0, "api_key": ["one", "two"]}).api_key
    ('one', 'two')

    Raises:
        ConfigError: a field has an impossible value.
    """

    host: str = setting("127.0.0.1", TEXT, "Address to listen at; 0.0.0.0 is every one of this machine.")
    port: int = setting(8000, _PORT, "Port to listen at; 0 takes a free one and prints it.")
    api_key: tuple[str, ...] = setting(
        (),
        _WORDS,
        "A key that clients must send; may be given several times, in a variable with commas between.",
        parse=_split,
        secret=True,
    )
    cors_origins: tuple[str, ...] = setting(
        (),
        _WORDS,
        "An origin whose pages may call the server, * any; may be given several times. By default none may.",
        parse=_split,
    )
    allowed_hosts: tuple[str, ...] = setting(
        (),
        _WORDS,
        "A name that requests may give as their Host besides localhost and the address, as example.org or "
        "*.example.org, * any; may be given several times. By default any, but for a server at a loopback "
        "address without a key.",
        parse=_split,
    )
    max_body_size: int = setting(8 * 2**20, NUM_BYTES, "Longest body of a request, in bytes.")
    max_json_values: int = setting(
        50_000,
        COUNT,
        "Most objects, arrays and keys in the body of a request; of numbers and texts as many, or four "
        "prompts of token ids if those are more.",
    )
    body_timeout: float = setting(60.0, _SECONDS, "Seconds in which the body of a request must arrive.")
    max_queue_size: int | None = setting(
        None, COUNT, "Most requests that wait for a place in the batch; by default 4 batches, at least 64."
    )
    max_choices_per_request: int | None = setting(
        None, COUNT, "Most choices of a request, n for each prompt; by default what the queue takes."
    )
    request_timeout: float | None = setting(
        None, _SECONDS, "Seconds in which a request must be answered to its end; by default any time."
    )
    stream_timeout: float = setting(
        300.0, _SECONDS, "Seconds without a new token after which the answer to a request is given up."
    )
    stream_ping: float = setting(
        15.0, _SECONDS, "Seconds without a new token after which a stream sends a comment, to stay open."
    )
    keep_alive: float = setting(120.0, _SECONDS, "Seconds that an idle connection is kept.")
    shutdown_grace: float = setting(
        30.0, _GRACE, "Seconds that running requests are given to finish when the server is stopped."
    )
    unknown_fields: str = setting(
        "error", one_of("error", "warn"), "What happens to fields of a request that nobody knows."
    )
    tool_call_parser: str = setting(
        "auto", TEXT, "Format of the model's tool calls; auto looks at its chat template, none parses none."
    )
    reasoning_parser: str = setting(
        "auto", TEXT, "Format of the model's reasoning; auto looks at its chat template, none parses none."
    )
    reasoning_field: str = setting(
        "both",
        one_of("both", "reasoning", "reasoning_content"),
        "Field of messages and deltas that has the model's reasoning; clients look for one or the other.",
    )
    max_logprobs_per_request: int = setting(
        1_000_000,
        COUNT,
        "Most log probabilities of an answer: choices x tokens x (top_logprobs + 1), and its prompt's.",
    )
    default_max_tokens_completions: int = setting(
        16, COUNT, "Most new tokens of a request to /v1/completions that does not say."
    )
    playground: bool = setting(True, FLAG, "Serve a page at / to try the model on.")
    access_log: bool = setting(True, FLAG, "Write a line to the log at each request's end.")
    log_format: str = setting("logfmt", one_of("logfmt", "json"), "Form of the log's lines.")
    log_level: str = setting(
        "info", one_of("debug", "info", "warning", "error"), "Least important lines that the log shows."
    )
    watchdog_timeout: float = setting(
        30.0, _SECONDS, "Seconds without a finished step, while there is work, that the log reports."
    )
    worker_timeout: float = setting(
        20.0,
        _SECONDS,
        "Seconds without progress after which the worker is ended and started again; long steps make it.",
    )
    worker_memory_limit: int | None = setting(
        None,
        NUM_BYTES,
        "Most private memory of the worker, mapped files aside; beyond it the worker is started again.",
    )
    otlp_endpoint: str | None = setting(
        None, TEXT, "Where to send OpenTelemetry spans, by OTLP over HTTP; by default there are none."
    )
    sources: Mapping[str, str] = field(default_factory=dict, repr=False, compare=False)
    """Flat name -> where its value was given, of those that were."""

    def __post_init__(self) -> None:
        check_fields(self)

    @classmethod
    def from_flat(
        cls,
        values: Mapping[str, Any],
        source: str = "argument",
        *,
        environment: Mapping[str, str] | None = None,
    ) -> ServeConfig:
        """Builds the configuration from flat names, by the rules of `PipelineConfig.from_flat`.

        Raises:
            ConfigError: unknown name, wrong type, or impossible value.
        """
        return cls.from_given(collect_values(serve_fields(), values, source, environment or {}))

    @classmethod
    def from_given(cls, given: Mapping[str, tuple[Any, str]]) -> ServeConfig:
        """Builds it from flat name -> (converted value, where it was given); other names are left out."""
        own = {one.name: given[one.name] for one in serve_fields() if one.name in given}
        values = {name: value for name, (value, _) in own.items()}
        return cls(sources={name: where for name, (_, where) in own.items()}, **values)

    def describe(self) -> list[tuple[str, Any, str]]:
        """Flat name, value and source of every field, for ``--print-config``; keys are not shown."""
        rows = []
        for one in serve_fields():
            value = getattr(self, one.attribute)
            unnamed = "default" if value == one.default else "argument"
            shown = f"({len(value)} not shown)" if one.secret and value else value
            rows.append((one.name, shown, self.sources.get(one.name, unnamed)))
        return rows


@cache
def serve_fields() -> tuple[ConfigField, ...]:
    """Every setting of `ServeConfig`; no name is one of `PipelineConfig`'s."""
    return fields_of(ServeConfig)
