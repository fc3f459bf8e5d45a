"""The schemas of the request bodies of ``/v1/messages`` and ``/v1/messages/count_tokens``.

The fields have the names of Anthropic's API. A comment marks fields that Anthropic's API does not have.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from penstock.serve.api.schemas import Count, Label, Number, RequestBody, Texts
from penstock.serve.api.unsupported import RefusedField

_CACHE_CONTROL = RefusedField("the prefix cache needs no markers", accepts_all=True)
_CALLED_DIRECTLY = RefusedField("the model calls tools directly", ({"type": "direct"},))


class MediaSource(RequestBody):
    """The data of an image or a document."""

    type: str
    media_type: str | None = None
    data: str | None = None
    url: str | None = None


class ResultBlock(RequestBody):
    """A content block of a tool's output or of the system prompt."""

    unsupported: ClassVar[Mapping[str, RefusedField]] = {
        "cache_control": _CACHE_CONTROL,
        "citations": RefusedField("the server makes no citations", accepts_all=True),
        "context": RefusedField("put it into the text of the document"),
    }

    type: str
    text: str | None = None
    source: MediaSource | None = None
    title: str | None = None
    tool_name: str | None = None
    """The name of the tool in a block of type ``tool_reference``."""


class MessageBlock(ResultBlock):
    """A content block of a message."""

    unsupported: ClassVar[Mapping[str, RefusedField]] = {
        **ResultBlock.unsupported,
        "caller": _CALLED_DIRECTLY,
        "signature": RefusedField("thinking is not signed", accepts_all=True),
        "data": RefusedField("redacted thinking cannot be read", accepts_all=True),
        "toolset_name": RefusedField("there are no toolsets"),
    }

    id: str | None = None
    name: str | None = None
    input: dict[str, object] | None = None
    tool_use_id: str | None = None
    content: str | Annotated[list[ResultBlock], Field(fail_fast=True)] | None = None
    is_error: bool | None = None
    thinking: str | None = None


class ConversationMessage(RequestBody):
    """A message of the conversation."""

    role: Literal["user", "assistant", "system"]
    content: str | Annotated[list[MessageBlock], Field(fail_fast=True)]


class MessageTool(RequestBody):
    """A tool of the client, or a tool that Anthropic hosts or defines (see `is_hosted`)."""

    unsupported: ClassVar[Mapping[str, RefusedField]] = {
        "allowed_callers": RefusedField("the model calls tools directly", (["direct"],)),
        "cache_control": _CACHE_CONTROL,
        "defer_loading": RefusedField("all tools are in the prompt", accepts_all=True),
        "eager_input_streaming": RefusedField("the input of a tool is always streamed", accepts_all=True),
        "input_examples": RefusedField("chat templates do not read them", accepts_all=True),
    }

    type: str | None = None
    name: str
    description: str | None = None
    input_schema: dict[str, object] | None = None
    strict: bool | None = None

    @property
    def is_hosted(self) -> bool:
        """Whether the tool runs on Anthropic's servers, or its schema is defined by Anthropic."""
        return self.type not in (None, "custom")

    @property
    def has_open_fields(self) -> bool:
        """Whether undeclared fields are allowed. True for hosted tools, which have other fields."""
        return self.is_hosted


class MessageToolChoice(RequestBody):
    """Which tools the model may call."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(RequestBody):
    """Whether the model reasons before the answer."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[Count, Field(ge=1)] | None = None
    """Has no effect. ``max_tokens`` limits the thinking and the text together."""
    display: Literal["summarized", "omitted"] | None = None
    """With ``omitted``, thinking blocks have no text. Otherwise they contain the whole thinking text."""


class OutputFormat(RequestBody):
    """The JSON schema to which the output text must conform."""

    type: Literal["json_schema"]
    schema_: dict[str, object] = Field(alias="schema")


class OutputConfig(RequestBody):
    """The reasoning effort and the format of the output."""

    unsupported: ClassVar[Mapping[str, RefusedField]] = {
        "task_budget": RefusedField("there are no task budgets")
    }

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class MessageMetadata(RequestBody):
    """Data about the request."""

    user_id: Label | None = None


class CountTokensBody(RequestBody):
    """``POST /v1/messages/count_tokens``."""

    unsupported: ClassVar[Mapping[str, RefusedField]] = {
        "cache_control": _CACHE_CONTROL,
        "container": RefusedField("there are no containers"),
        "context_management": RefusedField("the server does not edit the conversation", accepts_all=True),
        "diagnostics": RefusedField("there are no diagnostics", accepts_all=True),
        "inference_geo": RefusedField("the server has one location"),
        "mcp_servers": RefusedField("only the Responses API calls tool servers", ([],)),
        "service_tier": RefusedField("there is only one service tier", ("auto", "standard_only")),
        "speed": RefusedField("there is only one speed", ("standard",)),
        "user_profile_id": RefusedField("there are no user profiles"),
        "workspace_id": RefusedField("there are no workspaces"),
    }

    model: str = ""
    messages: Annotated[list[ConversationMessage], Field(min_length=1, fail_fast=True)]
    system: str | Annotated[list[ResultBlock], Field(fail_fast=True)] | None = None
    tools: Annotated[list[MessageTool], Field(fail_fast=True)] | None = None
    tool_choice: MessageToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None


class MessagesBody(CountTokensBody):
    """``POST /v1/messages``."""

    unsupported: ClassVar[Mapping[str, RefusedField]] = CountTokensBody.unsupported

    max_tokens: Annotated[Count, Field(ge=1)]
    stop_sequences: Texts | None = None
    stream: bool | None = None
    temperature: Annotated[Number, Field(ge=0, le=2)] | None = None
    top_p: Annotated[Number, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**63)] | None = None
    metadata: MessageMetadata | None = None

    # The fields below are not in Anthropic's API.
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    min_p: Annotated[Number, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[Number, Field(gt=0)] | None = None
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] | None = None
    cache_salt: str | None = None
    chat_template_kwargs: dict[str, object] | None = None


FIELDS_SHARED_WITH_CHAT = (
    "temperature top_p top_k stream seed min_p repetition_penalty priority cache_salt chat_template_kwargs"
).split()
"""Fields with the same name and meaning in `MessagesBody` and in a chat request."""
