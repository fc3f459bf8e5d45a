"""The schemas of the request bodies of Ollama's routes, with Ollama's field names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from penstock.serve.api.schemas import Number, RequestBody, Texts, Tool
from penstock.serve.api.unsupported import RefusedField

_SERVER_SETTING = RefusedField("it is a setting of the server", accepts_all=True)
_NO_SAMPLER = "the server does not have this sampler: use top_k, top_p, min_p and temperature"
Think = bool | Literal["low", "medium", "high", "max"]


class OllamaOptions(RequestBody):
    """The ``options`` of a request."""

    unsupported: ClassVar[Mapping[str, RefusedField]] = {
        **dict.fromkeys(
            "numa num_batch num_gpu main_gpu low_vram use_mmap use_mlock num_thread f16_kv".split(),
            _SERVER_SETTING,
        ),
        "num_keep": RefusedField("the server has no context shift", accepts_all=True),
        "repeat_last_n": RefusedField("the penalty covers the prompt and the whole output", accepts_all=True),
        "penalize_newline": RefusedField("newlines are penalized like other tokens", (True,)),
        "tfs_z": RefusedField(_NO_SAMPLER, (1, 1.0)),
        "typical_p": RefusedField(_NO_SAMPLER, (1, 1.0)),
        "mirostat": RefusedField(_NO_SAMPLER, (0,)),
        "mirostat_eta": RefusedField(_NO_SAMPLER, accepts_all=True),
        "mirostat_tau": RefusedField(_NO_SAMPLER, accepts_all=True),
    }

    num_predict: Annotated[int, Field(ge=-2, lt=2**31)] | None = None
    """Maximum number of new tokens; 0 means 1. None, -1 and -2 mean the maximum length of the model."""
    num_ctx: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    """The context length that the client requires. A value above ``--max-length`` is refused."""
    temperature: Annotated[Number, Field(ge=0, le=2)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    top_p: Annotated[Number, Field(ge=0, le=1)] | None = None
    min_p: Annotated[Number, Field(ge=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    stop: str | Texts | None = None
    repeat_penalty: Annotated[Number, Field(gt=0)] | None = None
    presence_penalty: Annotated[Number, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[Number, Field(ge=-2, le=2)] | None = None


class OllamaFunction(RequestBody):
    """The function of a tool call."""

    unsupported: ClassVar[Mapping[str, RefusedField]] = {
        "index": RefusedField("the order of the list is the index", accepts_all=True)
    }

    name: str
    arguments: dict[str, object] | None = None


class OllamaCall(RequestBody):
    """A tool call in an earlier message of the conversation."""

    unsupported: ClassVar[Mapping[str, RefusedField]] = {
        "type": RefusedField("all tools are functions", ("function",))
    }

    id: str | None = None
    function: OllamaFunction


class OllamaMessage(RequestBody):
    """A message of the conversation."""

    role: str
    content: str | None = None
    thinking: str | None = None
    images: Texts | None = None
    """Image files in base64, or ``data:`` URLs."""
    tool_calls: list[OllamaCall] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None


class OllamaBody(RequestBody):
    """The fields that ``/api/chat`` and ``/api/generate`` share."""

    unsupported: ClassVar[Mapping[str, RefusedField]] = {
        "keep_alive": RefusedField("the model stays loaded", accepts_all=True),
        "truncate": RefusedField("a prompt that is too long is refused", (False, True)),
        "shift": RefusedField("the server has no context shift", (False, True)),
        "logprobs": RefusedField("use the OpenAI routes", (False,)),
        "top_logprobs": RefusedField("use the OpenAI routes", (0,)),
        "dimensions": RefusedField("it is for /api/embed"),
    }

    model: str
    stream: bool | None = None
    """None means True."""
    format: Literal["", "json"] | dict[str, object] | None = None
    """``json``, or a JSON schema. None and "" mean free text."""
    options: OllamaOptions | None = None
    think: Think | None = None

    @property
    def streams(self) -> bool:
        """Whether the response is streamed."""
        return self.stream is not False


class OllamaChatBody(OllamaBody):
    """``POST /api/chat``."""

    unsupported: ClassVar[Mapping[str, RefusedField]] = OllamaBody.unsupported

    messages: Annotated[list[OllamaMessage], Field(fail_fast=True)] | None = None
    """In Ollama, a request without messages loads the model. Here, the model is already loaded."""
    tools: Annotated[list[Tool], Field(fail_fast=True)] | None = None


class OllamaGenerateBody(OllamaBody):
    """``POST /api/generate``."""

    unsupported: ClassVar[Mapping[str, RefusedField]] = {
        **OllamaBody.unsupported,
        "context": RefusedField("send the conversation to /api/chat", ([],)),
        "template": RefusedField("a request cannot set the template", ("",)),
    }

    prompt: str | None = None
    """In Ollama, a request without a prompt loads the model. Here, the model is already loaded."""
    suffix: str | None = None
    system: str | None = None
    raw: bool | None = None
    """Whether the prompt is used without the chat template."""
    images: Texts | None = None


class OllamaEmbedBody(RequestBody):
    """``POST /api/embed``."""

    unsupported: ClassVar[Mapping[str, RefusedField]] = {
        "keep_alive": RefusedField("the model stays loaded", accepts_all=True),
        "options": RefusedField("options affect text generation only", accepts_all=True),
    }

    model: str
    input: str | Texts
    truncate: bool | None = None
    """Whether inputs over the maximum length are cut at the end. None means True."""
    dimensions: Annotated[int, Field(ge=1, lt=2**31)] | None = None


class OllamaShowBody(RequestBody):
    """``POST /api/show``."""

    unsupported: ClassVar[Mapping[str, RefusedField]] = {
        "verbose": RefusedField("the answer always contains all details", (False, True))
    }

    model: str | None = None
    name: str | None = None
    """The former name of the field ``model``."""
