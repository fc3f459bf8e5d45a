"""Builds fill-in-the-middle (FIM) prompts from the special tokens of the model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.serve.http.problems import RequestProblem
from penstock.text.tokenizer import TextTokenizer


@dataclass(frozen=True)
class FillInMiddleTokens:
    """The fill-in-the-middle tokens of one model family, and their order in a prompt."""

    prefix: str
    suffix: str
    middle: str
    is_suffix_first: bool = False
    """Whether the suffix precedes the prefix in a prompt. Such a prompt has no middle token."""


FIM_FAMILIES = (
    FillInMiddleTokens("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen, CodeGemma
    FillInMiddleTokens("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite
    FillInMiddleTokens("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    FillInMiddleTokens("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # noqa: RUF001  # DeepSeek
    FillInMiddleTokens("▁<PRE>", "▁<SUF>", "▁<MID>"),  # Code Llama
    FillInMiddleTokens("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),  # GLM
    FillInMiddleTokens("[PREFIX]", "[SUFFIX]", "[MIDDLE]", is_suffix_first=True),  # Codestral
)
"""The known model families. `fill_in_prompt` uses the first family whose tokens the tokenizer has."""
FIM_END_TOKENS = (
    "<|endoftext|>",
    "<|file_sep|>",
    "<|fim_pad|>",
    "<|repo_name|>",
    "<|cursor|>",
    "<EOT>",
    "▁<EOT>",
)
"""Tokens that end the generated middle, besides the end-of-sequence tokens of the model."""


def fill_in_prompt(tokenizer: TextTokenizer, prefix: str, suffix: str, param: str) -> list[int]:
    """Return the token ids of a prompt for the text between `prefix` and `suffix`.

    Args:
        tokenizer: the tokenizer of the model.
        prefix: the text before the generated text.
        suffix: the text after the generated text.
        param: the request field that the error names.

    Raises:
        RequestProblem: 400; the tokenizer has no known fill-in-the-middle tokens.
    """
    token_to_id = tokenizer.backend.token_to_id
    for family in FIM_FAMILIES:
        ids = [token_to_id(token) for token in (family.prefix, family.suffix, family.middle)]
        if None not in ids:
            break
    else:
        raise RequestProblem(
            400,
            f"{param} is not supported: the tokenizer of this model has no fill-in-the-middle tokens",
            param=param,
            code="unsupported_parameter",
        )

    def encode(text: str) -> list[int]:
        return tokenizer.encode_text(text, False, limited=False).tolist() if text else []

    prefix_token, suffix_token, middle_token = (token for token in ids if token is not None)
    prefix_ids: Sequence[int] = [prefix_token, *encode(prefix)]
    suffix_ids: Sequence[int] = [suffix_token, *encode(suffix)]
    if family.is_suffix_first:
        return [*_leading_special_ids(tokenizer), *suffix_ids, *prefix_ids]
    return [*_leading_special_ids(tokenizer), *prefix_ids, *suffix_ids, middle_token]


def fill_in_end_ids(tokenizer: TextTokenizer) -> list[int]:
    """Return the ids of the tokens that end the generated middle."""
    token_ids = (tokenizer.backend.token_to_id(text) for text in FIM_END_TOKENS)
    return [token_id for token_id in token_ids if token_id is not None]


def _leading_special_ids(tokenizer: TextTokenizer) -> list[int]:
    """Return the ids of the special tokens that the tokenizer adds before a text, such as BOS."""
    ids_with_special, ids_without_special = (
        tokenizer.encode_text("x", special, limited=False).tolist() for special in (True, False)
    )
    return (
        ids_with_special[: ids_with_special.index(ids_without_special[0])]
        if ids_without_special and ids_without_special[0] in ids_with_special
        else []
    )
