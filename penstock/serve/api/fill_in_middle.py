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
"""The model families. The first whose tokens the tokenizer has is used."""
ENDS = ("<|endoftext|>", "<|file_sep|>", "<|fim_pad|>", "<|repo_name|>", "<|cursor|>", "<EOT>", "▁<EOT>")
"""Tokens that end the generated middle, besides the end-of-sequence tokens of the model."""


def fill_in_prompt(tokenizer: TextTokenizer, prefix: str, suffix: str, param: str) -> list[int]:
    """Return the tokens of a prompt whose continuation belongs between two texts.

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

    def plain(text: str) -> list[int]:
        return tokenizer.encode_text(text, False, limited=False).tolist() if text else []

    before, after, middle = (token for token in ids if token is not None)
    parts: Sequence[list[int]] = ([before, *plain(prefix)], [after, *plain(suffix)])
    if family.suffix_first:  # Codestral continues directly after the prefix
        return [*_begin(tokenizer), *parts[1], *parts[0]]
    return [*_begin(tokenizer), *parts[0], *parts[1], middle]


def fill_in_ends(tokenizer: TextTokenizer) -> list[int]:
    """Return the ids of the tokens that end the generated middle."""
    found = (tokenizer.backend.token_to_id(text) for text in ENDS)
    return [one for one in found if one is not None]


def _begin(tokenizer: TextTokenizer) -> list[int]:
    """Return the tokens that the tokenizer adds before a text."""
    whole, plain = (tokenizer.encode_text("x", special, limited=False).tolist() for special in (True, False))
    return whole[: whole.index(plain[0])] if plain and plain[0] in whole else []
