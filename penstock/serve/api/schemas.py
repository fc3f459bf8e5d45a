"""The schemas of request bodies, with the field names of the OpenAI API.

A class declares the supported fields and the fields that are only logged. The unsupported fields of OpenAI's
API and of other servers are listed in `penstock.serve.api.parameters` or in the class attribute
``unsupported``. An optional field with the value ``null`` counts as absent.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from penstock.serve.api.unsupported import RefusedField

MAX_CHOICES = 128
MAX_TOP_LOGPROBS = 20
MAX_STOP_STRINGS = 64
MAX_STOP_CHARACTERS = 2048
"""Maximum total length of the stop strings. Bounds the time that matching takes for each token."""
MAX_LABEL_LENGTH = 512
"""Maximum length of a logged field in characters. OpenAI has the same limit for values of ``metadata``."""
MAX_METADATA_ENTRIES = 16
MAX_ROLE_LENGTH = 64
MAX_BAD_WORDS = 256
MAX_BAD_WORD_CHARACTERS = 16_384
"""Maximum total length of the bad words of a request."""

Count = Annotated[int, Field(ge=0, lt=2**63)]
Label = Annotated[str, Field(max_length=MAX_LABEL_LENGTH)]
Number = Annotated[float, Field(allow_inf_nan=False)]
TokenIds = Annotated[list[Annotated[int, Field(ge=0)]], Field(fail_fast=True)]
Texts = Annotated[list[str], Field(fail_fast=True)]


class RequestBody(BaseModel):
    """Base class of JSON objects. Types are strict: ``"1"`` and ``true`` are not numbers."""

    model_config = ConfigDict(extra="allow", strict=True, frozen=True)

    unsupported: ClassVar[Mapping[str, RefusedField]] = {}
    """The unsupported fields. Has no effect if `penstock.serve.api.parameters` lists fields of the class."""

    @property
    def has_open_fields(self) -> bool:
        """Whether undeclared fields are allowed. If True, the code that reads the object must check them."""
        return False


class FunctionCall(RequestBody):
    """The function of a tool call."""

    name: str
    arguments: str | dict[str, object] | None = None
    """The arguments, as a JSON text (OpenAI's format) or as an object."""


class ToolCall(RequestBody):
    """A tool call in an assistant message."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall


class ImageUrl(RequestBody):
    """An image in a message."""

    url: str
    """A ``data:`` URL. The server may also allow ``https:``, ``http:`` and ``file:`` URLs."""
    detail: str | None = None
    """The requested resolution: ``auto``, or another value that the model supports."""


class ContentPart(RequestBody):
    """A content part of a message: ``text``, an image (``image_url``), or the assistant's ``refusal``."""

    type: str
    text: str | None = None
    refusal: str | None = None
    image_url: ImageUrl | None = None

    @property
    def has_open_fields(self) -> bool:
        """Whether undeclared fields are allowed. True for unknown types, whose parts are refused later."""
        return self.type not in ("text", "refusal", "image_url")

    @model_validator(mode="after")
    def _check_content(self) -> Self:
        if self.type == "text" and self.text is None:
            raise ValueError("a part of type text requires the field text")
        if self.type == "refusal" and self.refusal is None:
            raise ValueError("a part of type refusal requires the field refusal")
        if self.type == "image_url" and self.image_url is None:
            raise ValueError("a part of type image_url requires the field image_url")
        return self


class ChatMessage(RequestBody):
    """A message of a conversation."""

    role: Annotated[str, Field(min_length=1, max_length=MAX_ROLE_LENGTH)]
    """A standard role, or a model-specific role that the chat template supports, such as ``ipython``."""
    content: str | Annotated[list[ContentPart], Field(fail_fast=True)] | None = None
    """An empty list and None mean an empty text. If `refusal` is set, None means the text of the refusal."""
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    refusal: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    """An alias of ``reasoning_content``."""

    @model_validator(mode="after")
    def _check_role(self) -> Self:
        if self.role != "assistant" and (self.tool_calls or self.refusal is not None):
            raise ValueError(f"tool_calls and refusal are for assistant messages, not for role {self.role}")
        if self.role == "tool" and self.tool_call_id is None:
            raise ValueError("a message of role tool requires the tool_call_id of its tool call")
        return self


class FunctionDefinition(RequestBody):
    """The definition of a function that the model may call."""

    name: str = Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")
    description: str | None = None
    parameters: dict[str, object] | None = None
    """A JSON schema. None for a function without parameters."""
    strict: bool | None = None


class Tool(RequestBody):
    """A tool that the model may use."""

    type: Literal["function"]
    function: FunctionDefinition


class FunctionName(RequestBody):
    """The name of a function."""

    name: str


class NamedTool(RequestBody):
    """A tool's name, in ``tool_choice`` or in a list of allowed tools."""

    type: Literal["function"]
    function: FunctionName


class AllowedToolList(RequestBody):
    """A subset of the tools of a request."""

    mode: Literal["auto", "required"]
    tools: list[NamedTool]


class AllowedTools(RequestBody):
    """A ``tool_choice`` that allows a subset of the tools."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedToolList


class JsonSchema(RequestBody):
    """A JSON schema in the field ``schema``. Without ``name`` and ``schema``, the object is the schema."""

    name: str | None = None
    description: str | None = None
    schema_: dict[str, object] | bool | None = Field(None, alias="schema")
    strict: bool | None = None
    """Has no effect, because the output is always constrained to the schema."""

    @property
    def is_plain_schema(self) -> bool:
        """Whether the object itself is the schema."""
        return self.name is None and self.schema_ is None

    @property
    def has_open_fields(self) -> bool:
        """Whether undeclared fields are allowed. True if the object itself is the schema."""
        return self.is_plain_schema


class ResponseFormat(RequestBody):
    """The format to which the output must conform. The type ``structural_tag`` has further fields."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchema | None = None

    @property
    def has_open_fields(self) -> bool:
        """Whether undeclared fields are allowed. True for structural tags, whose grammar is checked later."""
        return self.type == "structural_tag"


class StructuredOutputs(RequestBody):
    """The format to which the output must conform, in one of five forms. Not part of the OpenAI API."""

    json_: dict[str, object] | str | None = Field(None, alias="json")
    """A JSON schema, as an object or as a JSON text."""
    regex: str | None = None
    choice: list[str] | None = Field(None, min_length=1)
    grammar: str | None = None
    """An EBNF grammar."""
    structural_tag: dict[str, object] | str | None = None


class StreamOptions(RequestBody):
    """Options of a stream."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    """Adds to every chunk the usage up to that chunk. Implies ``include_usage`` if that field is absent."""


class GenerationBody(RequestBody):
    """The fields that chat and completion requests share."""

    model: str = ""
    """Defaults to the served model, which `penstock.serve.api.text_generation.checked_body` sets."""
    frequency_penalty: Annotated[Number, Field(ge=-2, le=2)] | None = None
    presence_penalty: Annotated[Number, Field(ge=-2, le=2)] | None = None
    logit_bias: dict[str, Annotated[Number, Field(ge=-100, le=100)]] | None = None
    """Token id, in decimal digits -> value that is added to the logit of the token."""
    max_tokens: Count | None = None
    max_completion_tokens: Annotated[Count, Field(ge=1)] | None = None
    """In OpenAI's API, only chat requests have this field. Some clients also send it for completions."""
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    stop: str | Texts | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: Annotated[Number, Field(ge=0, le=2)] | None = None
    top_p: Annotated[Number, Field(ge=0, le=1)] | None = None
    response_format: ResponseFormat | None = None

    # The fields below are not in the OpenAI API.
    top_k: Annotated[int, Field(ge=-1, lt=2**63)] | None = None
    min_p: Annotated[Number, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[Number, Field(gt=0)] | None = None
    min_tokens: Count | None = None
    stop_token_ids: TokenIds | None = None
    allowed_token_ids: Annotated[TokenIds, Field(min_length=1)] | None = None
    ignore_eos: bool | None = None
    structured_outputs: StructuredOutputs | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    """Whether tokens in log probabilities are written as ``token_id:17`` instead of their text."""
    prompt_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    """Number of top tokens per prompt token."""
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, lt=2**63)] | None = None
    """Maximum number of prompt tokens to keep, or -1; see `request_context.build_context`."""
    bad_words: Annotated[Texts, Field(max_length=MAX_BAD_WORDS)] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] | None = None
    cache_salt: str | None = None

    # Aliases of the fields above.
    repeat_penalty: Annotated[Number, Field(gt=0)] | None = None
    guided_json: dict[str, object] | str | None = None
    guided_regex: str | None = None
    guided_choice: Annotated[list[str], Field(min_length=1)] | None = None
    guided_grammar: str | None = None

    # Fields that do not affect the output. They are logged, and `user` also names the session of a request.
    user: Label | None = None
    metadata: Annotated[dict[Label, Label], Field(max_length=MAX_METADATA_ENTRIES)] | None = None
    safety_identifier: Label | None = None
    prompt_cache_key: Label | None = None

    @property
    def shows_special_tokens(self) -> bool:
        """Whether the output text includes special tokens."""
        return self.skip_special_tokens is False

    @property
    def stop_strings(self) -> list[str]:
        """The stop strings."""
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    @property
    def includes_usage(self) -> bool:
        """Whether a stream ends with a usage chunk."""
        options = self.stream_options
        if options is None:
            return False
        if options.include_usage is None:
            return bool(options.continuous_usage_stats)
        return options.include_usage

    @property
    def has_continuous_usage(self) -> bool:
        """Whether every chunk of a stream has the usage up to that chunk."""
        return self.stream_options is not None and bool(self.stream_options.continuous_usage_stats)

    @field_validator("stop")
    @classmethod
    def _check_stop_length(cls, stop: str | list[str] | None) -> str | list[str] | None:
        stop_strings = [stop] if isinstance(stop, str) else stop or []
        if len(stop_strings) > MAX_STOP_STRINGS:
            raise ValueError(f"there are {len(stop_strings)} stop strings; the maximum is {MAX_STOP_STRINGS}")
        if sum(map(len, stop_strings)) > MAX_STOP_CHARACTERS:
            raise ValueError(
                f"the stop strings have {sum(map(len, stop_strings))} characters; "
                f"the maximum is {MAX_STOP_CHARACTERS}"
            )
        return stop

    @field_validator("bad_words")
    @classmethod
    def _check_bad_words(cls, words: list[str] | None) -> list[str] | None:
        if any(not word.strip() for word in words or ()):
            raise ValueError("a bad word is empty or consists of white space: omit it")
        length = sum(map(len, words or ()))
        if length > MAX_BAD_WORD_CHARACTERS:
            raise ValueError(
                f"the bad words have {length} characters; "
                f"the maximum is {MAX_BAD_WORD_CHARACTERS}: send fewer"
            )
        return words

    @field_validator("truncate_prompt_tokens")
    @classmethod
    def _reject_zero(cls, num_tokens: int | None) -> int | None:
        if num_tokens == 0:
            raise ValueError("0 leaves an empty prompt: send at least 1, or -1 for the maximum length")
        return num_tokens


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

    # The fields below are not in the OpenAI API.
    chat_template_kwargs: dict[str, object] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    include_reasoning: bool | None = None
    """False leaves the reasoning out of the response."""


class CompletionBody(GenerationBody):
    """``POST /v1/completions``."""

    prompt: str | Texts | TokenIds | Annotated[list[TokenIds], Field(fail_fast=True)]
    best_of: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    echo: bool | None = None
    suffix: str | None = None
    """The text that follows the output. Requires a model with fill-in-the-middle tokens."""
    logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None


class TokenizeBody(RequestBody):
    """``POST /tokenize``, with either a text or messages."""

    model: str | None = None
    prompt: str | None = None
    add_special_tokens: bool | None = None
    messages: Annotated[list[ChatMessage], Field(min_length=1, fail_fast=True)] | None = None
    tools: Annotated[list[Tool], Field(fail_fast=True)] | None = None
    chat_template_kwargs: dict[str, object] | None = None
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
    """False refuses the request if an adapter with this name is loaded. None and True replace the adapter."""


class UnloadAdapterBody(RequestBody):
    """``POST /v1/unload_lora_adapter``."""

    lora_name: str = Field(min_length=1, max_length=256)
