"""The schemas of ``/completion`` and ``/infill``, with llama.cpp's field names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar

from pydantic import Field

from penstock.serve.api.schemas import Number, RequestBody, Texts, TokenIds
from penstock.serve.api.unsupported import RefusedField

_NO_SAMPLER = "the server does not have this sampler: use top_k, top_p, min_p and temperature"


class LlamaCppBody(RequestBody):
    """The fields that both routes share."""

    unsupported: ClassVar[Mapping[str, RefusedField]] = {
        "cache_prompt": RefusedField(
            "the setting enable_prefix_caching of the server applies", (True, False)
        ),
        "dry_multiplier": RefusedField(_NO_SAMPLER, (0, 0.0)),
        "dynatemp_range": RefusedField(_NO_SAMPLER, (0, 0.0)),
        "id_slot": RefusedField("the scheduler chooses the slot", (-1,)),
        "logit_bias": RefusedField("send it to /v1/completions", ([],)),
        "min_keep": RefusedField("at least one token is always kept", (0, 1)),
        "mirostat": RefusedField(_NO_SAMPLER, (0,)),
        "n_indent": RefusedField("the indentation is not enforced", (0,)),
        "n_keep": RefusedField("the server has no context shift", (0,)),
        "n_probs": RefusedField("send logprobs to /v1/completions", (0,)),
        "penalize_nl": RefusedField("newlines are penalized like other tokens", (True,)),
        "post_sampling_probs": RefusedField("send logprobs to /v1/completions", (False,)),
        "repeat_last_n": RefusedField("the penalty covers the prompt and the whole output", (-1, 64)),
        "samplers": RefusedField("the order of the samplers is fixed"),
        "t_max_predict_ms": RefusedField("--request-timeout limits the time", (0,)),
        "tfs_z": RefusedField(_NO_SAMPLER, (1, 1.0)),
        "timings_per_token": RefusedField("timings are in the last event", (False,)),
        "top_n_sigma": RefusedField(_NO_SAMPLER, (-1, -1.0)),
        "typical_p": RefusedField(_NO_SAMPLER, (1, 1.0)),
        "xtc_probability": RefusedField(_NO_SAMPLER, (0, 0.0)),
    }

    model: str = ""
    n_predict: Annotated[int, Field(ge=-2, lt=2**31)] | None = None
    """Maximum number of new tokens. None, -1 and -2 mean the maximum length of the model."""
    temperature: Annotated[Number, Field(ge=0, le=2)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    top_p: Annotated[Number, Field(ge=0, le=1)] | None = None
    min_p: Annotated[Number, Field(ge=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=-1, lt=2**64)] | None = None
    """Seed of the sampling. -1 means a random seed."""
    stop: str | Texts | None = None
    stream: bool | None = None
    repeat_penalty: Annotated[Number, Field(gt=0)] | None = None
    presence_penalty: Annotated[Number, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[Number, Field(ge=-2, le=2)] | None = None
    ignore_eos: bool | None = None
    json_schema: dict[str, object] | None = None
    grammar: str | None = None
    """A grammar in GBNF, the EBNF notation of llama.cpp."""
    return_tokens: bool | None = None
    """Whether the response has the ids of the generated tokens."""


class LlamaCppCompletionBody(LlamaCppBody):
    """``POST /completion``."""

    unsupported: ClassVar[Mapping[str, RefusedField]] = LlamaCppBody.unsupported

    prompt: str | TokenIds


class InfillExtra(RequestBody):
    """A file that is part of the prompt, for example another file of the repository."""

    filename: str
    text: str


class InfillBody(LlamaCppBody):
    """``POST /infill``."""

    unsupported: ClassVar[Mapping[str, RefusedField]] = LlamaCppBody.unsupported

    input_prefix: str
    input_suffix: str
    input_extra: list[InfillExtra] | None = None
    """Files placed before the prefix, each preceded by its name."""
    prompt: str | None = None
    """Text placed after the prefix."""
