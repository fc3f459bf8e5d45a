"""The requests of text generation and speech, from which tokenizers build contexts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Literal, NotRequired, TypedDict

import msgspec

from penstock.errors import InputError
from penstock.pipelines.core.parameter_hints import suggest_constructor_parameters
from penstock.pipelines.core.sampling_params import SamplingParams

GrammarKind = Literal["json_schema", "json_object", "regex", "ebnf", "choice", "structural_tag"]
_GRAMMAR_KINDS = ("json_schema", "json_object", "regex", "ebnf", "choice", "structural_tag")
_DEFAULT_SAMPLING = SamplingParams()


class Grammar(msgspec.Struct, frozen=True):
    """A constraint on the output: the kind of grammar and its text."""

    kind: GrammarKind
    text: str = ""
    """A JSON schema, a regular expression, an EBNF grammar, a JSON list of choices or a JSON structural tag,
    according to ``kind``; empty for ``json_object``."""

    def __post_init__(self) -> None:
        if self.kind not in _GRAMMAR_KINDS:
            raise InputError(f"grammar kind must be one of {', '.join(_GRAMMAR_KINDS)}, was {self.kind!r}")
        if not isinstance(self.text, str):
            raise InputError(f"grammar text must be a string, was {type(self.text).__name__}")


def resolved_grammar(grammar: Grammar | None, json_schema: str | None) -> tuple[Grammar | None, str | None]:
    """Return (grammar, JSON schema) of an output.

    A missing grammar is built from the JSON schema. A missing JSON schema is taken from a grammar of kind
    ``json_schema``.

    Raises:
        InputError: both are given, and they differ.
    """
    if json_schema is not None and grammar is None:
        return Grammar("json_schema", json_schema), json_schema
    if grammar is not None and grammar.kind == "json_schema":
        if json_schema not in (None, grammar.text):
            raise InputError("json_schema and grammar are two different JSON schemas: give one of them")
        return grammar, grammar.text
    if grammar is not None and json_schema is not None:
        raise InputError(f"json_schema and a grammar of kind {grammar.kind}: give one of them")
    return grammar, json_schema


class TokenGeneratorRequestFunction(TypedDict):
    """A function that the model may call."""

    name: str
    description: str
    parameters: dict[str, object]
    """A JSON schema."""


class TokenGeneratorRequestTool(TypedDict):
    """A tool that the model may use."""

    type: str
    function: TokenGeneratorRequestFunction


class TokenGeneratorResponseFormat(TypedDict):
    """The required format of the output."""

    type: str
    json_schema: dict[str, object]


class TokenGeneratorRequestMessage(TypedDict):
    """One message of a chat."""

    role: Literal["system", "user", "assistant", "tool", "developer"]
    content: str | list[dict[str, object]] | None
    """A string, or parts such as ``{"type": "text", "text": ...}``; None only with ``tool_calls``."""
    name: NotRequired[str]
    reasoning_content: NotRequired[str]
    tool_calls: NotRequired[list[dict[str, object]]]
    tool_call_id: NotRequired[str]


@suggest_constructor_parameters
@dataclass(frozen=True)
class TokenGeneratorRequest:
    """A text generation request: a prompt or messages, and the parameters of the answer."""

    id: str
    """The ``request_id`` of the context."""
    index: int
    """The position among requests that were sent together."""
    model_name: str
    prompt: str | Sequence[int] | None = None
    """Text or token ids."""
    messages: list[TokenGeneratorRequestMessage] | None = None
    """The turns of a chat, for the model's chat template."""
    images: list[bytes] | None = None
    """One encoded image for each image part of the messages, in order."""
    tools: list[TokenGeneratorRequestTool] | None = None
    response_format: TokenGeneratorResponseFormat | None = None
    timestamp_ns: int = 0
    """Time at which the server received the request, in nanoseconds."""
    request_path: str = "/"
    """The HTTP path of the request."""
    logprobs: int = 0
    """Number of top tokens per position whose log probabilities are returned; 0 returns none."""
    echo: bool = False
    """Whether the prompt is part of the output."""
    stop: str | list[str] | None = None
    """Strings that end the output, in addition to ``sampling_params.stop``."""
    chat_template_options: dict[str, object] | None = None
    """Extra variables for the chat template."""
    sampling_params: SamplingParams = _DEFAULT_SAMPLING
    _: KW_ONLY
    grammar: Grammar | None = None
    """Grammar of the output, for constraints that ``response_format`` cannot express."""
    adapter: str | None = None
    """The name of the LoRA adapter to use."""
    cache_salt: str | None = None
    """Only requests with the same salt share cached prefixes."""
    priority: int = 0
    """Requests with a higher number are scheduled first."""
    image_details: list[str] | None = None
    """The requested resolution of each image, as OpenAI's ``detail``; None is ``auto`` for all."""

    def __str__(self) -> str:
        limit = self.sampling_params.max_new_tokens
        return f"Id: {self.id}" + ("" if limit is None else f", MaxNewTokens: {limit}")


class MissingAudioInputError(InputError, RuntimeError):
    """An audio request has neither ``input`` nor ``prompt``. Also a ``RuntimeError``, as in Modular's MAX."""


@dataclass(frozen=True)
class AudioGenerationRequest:
    """A speech request: a text to speak, or a prompt for the speech model."""

    id: str
    """Identifies the request in logs and traces."""
    index: int
    """The position among requests that were sent together."""
    model: str
    input: str | None = None
    """The text to speak."""
    audio_prompt_tokens: list[int] = field(default_factory=list)
    """Speech tokens of the voice to imitate."""
    audio_prompt_transcription: str = ""
    """Transcription of ``audio_prompt_tokens``."""
    sampling_params: SamplingParams = _DEFAULT_SAMPLING
    prompt: list[int] | str | None = None
    """Token ids or text to use instead of the prompt that is built from the other fields."""
    _: KW_ONLY
    voice: str | None = None
    """The name of a voice on which the model was trained."""
    streaming: bool = False
    """Whether the audio is streamed. The first chunks are then short, for low latency."""
    adapter: str | None = None
    """The name of the LoRA adapter to use."""
    cache_salt: str | None = None
    """Only requests with the same salt share cached prefixes."""
    priority: int = 0
    """Requests with a higher number are scheduled first."""

    def __post_init__(self) -> None:
        if self.prompt is None and self.input is None:
            raise MissingAudioInputError("either token_ids or input must be provided.")
