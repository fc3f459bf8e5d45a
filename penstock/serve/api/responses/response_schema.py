"""The schemas of ``/v1/responses``, with the field names of the OpenAI API."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from penstock.serve.api.schemas import (
    MAX_METADATA,
    MAX_TOP_LOGPROBS,
    Count,
    Label,
    Number,
    RequestBody,
    StreamOptions,
    Texts,
)
from penstock.serve.api.unsupported import Refused

TextFormatType = Literal["text", "json_object", "json_schema"]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
Includable = Literal[
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    # Outputs of hosted tools: accepted without effect, because no response contains any.
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "web_search_call.action.sources",
    "web_search_call.results",
]
LOGPROBS = "message.output_text.logprobs"
ENCRYPTED_REASONING = "reasoning.encrypted_content"


class InputPart(RequestBody):
    """A part of the content of an item."""

    unsupported: ClassVar[Mapping[str, Refused]] = {
        "annotations": Refused("annotations of earlier outputs are not read", accepts_all=True),
        "logprobs": Refused("log probabilities of earlier outputs are not read", accepts_all=True),
        "parsed": Refused("only the text is used", accepts_all=True),
        "file_id": Refused("send image_url: the server stores no images"),
        "prompt_cache_breakpoint": Refused("the prefix cache needs no markers", accepts_all=True),
    }

    type: str
    text: str | None = None
    refusal: str | None = None
    image_url: str | None = None
    detail: str | None = None


class InputItem(RequestBody):
    """An item of the input: a message, a call, the output of a call, or reasoning.

    The items ``mcp_list_tools``, ``mcp_call``, ``mcp_approval_request`` and ``mcp_approval_response`` concern
    tool servers.
    """

    unsupported: ClassVar[Mapping[str, Refused]] = {
        "parsed_arguments": Refused("only the arguments are used", accepts_all=True),
        "phase": Refused("chat templates have no phases", accepts_all=True),
        "status": Refused("items of the input count as complete", accepts_all=True),
        "namespace": Refused("tools have no namespaces"),
        "caller": Refused("the model calls tools directly", ({"type": "direct"},)),
        "async": Refused("the output of a call follows the call", (False,)),
    }

    type: str | None = None
    id: str | None = None
    role: str | None = None
    content: str | Annotated[list[InputPart], Field(fail_fast=True)] | None = None
    name: str | None = None
    call_id: str | None = None
    arguments: str | None = None
    input: str | None = None
    """The input of a call of a custom tool."""
    output: str | Annotated[list[InputPart], Field(fail_fast=True)] | None = None
    summary: list[InputPart] | None = None
    encrypted_content: str | None = None
    server_label: str | None = None
    tools: list[dict[str, object]] | None = None
    """The tools of ``mcp_list_tools``."""
    error: str | dict[str, object] | None = None
    approval_request_id: str | None = None
    approve: bool | None = None
    reason: str | None = None
    """Why a call is not approved. The text is part of the prompt."""


class ResponseTool(RequestBody):
    """A tool: ``function``, ``custom``, or a hosted tool, which has further fields.

    `penstock.serve.api.responses.offered_tools` has the fields of the type ``mcp``.
    """

    unsupported: ClassVar[Mapping[str, Refused]] = {
        "allowed_callers": Refused("the model calls tools directly", (["direct"],)),
        "async": Refused("the output of a call follows the call", (False,)),
        "defer_loading": Refused("all tools are in the prompt", accepts_all=True),
        "output_schema": Refused("chat templates do not read it", accepts_all=True),
    }

    type: str
    name: str | None = None
    description: str | None = None
    parameters: dict[str, object] | None = None
    strict: bool | None = None
    format: dict[str, object] | None = None
    """The format of the input of a custom tool."""

    @property
    def is_hosted(self) -> bool:
        """Whether the tool runs on OpenAI's servers, that is, the client does not run it."""
        return self.type not in ("function", "custom")

    @property
    def has_open_fields(self) -> bool:
        """Whether undeclared fields are accepted."""
        return self.is_hosted


class ToolSelection(RequestBody):
    """A ``tool_choice`` object: a function, a custom tool, a tool server, or a list of allowed tools."""

    type: str
    name: str | None = None
    server_label: str | None = None
    """For the type ``mcp``: the tool server. Without `name`, the model may call any of its tools."""
    mode: Literal["auto", "required"] | None = None
    tools: list[dict[str, object]] | None = None

    @property
    def has_open_fields(self) -> bool:
        """Whether undeclared fields are accepted here. The choice of a hosted tool is refused later."""
        return self.type not in ("function", "custom", "mcp", "allowed_tools")


class TextFormat(RequestBody):
    """The required format of the text."""

    type: TextFormatType
    name: str | None = None
    description: str | None = None
    schema_: dict[str, object] | None = Field(None, alias="schema")
    strict: bool | None = None
    """Has no effect: the output always matches the schema."""


class TextConfig(RequestBody):
    """Settings of the text."""

    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None
    """Has no effect: the model has no verbosity setting."""


class ReasoningConfig(RequestBody):
    """Settings of the reasoning."""

    unsupported: ClassVar[Mapping[str, Refused]] = {
        "context": Refused("reasoning items of the input are given to the chat template", ("auto",)),
        "mode": Refused("the model has only one reasoning mode", ("standard",)),
    }

    effort: Effort | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    """Has no effect: the response contains the whole reasoning."""
    generate_summary: Literal["auto", "concise", "detailed"] | None = None
    """An old name of ``summary``."""


class ResponsesBody(RequestBody):
    """``POST /v1/responses``."""

    unsupported: ClassVar[Mapping[str, Refused]] = {
        "access_programs": Refused("the server has no access programs"),
        "client_metadata": Refused("the server does not use it", accepts_all=True),
        "context_management": Refused("send truncation: auto", ([],)),
        "conversation": Refused("send previous_response_id"),
        "image": Refused("images are not compressed"),
        "moderation": Refused("there is no moderation"),
        "prompt": Refused("the server stores no prompts: send instructions and input"),
        "prompt_cache_options": Refused("the prefix cache has no per-request options", ({},)),
        "prompt_cache_retention": Refused(
            "prefixes stay cached until memory runs out", ("in_memory", "in-memory", "24h")
        ),
        "service_tier": Refused("there is only one service tier", ("auto", "default")),
    }

    model: str = ""
    input: str | Annotated[list[InputItem], Field(fail_fast=True)]
    instructions: str | None = None
    previous_response_id: str | None = None
    tools: Annotated[list[ResponseTool], Field(fail_fast=True)] | None = None
    tool_choice: Literal["auto", "none", "required"] | ToolSelection | None = None
    parallel_tool_calls: bool | None = None
    max_tool_calls: Count | None = None
    """Maximum number of calls of tool servers."""
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

    # Only logged and returned.
    metadata: Annotated[dict[Label, Label], Field(max_length=MAX_METADATA)] | None = None
    user: Label | None = None
    safety_identifier: Label | None = None
    prompt_cache_key: Label | None = None

    # Not in the OpenAI API.
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

    def includes(self, what: str) -> bool:
        """Return whether ``include`` has a value."""
        return what in (self.include or ())

    @property
    def is_stored(self) -> bool:
        """Whether the response is stored. True if ``store`` is absent, as in OpenAI's API."""
        return self.store is not False


SAME_NAMES = (
    "model temperature top_p parallel_tool_calls stream metadata user safety_identifier prompt_cache_key"
    " top_k min_p seed stop frequency_penalty presence_penalty repetition_penalty min_tokens ignore_eos"
    " chat_template_kwargs priority cache_salt"
).split()
"""Fields with the same name and meaning in a chat request."""
