"""Prompts for filling in the middle of a text, with the special tokens of the model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.serve.http.problems import RequestProblem
from penstock.text.tokenizer import TextTokenizer


@dataclass(frozen=True)
class FillInMiddleTokens:
    """The fill-in-the-middle tokens of one model family, and their order in training data."""

    prefix: str
    suffix: str
    middle: str
    suffix_first: bool = False


FAMILIES = (
    FillInMiddleTokens("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen, CodeGemma
    FillInMiddleTokens("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite
    FillInMiddleTokens("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    FillInMiddleTokens("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # noqa: RUF001  # DeepSeek
    FillInMiddleTokens("▁<PRE>", "▁<SUF>", "▁<MID>"),  # Code Llama
    FillInMiddleTokens("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),  # GLM
    FillInMiddleTokens("[PREFIX]", "[SUFFIX]", "[MIDDLE]", suffix_first=True),  # Codestral
)
"""The model families. `fill_in_prompt` uses the first family whose tokens are in the tokenizer."""
ENDS = ("<|endoftext|>", "<|file_sep|>", "<|fim_pad|>", "<|repo_name|>", "<|cursor|>", "<EOT>", "▁<EOT>")
"""Tokens that end the generated middle, besides the end-of-sequence tokens of the model."""


def fill_in_prompt(tokenizer: TextTokenizer, prefix: str, suffix: str, param: str) -> list[int]:
    """Return the tokens of a prompt that makes the model generate the text between `prefix` and `suffix`.

    Args:
        tokenizer: the tokenizer of the model.
        prefix: the text before.
        suffix: the text after.
        param: the field of the request, for the error.

    Raises:
        RequestProblem: 400; the tokenizer has no such tokens.
    """
    find = tokenizer.backend.token_to_id
    for family in FAMILIES:
        ids = [find(text) for text in (family.prefix, family.suffix, family.middle)]
        if None not in ids:
            break
    else:
        raise RequestProblem(
            400,
            f"{param} is not supported: the tokenizer of this model has no tokens to fill in the middle",
            param=param,
            code="unsupported_parameter",
        )

    def encode(text: str) -> list[int]:
        return tokenizer.encode_text(text, False, limited=False).tolist() if text else []

    prefix_token, suffix_token, middle_token = (token for token in ids if token is not None)
    parts: Sequence[list[int]] = ([prefix_token, *encode(prefix)], [suffix_token, *encode(suffix)])
    if family.suffix_first:  # Codestral continues directly after the prefix
        return [*_begin(tokenizer), *parts[1], *parts[0]]
    return [*_begin(tokenizer), *parts[0], *parts[1], middle_token]


def fill_in_ends(tokenizer: TextTokenizer) -> list[int]:
    """Return the ids of the tokens that end the generated middle."""
    token_ids = (tokenizer.backend.token_to_id(text) for text in ENDS)
    return [token_id for token_id in token_ids if token_id is not None]


def _begin(tokenizer: TextTokenizer) -> list[int]:
    """Return the special tokens that the tokenizer adds before a text, such as BOS."""
    with_special, without_special = (
        tokenizer.encode_text("x", special, limited=False).tolist() for special in (True, False)
    )
    return (
        with_special[: with_special.index(without_special[0])]
        if without_special and without_special[0] in with_special
        else []
    )
