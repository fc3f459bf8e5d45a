"""The bodies that the routes take, in OpenAI's words, and how bytes become one of them.

A class has the fields that are honoured, and those that only the log sees. What else OpenAI or others have
is in the tables of `penstock.serve.parameters`. ``null`` is the same as absent, everywhere.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator
from pydantic_core import ErrorDetails

from penstock.serve.problems import RequestProblem

Body = TypeVar("Body", bound="RequestBody")

MAX_CHOICES = 128
MAX_TOP_LOGPROBS = 20
MAX_STOP_STRINGS = 64
MAX_STOP_CHARACTERS = 2048
"""Of all stop strings together: each new token is held against each beginning of each of them."""
MAX_LABEL = 512
"""Characters of what goes to the log, so that no line of it is a body long; as OpenAI bounds ``metadata``."""
MAX_METADATA = 16

Count = Annotated[int, Field(ge=0, lt=2**63)]
Label = Annotated[str, Field(max_length=MAX_LABEL)]
Number = Annotated[float, Field(allow_inf_nan=False)]
TokenIds = Annotated[list[Annotated[int, Field(ge=0)]], Field(fail_fast=True)]
Texts = Annotated[list[str], Field(fail_fast=True)]


class RequestBody(BaseModel):
    """A JSON object. Types are strict: ``"1"`` and ``true`` are no numbers."""

    model_config = ConfigDict(extra="allow", strict=True, frozen=True)


class FunctionCall(RequestBody):
    """A call that the model made in an earlier turn."""

    name: str
    arguments: str | dict[str, Any] | None = None
    """JSON text, as answers have it; an object is taken too."""


class ToolCall(RequestBody):
    """One of an assistant message's calls."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall


class ContentPart(RequestBody):
    """A part of a message: ``{"type": "text", "text": ...}``, or in an assistant's a ``refusal``."""

    type: str
    text: str | None = None
    refusal: str | None = None

    @model_validator(mode="after")
    def _has_its_text(self) -> Self:
        if self.type == "text" and self.text is None:
            raise ValueError("a part of type text needs text")
        if self.type == "refusal" and self.refusal is None:
            raise ValueError("a part of type refusal needs refusal")
        return self


class ChatMessage(RequestBody):
    """A turn of a chat."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[ContentPart], Field(fail_fast=True)] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    refusal: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    """Another spelling of ``reasoning_content``."""

    @model_validator(mode="after")
    def _fits_its_role(self) -> Self:
        if self.role == "assistant":
            said = (self.content, self.tool_calls, self.refusal, self.reasoning_content, self.reasoning)
            if all(part is None for part in said):
                raise ValueError("an assistant message needs content, or tool_calls")
        elif self.content is None:
            raise ValueError(f"a message of role {self.role} needs content")
        elif self.tool_calls or self.refusal is not None:
            raise ValueError(f"tool_calls and refusal are for assistant messages, not for role {self.role}")
        if self.role == "tool" and self.tool_call_id is None:
            raise ValueError("a message of role tool needs the tool_call_id that it answers")
        return self


class FunctionDefinition(RequestBody):
    """A function that the model may call."""

    name: str = Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """A JSON schema; absent for a function without parameters."""
    strict: bool | None = None


class Tool(RequestBody):
    """A tool that the model may use."""

    type: Literal["function"]
    function: FunctionDefinition


class FunctionName(RequestBody):
    """The name of a function."""

    name: str


class NamedTool(RequestBody):
    """A tool by its name: as ``tool_choice``, or in a list of those allowed."""

    type: Literal["function"]
    function: FunctionName


class AllowedToolList(RequestBody):
    """Some of a request's tools."""

    mode: Literal["auto", "required"]
    tools: list[NamedTool]


class AllowedTools(RequestBody):
    """A ``tool_choice`` among some of the tools."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedToolList


class JsonSchema(RequestBody):
    """A JSON schema under ``schema``, with a name; without both, the object is the schema itself."""

    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | bool | None = Field(None, alias="schema")
    strict: bool | None = None
    """Schemas are kept to in any case."""

    @property
    def is_bare(self) -> bool:
        """Whether it is the schema itself."""
        return self.name is None and self.schema_ is None


class ResponseFormat(RequestBody):
    """What the answer has to look like; a ``structural_tag`` has fields of its own."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchema | None = None


class StructuredOutputs(RequestBody):
    """What the answer has to look like, in one of five ways: our own field."""

    json_: dict[str, Any] | str | None = Field(None, alias="json")
    """A JSON schema, or its text."""
    regex: str | None = None
    choice: list[str] | None = Field(None, min_length=1)
    grammar: str | None = None
    """In EBNF."""
    structural_tag: dict[str, Any] | str | None = None


class StreamOptions(RequestBody):
    """What a stream has besides its text."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    """Usage so far on every chunk, and ``include_usage`` with it: our own field."""


class GenerationBody(RequestBody):
    """What chats and completions have in common."""

    model: str
    frequency_penalty: Annotated[Number, Field(ge=-2, le=2)] | None = None
    presence_penalty: Annotated[Number, Field(ge=-2, le=2)] | None = None
    logit_bias: dict[str, Annotated[Number, Field(ge=-100, le=100)]] | None = None
    """Token id, as text, to what is added to its logit."""
    max_tokens: Count | None = None
    max_completion_tokens: Annotated[Count, Field(ge=1)] | None = None
    """OpenAI's is a field of chats alone; clients that measure servers send it to both."""
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    stop: str | Texts | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: Annotated[Number, Field(ge=0, le=2)] | None = None
    top_p: Annotated[Number, Field(ge=0, le=1)] | None = None
    response_format: ResponseFormat | None = None

    # Our own.
    top_k: Annotated[int, Field(ge=-1, lt=2**63)] | None = None
    min_p: Annotated[Number, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[Number, Field(gt=0)] | None = None
    min_tokens: Count | None = None
    stop_token_ids: TokenIds | None = None
    allowed_token_ids: Annotated[TokenIds, Field(min_length=1)] | None = None
    ignore_eos: bool | None = None
    structured_outputs: StructuredOutputs | None = None
    return_token_ids: bool | None = None
    skip_special_tokens: bool | None = None
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] | None = None
    cache_salt: str | None = None

    # For the log alone.
    user: Label | None = None
    metadata: Annotated[dict[Label, Label], Field(max_length=MAX_METADATA)] | None = None
    safety_identifier: Label | None = None
    prompt_cache_key: Label | None = None

    @property
    def shows_special_tokens(self) -> bool:
        """Whether special tokens inside of the answer are part of its text."""
        return self.skip_special_tokens is False

    @property
    def stops(self) -> list[str]:
        """The stop strings."""
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    @property
    def includes_usage(self) -> bool:
        """Whether a stream ends with its usage."""
        options = self.stream_options
        return options is not None and bool(options.include_usage or options.continuous_usage_stats)

    @property
    def tells_usage_so_far(self) -> bool:
        """Whether every chunk of a stream has the usage up to it."""
        return self.stream_options is not None and bool(self.stream_options.continuous_usage_stats)

    @field_validator("stop")
    @classmethod
    def _bound_stops(cls, stop: str | list[str] | None) -> str | list[str] | None:
        stops = [stop] if isinstance(stop, str) else stop or []
        if len(stops) > MAX_STOP_STRINGS:
            raise ValueError(f"there are {len(stops)} stop strings, {MAX_STOP_STRINGS} are the most")
        if sum(map(len, stops)) > MAX_STOP_CHARACTERS:
            raise ValueError(
                f"the stop strings have {sum(map(len, stops))} characters, {MAX_STOP_CHARACTERS} are the most"
            )
        return stop


class ChatBody(GenerationBody):
    """``POST /v1/chat/completions``."""

    messages: list[ChatMessage] = Field(min_length=1, fail_fast=True)
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    max_tokens: Annotated[Count, Field(ge=1)] | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    tool_choice: Literal["auto", "none", "required"] | NamedTool | AllowedTools | None = None
    tools: Annotated[list[Tool], Field(fail_fast=True)] | None = None

    # Our own.
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None


class CompletionBody(GenerationBody):
    """``POST /v1/completions``."""

    prompt: str | Texts | TokenIds | Annotated[list[TokenIds], Field(fail_fast=True)]
    best_of: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None


class TokenizeBody(RequestBody):
    """``POST /tokenize``: of a text, or of messages."""

    model: str | None = None
    prompt: str | None = None
    add_special_tokens: bool | None = None
    messages: Annotated[list[ChatMessage], Field(min_length=1, fail_fast=True)] | None = None
    tools: Annotated[list[Tool], Field(fail_fast=True)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(RequestBody):
    """``POST /detokenize``."""

    model: str | None = None
    tokens: TokenIds


class LoadAdapterBody(RequestBody):
    """``POST /v1/load_lora_adapter``."""

    lora_name: str = Field(min_length=1, max_length=256)
    lora_path: str = Field(min_length=1, max_length=4096)
    load_inplace: bool | None = None
    """Whether the name may be in use already; false refuses that."""


class UnloadAdapterBody(RequestBody):
    """``POST /v1/unload_lora_adapter``."""

    lora_name: str = Field(min_length=1, max_length=256)


def validated(kind: type[Body], body: Any) -> Body:
    """A body of one kind, its unknown fields not looked at yet.

    Raises:
        RequestProblem: 400 that names the first field that is wrong.
    """
    if not isinstance(body, dict):
        raise RequestProblem(400, f"the body must be a JSON object, not {json.dumps(body)[:40]}")
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        raise _problem_of(error, body) from None


def _problem_of(error: ValidationError, body: Mapping[str, Any]) -> RequestProblem:
    """The first wrong field; where it may be of several types, what is wrong with each."""
    details = error.errors(include_url=False, include_context=False)
    places = [_place(one, body) for one in details]
    # Of alternatives, the one that got furthest is the one that was meant.
    first = max((place for place in places if place.startswith(places[0])), key=len)
    wrong = [one["msg"] for one, place in zip(details, places, strict=True) if place == first]
    text = " or ".join(dict.fromkeys(_sentence(message) for message in wrong))
    missing = details[places.index(first)]["type"] == "missing"
    if missing:
        return RequestProblem(400, f"{first} is required", param=first, code="missing_required_parameter")
    return RequestProblem(400, f"{first}: {text}" if first else text, param=first or None)


def _place(error: ErrorDetails, body: Mapping[str, Any]) -> str:
    """``messages[0].content``: the error's location without the names that pydantic gives to alternatives."""
    place, value = "", _Found(body)
    absent = error["loc"][-1:] if error["type"] == "missing" else ()
    for part in error["loc"]:
        if isinstance(part, int) and value.has_index(part):
            place, value = f"{place}[{part}]", value.at(part)
        elif isinstance(part, str) and (value.has_key(part) or (part,) == absent):
            place, value = f"{place}.{part}" if place else part, value.at(part)
    return place


class _Found:
    """A value in the body, or none."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def has_index(self, index: int) -> bool:
        return isinstance(self.value, list) and index < len(self.value)

    def has_key(self, key: str) -> bool:
        return isinstance(self.value, dict) and key in self.value

    def at(self, part: int | str) -> _Found:
        return _Found(self.value[part]) if self.has_index(part) or self.has_key(part) else _Found(None)  # type: ignore[arg-type]


def _sentence(message: str) -> str:
    message = message.removeprefix("Value error, ")
    return message[:1].lower() + message[1:]


def json_schema(kind: type[RequestBody]) -> dict[str, Any]:
    """The JSON schema of a body for the OpenAPI document, whole: without references to other places."""
    schema = kind.model_json_schema()
    definitions = schema.pop("$defs", {})
    inlined: dict[str, Any] = _inlined(schema, definitions)
    return inlined


def _inlined(node: Any, definitions: Mapping[str, Any]) -> Any:
    if isinstance(node, list):
        return [_inlined(one, definitions) for one in node]
    if not isinstance(node, dict):
        return node
    if "$ref" in node:
        return _inlined(definitions[node["$ref"].rpartition("/")[2]], definitions)
    return {key: _inlined(value, definitions) for key, value in _without_noise(node)}


def _without_noise(node: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    return ((key, value) for key, value in node.items() if key != "additionalProperties" or value is not True)
