"""`ServeConfig`: the settings of the HTTP server."""

from __future__ import annotations

import re
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
from penstock.errors import ConfigError

_POSITIVE_SECONDS = Rule("a number of seconds above 0", lambda value: isfinite(value) and value > 0)
_NON_NEGATIVE_SECONDS = Rule("a number of seconds, 0 or more", lambda value: isfinite(value) and value >= 0)
_PORT = Rule("a port number, or 0 for any free port", lambda value: 0 <= value <= 65535)
_GAUGE_PATTERN = re.compile(r"(waiting|running|kv_usage|adapters)=[a-zA-Z_:][a-zA-Z0-9_:]*")
_GAUGE_NAMES = Rule(
    "QUANTITY=NAME such as waiting=NAME, each QUANTITY and NAME only once; QUANTITY is waiting, running, "
    "kv_usage or adapters",
    lambda value: (
        isinstance(value, tuple)
        and all(isinstance(gauge, str) and _GAUGE_PATTERN.fullmatch(gauge) for gauge in value)
        and len({gauge.partition("=")[0] for gauge in value}) == len(value)
        and len({gauge.partition("=")[2] for gauge in value}) == len(value)
    ),
)
_HEADER_NAME = Rule(
    "the name of a header", lambda value: bool(value) and all(c.isalnum() or c in "-_" for c in value)
)
_TOOL_SERVER_PATTERN = re.compile(r"[A-Za-z0-9][\w.-]{0,63}=https?://[^\s/]\S*", re.ASCII)
_TOOL_SERVERS = Rule(
    "addresses of tool servers such as files=http://127.0.0.1:9000/mcp, with different names",
    lambda value: (
        isinstance(value, tuple)
        and all(isinstance(server, str) and _TOOL_SERVER_PATTERN.fullmatch(server) for server in value)
        and len({server.partition("=")[0] for server in value}) == len(value)
    ),
)
_WORDS = Rule(
    "texts without spaces",
    lambda value: (
        isinstance(value, tuple)
        and all(isinstance(word, str) and word and not any(c.isspace() for c in word) for word in value)
    ),
)


def _split_at_commas(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


@dataclass(frozen=True, kw_only=True)
class ServeConfig:
    """Configuration of the HTTP server.

    >>> ServeConfig.from_flat({"port": 0, "api_key": ["one", "two"]}).api_key
    ('one', 'two')

    Raises:
        ConfigError: a field has an invalid value.
    """

    host: str = setting(
        "127.0.0.1", TEXT, "Address to listen at; 0.0.0.0 means all IPv4 addresses of the machine."
    )
    port: int = setting(
        8000, _PORT, "Port to listen at; with 0, the server chooses a free port and prints it."
    )
    api_key: tuple[str, ...] = setting(
        (),
        _WORDS,
        "API key that clients must send; may be given several times. In an environment variable, commas "
        "separate several keys.",
        parse=_split_at_commas,
        secret=True,
    )
    cors_origins: tuple[str, ...] = setting(
        (),
        _WORDS,
        "Origin whose web pages may call the server (CORS), * for any; may be given several times. "
        "Default: none.",
        parse=_split_at_commas,
    )
    allowed_hosts: tuple[str, ...] = setting(
        (),
        _WORDS,
        "Host name that a request's Host header may have in addition to localhost and the value of host, "
        "such as example.org or *.example.org, * for any; may be given several times. Default: any, or none "
        "if the server listens at a loopback address without an API key.",
        parse=_split_at_commas,
    )
    max_body_size: int = setting(8 * 2**20, NUM_BYTES, "Maximum size of a request body, in bytes.")
    max_json_values: int = setting(
        50_000,
        COUNT,
        "Maximum number of objects, arrays and keys in a request body. The total number of array elements "
        "and object members has a second limit: the larger of this number and 4 times the maximum length in "
        "tokens. For models without text generation, the factor is max-inputs-per-request instead of 4.",
    )
    body_timeout: float = setting(
        60.0,
        _POSITIVE_SECONDS,
        "Seconds within which the headers of a request must arrive, and then its body.",
    )
    max_queue_size: int | None = setting(
        None,
        COUNT,
        "Maximum number of waiting requests of each worker; each choice counts as a request. Default: 4 "
        "times max-batch-size, at least 64. With Ray, each HTTP process applies the limit to its own "
        "requests to all replicas together; the default is 4 times ray-max-requests, at least 64.",
    )
    max_choices_per_request: int | None = setting(
        None,
        COUNT,
        "Maximum number of choices of a request: n times the number of prompts. Default: the number of "
        "requests that may run or wait, which is also the upper limit.",
    )
    request_timeout: float | None = setting(
        None,
        _POSITIVE_SECONDS,
        "Seconds within which a request must be answered completely. Default: no limit.",
    )
    stream_timeout: float = setting(
        300.0,
        _POSITIVE_SECONDS,
        "Seconds without a new token after which a request is aborted. This setting does not limit the wait "
        "for the first token.",
    )
    stream_ping: float = setting(
        15.0,
        _POSITIVE_SECONDS,
        "Seconds without a new token after which the server sends a ping, which keeps the connection of a "
        "stream open.",
    )
    keep_alive: float = setting(
        120.0,
        _POSITIVE_SECONDS,
        "Seconds after which an idle connection is closed, rounded to whole seconds.",
    )
    shutdown_grace: float = setting(
        30.0,
        _NON_NEGATIVE_SECONDS,
        "Seconds that running requests have to finish after the first signal to stop the server.",
    )
    unknown_fields: str = setting(
        "error",
        one_of("error", "warn"),
        "Treatment of unknown fields in a request: error refuses the request, warn logs and ignores the "
        "field.",
    )
    tool_call_parser: str = setting(
        "auto",
        TEXT,
        "Format of the model's tool calls; auto detects it from the chat template, none disables parsing.",
    )
    reasoning_parser: str = setting(
        "auto",
        TEXT,
        "Format of the model's reasoning; auto detects it from the chat template, none disables parsing.",
    )
    reasoning_field: str = setting(
        "both",
        one_of("both", "reasoning", "reasoning_content"),
        "Field of messages and deltas that has the model's reasoning; both fills two fields, because clients "
        "read different names.",
    )
    max_inputs_per_request: int = setting(
        2048,
        COUNT,
        "Maximum number of inputs of a request to /v1/embeddings, /pooling or /v1/classify, of documents to "
        "rerank, and of pairs to score.",
    )
    max_logprobs_per_request: int = setting(
        1_000_000,
        COUNT,
        "Maximum number of log probabilities in a response: choices x tokens x (top_logprobs + 1), plus "
        "the number of log probabilities of the prompt.",
    )
    default_max_tokens_completions: int = setting(
        16, COUNT, "Maximum number of new tokens of a request to /v1/completions without max_tokens."
    )
    hosted_tools: str = setting(
        "skip",
        one_of("skip", "refuse"),
        "Treatment of hosted tools, such as web_search, in a request: skip leaves them out, refuse refuses "
        "the request. The server has no hosted tools.",
    )
    state_dir: str | None = setting(
        None, TEXT, "Folder for state that survives a restart: stored responses, files and batches."
    )
    max_file_size: int = setting(
        512 * 2**20, NUM_BYTES, "Maximum size of the body of a file upload, in bytes."
    )
    response_store_size: int = setting(
        256 * 2**20,
        NUM_BYTES,
        "Maximum total size of stored responses with their input, in bytes. If they are larger, the oldest "
        "responses are dropped, but never the newest.",
    )
    allow_image_urls: bool = setting(
        False, FLAG, "Fetch images that requests name by http(s) URLs from hosts on the public internet."
    )
    image_dir: str | None = setting(
        None, TEXT, "Folder of image files that requests may name by file: URLs. Default: none."
    )
    mcp_server: tuple[str, ...] = setting(
        (),
        _TOOL_SERVERS,
        "A tool server of the Model Context Protocol (streamable HTTP) as NAME=URL. In the Responses API, "
        "the model can call the tools of the tool server. May be given several times.",
        parse=_split_at_commas,
    )
    mcp_token: tuple[str, ...] = setting(
        (),
        _WORDS,
        "Bearer token for a tool server as NAME=TOKEN; may be given several times.",
        parse=_split_at_commas,
        secret=True,
    )
    mcp_timeout: float = setting(
        60.0, _POSITIVE_SECONDS, "Seconds within which a tool server must answer a call or list its tools."
    )
    mcp_max_turns: int = setting(
        10,
        COUNT,
        "Maximum number of turns of a response in which the model may call tools of tool servers; the next "
        "turn has no tools.",
    )
    mcp_require_approval: str = setting(
        "never",
        one_of("never", "always"),
        "Whether calls to tool servers need the client's approval, if a request does not set "
        "require_approval.",
    )
    playground: bool = setting(True, FLAG, "Serve a page at / to try the model.")
    access_log: bool = setting(
        True, FLAG, "Log a line at the end of each request; the lines of probes have the level debug."
    )
    log_format: str = setting("logfmt", one_of("logfmt", "json"), "Format of the log lines.")
    log_level: str = setting(
        "info", one_of("debug", "info", "warning", "error"), "Minimum level of log lines."
    )
    watchdog_timeout: float = setting(
        30.0,
        _POSITIVE_SECONDS,
        "Seconds without a finished step after which an error is logged, while requests are outstanding.",
    )
    worker_timeout: float = setting(
        20.0,
        _POSITIVE_SECONDS,
        "Seconds without progress after which a worker is restarted. Progress within a step counts.",
    )
    worker_memory_limit: int | None = setting(
        None,
        NUM_BYTES,
        "Limit of the private memory of each worker in bytes, without mapped files. A worker that reaches "
        "the limit is restarted.",
    )
    profile_dir: str | None = setting(
        None, TEXT, "Folder for the profiles of /start_profile and /stop_profile. Default: no profiles."
    )
    model_memory: int | None = setting(
        None,
        NUM_BYTES,
        "Host memory for all loaded models of a server with several models, in bytes. Default: the fraction "
        "device-memory-utilization of the free memory.",
    )
    router_gauge: tuple[str, ...] = setting(
        (),
        _GAUGE_NAMES,
        "An additional name for a gauge in /metrics, for routers that expect this name, such as "
        "waiting=vllm:num_requests_waiting. The gauges are waiting, running, kv_usage and adapters. May be "
        "given several times.",
        parse=_split_at_commas,
    )
    cache_events: str | None = setting(
        None,
        TEXT,
        "ZeroMQ address at which events of the prefix cache are published, with the tokens of prompts: for "
        "example tcp://127.0.0.1:5557. Default: none.",
    )
    cache_events_topic: str = setting(
        "kv-events", TEXT, "Topic of the messages with events of the prefix cache."
    )
    session_header: str = setting(
        "x-session-id",
        _HEADER_NAME,
        "Header of a request that names its session. With several workers, the requests of a session go to "
        "one worker. Without the header, the field user of the body names the session.",
    )
    otlp_endpoint: str | None = setting(
        None, TEXT, "URL to send OpenTelemetry spans to, by OTLP over HTTP. Default: no spans."
    )
    sources: Mapping[str, str] = field(default_factory=dict, repr=False, compare=False)
    """Setting name -> source of its value, such as a file. Contains only settings with a given value."""

    def __post_init__(self) -> None:
        check_fields(self)
        servers = {argument.partition("=")[0] for argument in self.mcp_server}
        for name in (argument.partition("=")[0] for argument in self.mcp_token):
            if name not in servers:
                raise ConfigError("mcp_token", f"names {name[:64]!r}, which is not a name of --mcp-server")

    @classmethod
    def from_flat(
        cls,
        values: Mapping[str, object],
        source: str = "argument",
        *,
        environment: Mapping[str, str] | None = None,
    ) -> ServeConfig:
        """Return the configuration for a mapping of setting name -> value.

        Args:
            values: the given values.
            source: the source of the values, for error messages and `sources`.
            environment: environment variables, which may contain further values.

        Raises:
            ConfigError: a name is unknown, or a value is invalid.
        """
        return cls.from_given(collect_values(serve_fields(), values, source, environment or {}))

    @classmethod
    def from_given(cls, given_values: Mapping[str, tuple[object, str]]) -> ServeConfig:
        """Return the configuration for a mapping of setting name -> (converted value, source).

        Ignores names that are not settings of `ServeConfig`.

        Raises:
            ConfigError: a value is invalid.
        """
        settings = {
            field.name: given_values[field.name] for field in serve_fields() if field.name in given_values
        }
        values: dict[str, Any] = {name: value for name, (value, _) in settings.items()}
        return cls(sources={name: value_source for name, (_, value_source) in settings.items()}, **values)

    def describe(self) -> list[tuple[str, object, str]]:
        """Return name, value and source of every field, for ``--print-config``. Secret values are hidden."""
        rows = []
        for config_field in serve_fields():
            value = getattr(self, config_field.attribute)
            default_source = "default" if value == config_field.default else "argument"
            displayed_value = f"({len(value)} not shown)" if config_field.secret and value else value
            rows.append(
                (config_field.name, displayed_value, self.sources.get(config_field.name, default_source))
            )
        return rows


@cache
def serve_fields() -> tuple[ConfigField, ...]:
    """Return all settings of `ServeConfig`. No setting of `PipelineConfig` has the same name."""
    return fields_of(ServeConfig)
