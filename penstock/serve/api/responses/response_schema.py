"""The schema of the request body of ``/v1/responses``, with OpenAI's field names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from penstock.serve.api.schemas import (
    MAX_METADATA_ENTRIES,
    MAX_TOP_LOGPROBS,
    Count,
    Label,
    Number,
    RequestBody,
    StreamOptions,
    Texts,
)
from penstock.serve.api.unsupported import RefusedField

TextFormatType = Literal["text", "json_object", "json_schema"]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
Includable = Literal[
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    # Members that no response contains, mostly outputs of hosted tools. They are accepted without effect.
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "web_search_call.action.sources",
    "web_search_call.results",
]
INCLUDE_LOGPROBS = "message.output_text.logprobs"
INCLUDE_ENCRYPTED_REASONING = "reasoning.encrypted_content"


class InputPart(RequestBody):
    """A part of an item's content."""

    unsupported: ClassVar[Mapping[str, RefusedField]] = {
        "annotations": RefusedField("annotations of earlier outputs are not read", accepts_all=True),
        "logprobs": RefusedField("log probabilities of earlier outputs are not read", accepts_all=True),
        "parsed": RefusedField("only the text is used", accepts_all=True),
        "file_id": RefusedField("send image_url: the server stores no images"),
        "prompt_cache_breakpoint": RefusedField("the prefix cache needs no markers", accepts_all=True),
    }

    type: str
    text: str | None = None
    refusal: str | None = None
    image_url: str | None = None
    detail: str | None = None


class InputItem(RequestBody):
    """An input item: a message, a tool call, the output of a tool call, or reasoning.

    The types ``mcp_list_tools``, ``mcp_call``, ``mcp_approval_request`` and ``mcp_approval_response`` belong
    to tool servers.
    """

    unsupported: ClassVar[Mapping[str, RefusedField]] = {
        "parsed_arguments": RefusedField("only the arguments are used", accepts_all=True),
        "phase": RefusedField("chat templates have no phases", accepts_all=True),
        "status": RefusedField("items of the input are complete", accepts_all=True),
        "namespace": RefusedField("tools have no namespaces"),
        "caller": RefusedField("the model calls tools directly", ({"type": "direct"},)),
        "async": RefusedField("the model waits for the output of each call", (False,)),
    }

    type: str | None = None
    id: str | None = None
    role: str | None = None
    content: str | Annotated[list[InputPart], Field(fail_fast=True)] | None = None
    name: str | None = None
    call_id: str | None = None
    arguments: str | None = None
    input: str | None = None
    """The input of a call to a custom tool."""
    output: str | Annotated[list[InputPart], Field(fail_fast=True)] | None = None
    summary: list[InputPart] | None = None
    encrypted_content: str | None = None
    server_label: str | None = None
    tools: list[dict[str, object]] | None = None
    """The tools in an item of type ``mcp_list_tools``."""
    error: str | dict[str, object] | None = None
    approval_request_id: str | None = None
    approve: bool | None = None
    reason: str | None = None
    """The reason why a tool call is not approved. It becomes part of the prompt."""


class ResponseTool(RequestBody):
    """A function, a custom tool, a tool server (``mcp``), or a hosted tool.

    Tool servers and hosted tools may have fields that are not declared here.
    `penstock.serve.api.responses.offered_tools` has the schema of the type ``mcp``.
    """

    unsupported: ClassVar[Mapping[str, RefusedField]] = {
        "allowed_callers": RefusedField("the model calls tools directly", (["direct"],)),
        "async": RefusedField("the model waits for the output of each call", (False,)),
        "defer_loading": RefusedField("all tools are in the prompt", accepts_all=True),
        "output_schema": RefusedField("chat templates do not read it", accepts_all=True),
    }

    type: str
    name: str | None = None
    description: str | None = None
    parameters: dict[str, object] | None = None
    strict: bool | None = None
    format: dict[str, object] | None = None
    """The format of a custom tool's input."""

    @property
    def is_server_side(self) -> bool:
        """Whether the tool is a hosted tool or a tool server. The client does not run such tools."""
        return self.type not in ("function", "custom")

    @property
    def has_open_fields(self) -> bool:
        """Whether undeclared fields are allowed. True for hosted tools and tool servers."""
        return self.is_server_side


class ToolSelection(RequestBody):
    """A ``tool_choice`` object: a function, a custom or hosted tool, a tool server, or a list of tools."""

    type: str
    name: str | None = None
    server_label: str | None = None
    """The tool server, for the type ``mcp``. Without `name`, the model must call a tool of this server."""
    mode: Literal["auto", "required"] | None = None
    tools: list[dict[str, object]] | None = None

    @property
    def has_open_fields(self) -> bool:
        """Whether undeclared fields are allowed. True for hosted tools, which `chat_tool_choice` refuses."""
        return self.type not in ("function", "custom", "mcp", "allowed_tools")


class TextFormat(RequestBody):
    """The format to which the output text must conform."""

    type: TextFormatType
    name: str | None = None
    description: str | None = None
    schema_: dict[str, object] | None = Field(None, alias="schema")
    strict: bool | None = None
    """Has no effect, because the output is always constrained to the schema."""


class TextConfig(RequestBody):
    """Settings of the output text."""

    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None
    """Has no effect, because the model has no verbosity setting."""


class ReasoningConfig(RequestBody):
    """Settings of the reasoning."""

    unsupported: ClassVar[Mapping[str, RefusedField]] = {
        "context": RefusedField("reasoning items of the input are given to the chat template", ("auto",)),
        "mode": RefusedField("the model has one way to reason", ("standard",)),
    }

    effort: Effort | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    """Has no effect, because the response contains the whole reasoning."""
    generate_summary: Literal["auto", "concise", "detailed"] | None = None
    """The former name of ``summary``."""


class ResponsesBody(RequestBody):
    """``POST /v1/responses``."""

    unsupported: ClassVar[Mapping[str, RefusedField]] = {
        "access_programs": RefusedField("the server has no access programs"),
        "client_metadata": RefusedField("the server does not use it", accepts_all=True),
        "context_management": RefusedField("send truncation: auto", ([],)),
        "conversation": RefusedField("send previous_response_id"),
        "image": RefusedField("the server does not compress images"),
        "moderation": RefusedField("there is no moderation"),
        "prompt": RefusedField("the server stores no prompts: send instructions and input"),
        "prompt_cache_options": RefusedField("the prefix cache has no per-request options", ({},)),
        "prompt_cache_retention": RefusedField(
            "prefixes stay cached until their blocks are needed", ("in_memory", "in-memory", "24h")
        ),
        "service_tier": RefusedField("there is only one service tier", ("auto", "default")),
    }

    model: str = ""
    input: str | Annotated[list[InputItem], Field(fail_fast=True)]
    instructions: str | None = None
    previous_response_id: str | None = None
    tools: Annotated[list[ResponseTool], Field(fail_fast=True)] | None = None
    tool_choice: Literal["auto", "none", "required"] | ToolSelection | None = None
    parallel_tool_calls: bool | None = None
    max_tool_calls: Count | None = None
    """Maximum number of calls to tool servers."""
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    max_output_tokens: Annotated[Count, Field(ge=1)] | None = None
    temperature: Annotated[Number, Field(ge=0, le=2)] | None = None
    top_p: Annotated[Number, Field(ge=0, le=1)] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    truncation: Literal["auto", "disabled"] | None = None
    include: list[Includable] | None = None
    store: bool | None = None
    background: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    # The next four fields are logged and returned in the response. `user` also names the request's session.
    metadata: Annotated[dict[Label, Label], Field(max_length=MAX_METADATA_ENTRIES)] | None = None
    user: Label | None = None
    safety_identifier: Label | None = None
    prompt_cache_key: Label | None = None

    # The fields below are not in the OpenAI API.
    top_k: Annotated[int, Field(ge=-1, lt=2**63)] | None = None
    min_p: Annotated[Number, Field(ge=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    stop: str | Texts | None = None
    frequency_penalty: Annotated[Number, Field(ge=-2, le=2)] | None = None
    presence_penalty: Annotated[Number, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[Number, Field(gt=0)] | None = None
    min_tokens: Count | None = None
    ignore_eos: bool | None = None
    chat_template_kwargs: dict[str, object] | None = None
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] | None = None
    cache_salt: str | None = None

    def includes(self, value: str) -> bool:
        """Return whether ``include`` contains `value`."""
        return value in (self.include or ())

    @property
    def is_stored(self) -> bool:
        """Whether the response is stored. True if ``store`` is absent, as in OpenAI's API."""
        return self.store is not False


FIELDS_SHARED_WITH_CHAT = (
    "model temperature top_p parallel_tool_calls stream metadata user safety_identifier prompt_cache_key"
    " top_k min_p seed stop frequency_penalty presence_penalty repetition_penalty min_tokens ignore_eos"
    " chat_template_kwargs priority cache_salt"
).split()
"""Fields with the same name and meaning in `ResponsesBody` and in a chat request."""
