"""The token counts of a response, in the shape of OpenAI's ``usage``."""

from __future__ import annotations

from typing import TypedDict


class PromptTokensDetails(TypedDict):
    """Details of the prompt tokens."""

    cached_tokens: int


class CompletionTokensDetails(TypedDict):
    """Details of the generated tokens."""

    reasoning_tokens: int


class Usage(TypedDict):
    """Token counts of all choices of a response. Cached and reasoning tokens are part of the totals."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails
