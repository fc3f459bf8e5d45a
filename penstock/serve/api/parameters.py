"""Checks request fields, lists unsupported fields, and converts a request to sampling parameters.

The server treats the fields of a request as follows:

- A supported field is declared in the schema of the body.
- A field of `LOGGED_FIELDS` is written to the log and does not affect the output.
- An unsupported field is in `UNSUPPORTED` or in the schema's ``unsupported``, with accepted values or with
  `RefusedField.accepts_all`. Accepted values and null have no effect. Any other value is refused.
- Any other field is unknown and is refused, or with ``--unknown-fields warn`` logged and ignored. Objects
  with `RequestBody.has_open_fields` may have unknown fields.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from penstock.config import PipelineConfig
from penstock.errors import InputError
from penstock.pipelines.core import SamplingParams
from penstock.serve.api.bad_words import banned_sequences
from penstock.serve.api.embedding_schemas import ClassifyBody, EmbeddingsBody, PoolingBody, RerankBody
from penstock.serve.api.schemas import (
    ChatBody,
    ChatMessage,
    CompletionBody,
    GenerationBody,
    RequestBody,
    StreamOptions,
    ToolCall,
)
from penstock.serve.api.unsupported import RefusedField
from penstock.serve.http.problems import RequestProblem, problem_of
from penstock.text.tokenizer import TextTokenizer

LOGGED_FIELDS = ("user", "metadata", "safety_identifier", "prompt_cache_key")
"""Fields that are written to the request log and do not affect the output."""
_MAX_NAME_LENGTH = 100
"""Maximum number of characters of a field name in an error message. A path may have twice as many."""

_NO_BEAM_SEARCH = "the server has no beam search: use n and choose among the outputs"
_USE_TOOLS = "this is a deprecated form of tools: send tools and tool_choice"
_TEXT_ONLY = "the model reads and writes text only"

_USE_MAX_TOKENS = "send max_tokens"
_USE_FORMAT = "send response_format, or structured_outputs: {json: ...} or {grammar: ...}"
_NO_SAMPLER = "the server does not have this sampler: use top_k, top_p, min_p and temperature"
_ONE_PROVIDER = "this server runs one model"

_GENERATION_FIELDS: Mapping[str, RefusedField] = {
    "use_beam_search": RefusedField(_NO_BEAM_SEARCH, (False,)),
    "length_penalty": RefusedField(_NO_BEAM_SEARCH, (1, 1.0)),
    "early_stopping": RefusedField(_NO_BEAM_SEARCH, (False,)),
    "spaces_between_special_tokens": RefusedField(
        "no spaces are added between special tokens", (True, False)
    ),
    "truncation_side": RefusedField("the end of the prompt is kept", ("left",)),
    "logits_processors": RefusedField("requests cannot contain code", ([],)),
    "stream_interval": RefusedField("tokens are sent when they are generated", (1,)),
    "service_tier": RefusedField("there is only one service tier", ("auto", "default")),
    "store": RefusedField("responses are not stored", (False,)),
    # Fields of llama.cpp and Ollama. The accepted values of samplers disable the sampler.
    "cache_prompt": RefusedField(
        "a request cannot turn the prefix cache off; cache_salt separates cached prefixes", (True,)
    ),
    "id_slot": RefusedField("the scheduler chooses the slot", (-1,)),
    "n_keep": RefusedField("the server has no context shift", (0,)),
    "min_keep": RefusedField("at least one token is always kept", (0, 1)),
    "repeat_last_n": RefusedField("repetition_penalty covers the prompt and the whole output", (-1,)),
    "typical_p": RefusedField(_NO_SAMPLER, (1, 1.0)),
    "tfs_z": RefusedField(_NO_SAMPLER, (1, 1.0)),
    "top_a": RefusedField(_NO_SAMPLER, (0, 0.0)),
    "top_n_sigma": RefusedField(_NO_SAMPLER, (-1, -1.0)),
    "mirostat": RefusedField(_NO_SAMPLER, (0,)),
    "dynatemp_range": RefusedField(_NO_SAMPLER, (0, 0.0)),
    "xtc_probability": RefusedField(_NO_SAMPLER, (0, 0.0)),
    "dry_multiplier": RefusedField(_NO_SAMPLER, (0, 0.0)),
    "samplers": RefusedField(_NO_SAMPLER),
    "timings_per_token": RefusedField("timings are in /metrics and in the log", (False,)),
    "post_sampling_probs": RefusedField("log probabilities are computed before sampling filters", (False,)),
    "n_probs": RefusedField("send logprobs"),
    "n_predict": RefusedField(_USE_MAX_TOKENS),
    "num_predict": RefusedField(_USE_MAX_TOKENS),
    "max_new_tokens": RefusedField(_USE_MAX_TOKENS),
    "grammar": RefusedField(_USE_FORMAT),
    "json_schema": RefusedField(_USE_FORMAT),
    "format": RefusedField(_USE_FORMAT),
    "options": RefusedField("send its fields at the top level of the body"),
    "extra_body": RefusedField("send its fields at the top level of the body"),
    "num_ctx": RefusedField("the server's --max-length limits the length of a request"),
    "keep_alive": RefusedField("the model stays loaded", (-1, "-1")),
    # Fields of OpenRouter.
    "transforms": RefusedField("prompts are not changed; truncate_prompt_tokens shortens them", ([],)),
    "plugins": RefusedField("there are no plugins", ([],)),
    "models": RefusedField(_ONE_PROVIDER, ([],)),
    "provider": RefusedField(_ONE_PROVIDER, ({},)),
    "route": RefusedField(_ONE_PROVIDER),
    "usage": RefusedField(
        "responses always have a usage; for streams, send stream_options: {include_usage: true}"
    ),
}
_SPECIAL_TOKENS = RefusedField("texts are encoded with the tokenizer's own special tokens", (True,))

UNSUPPORTED: Mapping[type[RequestBody], Mapping[str, RefusedField]] = {
    ChatBody: {
        **_GENERATION_FIELDS,
        "audio": RefusedField(_TEXT_ONLY),
        "best_of": RefusedField(_NO_BEAM_SEARCH, (1,)),
        "chat_template": RefusedField(
            "a request cannot set the template: start the server with --chat-template"
        ),
        "documents": RefusedField("send them in chat_template_kwargs, if the template reads them", ([],)),
        "add_special_tokens": RefusedField("the chat template adds the special tokens", (False,)),
        "echo": RefusedField("use continue_final_message, or /v1/completions with echo", (False,)),
        "function_call": RefusedField(_USE_TOOLS, ("none", "auto")),
        "functions": RefusedField(_USE_TOOLS, ([],)),
        "modalities": RefusedField(_TEXT_ONLY, (["text"],)),
        "moderation": RefusedField("there is no moderation"),
        "prediction": RefusedField("predicted outputs are not supported"),
        "prompt_cache_options": RefusedField("the prefix cache has no per-request options", ({},)),
        "prompt_cache_retention": RefusedField(
            "prefixes stay cached until their blocks are needed", ("in_memory", "in-memory", "24h")
        ),
        "reasoning": RefusedField("send reasoning_effort, and include_reasoning"),
        "think": RefusedField("send reasoning_effort, or chat_template_kwargs"),
        "verbosity": RefusedField("the model has no verbosity setting", ("low", "medium", "high")),
        "web_search_options": RefusedField("there is no web search"),
    },
    CompletionBody: {
        **_GENERATION_FIELDS,
        "add_special_tokens": RefusedField(
            "prompts are encoded with the tokenizer's own special tokens", (True,)
        ),
    },
    ChatMessage: {
        "annotations": RefusedField("there is no web search", ([],)),
        "audio": RefusedField(_TEXT_ONLY),
        "function_call": RefusedField("this is the old form of tool_calls"),
    },
    ToolCall: {"index": RefusedField("the order of the list is the index", tuple(range(128)))},
    EmbeddingsBody: {"add_special_tokens": _SPECIAL_TOKENS},
    PoolingBody: {"add_special_tokens": _SPECIAL_TOKENS},
    ClassifyBody: {"add_special_tokens": _SPECIAL_TOKENS},
    RerankBody: {
        "max_chunks_per_doc": RefusedField("a document is not split: send max_tokens_per_doc", (1,)),
        "rank_fields": RefusedField("documents have the field text only", (["text"],)),
    },
    StreamOptions: {"include_obfuscation": RefusedField("chunks are not padded", (False,))},
}


def unsupported_fields(body_type: type[RequestBody]) -> Mapping[str, RefusedField]:
    """Return name -> `RefusedField` for the unsupported fields of a schema."""
    return UNSUPPORTED.get(body_type) or body_type.unsupported


@dataclass(frozen=True)
class UndeclaredFieldChecker:
    """Checks the unsupported and the unknown fields of a request, which its schema does not declare."""

    refuses_unknown: bool
    """Whether unknown fields are refused (``--unknown-fields``). Otherwise they are logged and ignored."""
    log: logging.Logger

    def check(self, body: RequestBody, field_path: str = "") -> None:
        """Check the undeclared fields of a body and of its nested objects.

        Raises:
            RequestProblem: 400; the message names the field.
        """
        unsupported = unsupported_fields(type(body))
        for name, value in (body.model_extra or {}).items():
            if value is None and name in unsupported:
                continue
            param = f"{field_path}.{name}" if field_path else name
            if name in unsupported:
                _check_value(param, value, unsupported[name])
            elif not body.has_open_fields:
                self._report_unknown(body, name, param)
        for name in body.model_fields_set:
            self._check_nested(getattr(body, name, None), f"{field_path}.{name}" if field_path else name)

    def _check_nested(self, value: object, field_path: str) -> None:
        if isinstance(value, RequestBody):
            self.check(value, field_path)
        elif isinstance(value, list):
            for index, element in enumerate(value):
                if isinstance(element, RequestBody):
                    self.check(element, f"{field_path}[{index}]")
                elif isinstance(element, int):
                    return  # a list of token ids, which has no fields

    def _report_unknown(self, body: RequestBody, name: str, param: str) -> None:
        name, param = name[:_MAX_NAME_LENGTH], param[: 2 * _MAX_NAME_LENGTH]
        fields = type(body).model_fields.items()
        known_names = [
            *(field.alias or field_name for field_name, field in fields),
            *unsupported_fields(type(body)),
        ]
        nearest_names = get_close_matches(name, known_names, n=1, cutoff=0.7)
        hint = f"; did you mean {nearest_names[0]}?" if nearest_names else ""
        if self.refuses_unknown:
            raise RequestProblem(400, f"unknown field {param!r}{hint}", param=param, code="unknown_parameter")
        self.log.warning("a request has the unknown field %r, which is ignored%s", param, hint)


def _check_value(param: str, value: object, field: RefusedField) -> None:
    if field.accepts_all or any(
        type(value) is type(accepted_value) and value == accepted_value for accepted_value in field.accepted
    ):
        return
    hint = f" (only {', '.join(map(json.dumps, field.accepted))})" if 0 < len(field.accepted) < 8 else ""
    raise RequestProblem(
        400, f"{param} is not supported{hint}: {field.reason}", param=param, code="unsupported_parameter"
    )


@contextmanager
def map_input_errors(param: str | None) -> Iterator[None]:
    """Convert an `InputError` in the ``with`` block to a `RequestProblem`.

    The problem names the field of the `InputError`, or ``param`` if the `InputError` names no field.
    """
    try:
        yield
    except InputError as error:
        problem = problem_of(error)
        raise RequestProblem(
            problem.status, problem.message, param=problem.param or param, code=problem.code
        ) from error


def output_limit(body: GenerationBody) -> int | None:
    """Return ``max_completion_tokens`` or its older name ``max_tokens``; None if both are absent.

    Raises:
        RequestProblem: 400; both are present and differ.
    """
    max_completion_tokens = body.max_completion_tokens
    if (
        max_completion_tokens is not None
        and body.max_tokens is not None
        and max_completion_tokens != body.max_tokens
    ):
        raise RequestProblem(
            400,
            f"max_tokens is {body.max_tokens}, but max_completion_tokens is {max_completion_tokens}: "
            "send only one of them",
            param="max_tokens",
        )
    return body.max_tokens if max_completion_tokens is None else max_completion_tokens


def repetition_penalty(body: GenerationBody) -> float | None:
    """Return ``repetition_penalty`` or its alias ``repeat_penalty``; None if both are absent.

    Raises:
        RequestProblem: 400; both are present and differ.
    """
    penalty, alias = body.repetition_penalty, body.repeat_penalty
    if penalty is not None and alias is not None and penalty != alias:
        raise RequestProblem(
            400,
            f"repetition_penalty is {penalty:g}, but repeat_penalty is {alias:g}: send only one of them",
            param="repeat_penalty",
        )
    return alias if penalty is None else penalty


def check_combinations(body: GenerationBody) -> None:
    """Raise if fields of a request contradict each other.

    Raises:
        RequestProblem: 400; the message names the fields.
    """
    limit = output_limit(body)
    if body.stream_options is not None and not body.stream:
        raise RequestProblem(400, "stream_options requires stream to be true", param="stream_options")
    if limit is not None and (body.min_tokens or 0) > limit:
        raise RequestProblem(
            400, f"min_tokens is {body.min_tokens}, but max_tokens is {limit}", param="min_tokens"
        )
    if body.prompt_logprobs is not None and body.stream:
        raise RequestProblem(400, "prompt_logprobs is not available with stream", param="prompt_logprobs")
    if isinstance(body, ChatBody):
        if body.top_logprobs is not None and not body.logprobs:
            raise RequestProblem(400, "top_logprobs requires logprobs to be true", param="top_logprobs")
        if body.continue_final_message and body.add_generation_prompt:
            raise RequestProblem(
                400,
                "continue_final_message and add_generation_prompt exclude each other",
                param="add_generation_prompt",
            )
    elif isinstance(body, CompletionBody) and body.best_of not in (None, 1, body.n):
        raise RequestProblem(
            400, f"best_of is not supported (only 1, or the same as n): {_NO_BEAM_SEARCH}", param="best_of"
        )


def sampling_params(
    body: GenerationBody, config: PipelineConfig, *, tokenizer: TextTokenizer, default_max_tokens: int | None
) -> SamplingParams:
    """Return the sampling parameters of a request.

    Args:
        body: the request.
        config: provides the values of absent parameters, and a random seed if the seed is absent.
        tokenizer: encodes bad words. Token ids must be less than its ``vocab_size``.
        default_max_tokens: the output limit of a request without ``max_tokens``; None for the limit of the
            model.

    Raises:
        RequestProblem: 400; the message names the invalid field.
    """
    limit, vocab_size = output_limit(body), tokenizer.vocab_size
    options: dict[str, Any] = {
        "temperature": body.temperature,
        "top_p": body.top_p,
        "top_k": body.top_k,
        "min_p": body.min_p,
        "frequency_penalty": body.frequency_penalty,
        "presence_penalty": body.presence_penalty,
        "repetition_penalty": repetition_penalty(body),
        "max_new_tokens": default_max_tokens if limit is None else limit,
        "min_new_tokens": body.min_tokens,
        "ignore_eos": body.ignore_eos,
        "seed": body.seed,
        "stop": body.stop_strings or None,
        "stop_token_ids": _checked_ids("stop_token_ids", body.stop_token_ids, vocab_size),
        "logit_bias": _logit_biases(body.logit_bias, vocab_size),
        "allowed_token_ids": _checked_ids("allowed_token_ids", body.allowed_token_ids, vocab_size),
        "banned_sequences": banned_sequences(body.bad_words, tokenizer),
    }
    with map_input_errors(None):
        return config.default_sampling_params(
            **{name: value for name, value in options.items() if value is not None}
        )


def _logit_biases(logit_bias: Mapping[str, float] | None, vocab_size: int) -> dict[int, float] | None:
    if not logit_bias:
        return None
    biases: dict[int, float] = {}
    for key, bias in logit_bias.items():
        if not (key.isascii() and key.isdecimal() and len(key) < 20 and int(key) < vocab_size):
            raise RequestProblem(
                400,
                f"logit_bias has the key {key!r}: keys must be token ids from 0 to {vocab_size - 1}",
                param="logit_bias",
            )
        biases[int(key)] = bias
    return biases


def _checked_ids(param: str, ids: list[int] | None, vocab_size: int) -> list[int] | None:
    invalid_id = next((token for token in ids or () if token >= vocab_size), None)
    if invalid_id is not None:
        raise RequestProblem(
            400, f"{param} has {invalid_id}: token ids must be below {vocab_size}", param=param
        )
    return ids


def accepted_values(body_type: type[RequestBody]) -> dict[str, dict[str, object]]:
    """Return name -> JSON schema of the accepted values for the unsupported fields of a body."""
    unsupported = unsupported_fields(body_type)
    return {
        name: {} if field.accepts_all else {"enum": [None, *field.accepted]}
        for name, field in unsupported.items()
    }
