"""The token counts of a response in the format of OpenAI's ``usage``."""

from __future__ import annotations

from typing import TypedDict


class PromptTokensDetails(TypedDict):
    """The number of prompt tokens that were in the prefix cache."""

    cached_tokens: int


class CompletionTokensDetails(TypedDict):
    """The number of generated tokens that belong to the reasoning."""

    reasoning_tokens: int


class Usage(TypedDict):
    """Token counts of a response: each prompt counts once, and the outputs of all choices count.

    The counts include cached tokens and reasoning tokens.
    """

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails
