"""Checks the parameters of a request against the model, and derives values from them."""

from __future__ import annotations

import json
from dataclasses import replace

from tokenizers import Tokenizer

from penstock.errors import InputError, PromptTooLongError
from penstock.pipelines.core import Grammar, SamplingParams, TokenGeneratorRequest
from penstock.text.valid_unicode import valid_unicode

_CHARACTERS_PER_TOKEN = 8
"""Assumed upper bound of the mean number of characters per token.

Texts with more characters than the maximum length times this number are first encoded in part.
"""


def sampling_params_with_stops(request: TokenGeneratorRequest) -> SamplingParams:
    """Return the sampling parameters of a request with the stop strings of ``request.stop`` added.

    Empty and repeated stop strings are removed.

    Raises:
        InputError: ``request.stop`` is not a string or a list of strings.
    """
    request_stops = [request.stop] if isinstance(request.stop, str) else (request.stop or [])
    if not all(isinstance(stop, str) for stop in request_stops):
        raise InputError(f"stop must be a string or a list of strings, was {request.stop!r}")
    stop_strings = dict.fromkeys(
        stop for stop in [*request_stops, *(request.sampling_params.stop or [])] if stop
    )
    return replace(request.sampling_params, stop=list(stop_strings) or None)


def output_format(request: TokenGeneratorRequest) -> tuple[str | None, Grammar | None]:
    """Return (JSON schema, grammar) of the output. At least one of them is None.

    `TextContext` derives the grammar from a JSON schema.

    Raises:
        InputError: the grammar or the ``response_format`` is invalid, or the request has both.
    """
    if request.grammar is not None and not isinstance(request.grammar, Grammar):
        raise InputError(f"grammar must be a Grammar, was {request.grammar!r}")
    response_format = request.response_format
    format_type = "text" if response_format is None else response_format.get("type")
    if format_type == "text":
        return None, request.grammar
    if request.grammar is not None:
        raise InputError("a request has either a response_format or a grammar, not both")
    if format_type == "json_object":
        return None, Grammar(kind="json_object")
    if format_type != "json_schema" or response_format is None:
        raise InputError(
            f"response_format has type {format_type!r}: it can be text, json_object or json_schema"
        )
    schema: object = response_format.get("json_schema")
    # OpenAI's form is {"schema": ...}. It is unambiguous, because "schema" is not a JSON Schema keyword.
    if isinstance(schema, dict) and "schema" in schema:
        schema = schema["schema"]
    if not isinstance(schema, dict):
        raise InputError(f"response_format needs a json_schema, which must be an object, was {schema!r}")
    try:
        return json.dumps(schema), None
    except (TypeError, ValueError) as error:
        raise InputError(f"response_format has a json_schema that is not JSON: {error}") from None


def check_token_ids_in_params(params: SamplingParams, vocab_size: int) -> None:
    """Raise `InputError` if a parameter has ids of ``vocab_size`` or more, or if all tokens are banned."""
    for name in ("stop_token_ids", "logit_bias", "allowed_token_ids", "banned_token_ids"):
        max_id = max(getattr(params, name) or (), default=0)
        if max_id >= vocab_size:
            raise InputError(f"{name} has {max_id}: ids are integers from 0 to {vocab_size - 1}")
    max_id = max((max(ids) for ids in params.banned_sequences or ()), default=0)
    if max_id >= vocab_size:
        raise InputError(f"banned_sequences has {max_id}: ids are integers from 0 to {vocab_size - 1}")
    banned_ids = params.banned_token_ids or []
    if len(banned_ids) >= vocab_size == len(set(banned_ids)):
        raise InputError(
            f"banned_token_ids has all {vocab_size} tokens of the model: no token remains to generate"
        )


def total_length(num_prompt_tokens: int, params: SamplingParams, max_length: int | None) -> int:
    """Return the maximum length of prompt and output together.

    Args:
        num_prompt_tokens: length of the prompt.
        params: ``max_new_tokens`` and ``min_new_tokens`` of the request.
        max_length: limit of the model or of the configuration; None if there is no limit.

    Raises:
        PromptTooLongError: the prompt leaves no room for an output token, or, with ``max_new_tokens`` 0, is
            longer than ``max_length``.
        InputError: there is neither ``max_length`` nor ``max_new_tokens``; or there is a ``max_length``, and
            ``min_new_tokens`` exceeds the possible number of output tokens.
    """
    max_new_tokens = params.max_new_tokens
    if max_length is None:
        if max_new_tokens is None:
            raise InputError(
                "max_new_tokens is needed: neither checkpoint nor configuration has a maximum length"
            )
        return num_prompt_tokens + max_new_tokens
    available_tokens = max_length - num_prompt_tokens
    if available_tokens < (0 if max_new_tokens == 0 else 1):
        raise PromptTooLongError(num_prompt_tokens, max_length)
    max_output_tokens = available_tokens if max_new_tokens is None else min(max_new_tokens, available_tokens)
    if params.min_new_tokens > max_output_tokens:
        raise InputError(
            f"min_new_tokens is {params.min_new_tokens}, but only {max_output_tokens} tokens can follow "
            f"the prompt of {num_prompt_tokens} (max_new_tokens {max_new_tokens}, "
            f"maximum length {max_length})"
        )
    return num_prompt_tokens + max_output_tokens


def check_text_length(backend: Tokenizer, text: str, limit: int, *, has_output: bool) -> None:
    """Raise `PromptTooLongError` for a text that is clearly too long, without encoding all of it.

    The function encodes prefixes of the text, each twice as long as the previous prefix. It raises if a
    prefix exceeds the maximum number of tokens by more than a quarter and by more than 16. The margin is
    necessary, because the last few tokens of a prefix depend on the text after the prefix.

    Args:
        backend: the tokenizer.
        text: the text.
        limit: the maximum length, in tokens.
        has_output: whether the maximum length includes tokens that the model generates.
    """
    prefix_length = _CHARACTERS_PER_TOKEN * limit
    while prefix_length < len(text):
        prefix = valid_unicode(text[:prefix_length])
        [encoding] = backend.encode_batch_fast([prefix], add_special_tokens=False)
        if len(encoding) > limit + max(16, limit // 4):
            raise PromptTooLongError(len(encoding), limit, is_exact=False, has_output=has_output)
        prefix_length *= 2
