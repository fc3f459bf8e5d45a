"""`SpeculativeConfig`: speculative decoding."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.config.settings import COUNT, FLAG, TEXT, Rule, check_fields, one_of, setting
from penstock.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class SpeculativeConfig:
    """Speculative decoding: the source and the number of draft tokens.

    Raises:
        ConfigError: a field has an invalid value, or two fields contradict each other.
    """

    speculative_method: str | None = setting(
        None,
        one_of("ngram", "draft_model"),
        "Source of draft tokens. ngram finds an earlier occurrence of the last tokens, and copies the tokens "
        "that follow it. draft_model runs draft_model_path, a small model with the same tokenizer. By "
        "default draft_model if draft_model_path is set, otherwise no speculation.",
    )
    draft_model_path: str | None = setting(
        None, TEXT, "The draft model: a checkpoint's folder, a GGUF file or an id on the Hugging Face hub."
    )
    draft_quantization_encoding: str | None = setting(
        None, TEXT, "Encoding of the draft model's weights; by default the encoding of its checkpoint."
    )
    num_speculative_tokens: int = setting(
        8,
        Rule("a whole number from 1 to 64", lambda value: 1 <= value <= 64),
        "Maximum number of draft tokens per request and step.",
    )
    adaptive_speculation: bool = setting(
        True,
        FLAG,
        "Draft fewer tokens, or none, if the measured acceptance rate and step times show that more drafts "
        "would not be faster. false drafts up to num_speculative_tokens in every step.",
    )
    ngram_min: int = setting(2, COUNT, "Minimum number of matching tokens for ngram to draft.")
    ngram_max: int = setting(4, COUNT, "Length in tokens of the longest n-gram that ngram looks up.")

    def __post_init__(self) -> None:
        check_fields(self)
        if self.ngram_max < self.ngram_min:
            raise ConfigError(
                "ngram_max", f"must be at least ngram_min ({self.ngram_min}), was {self.ngram_max}"
            )
        if self.speculative_method == "draft_model" and self.draft_model_path is None:
            raise ConfigError(
                "draft_model_path", "speculative_method draft_model needs the path of a draft model"
            )
        if self.speculative_method == "ngram" and self.draft_model_path is not None:
            raise ConfigError(
                "draft_model_path", "is given, but speculative_method ngram uses no draft model"
            )

    @property
    def method(self) -> str | None:
        """The method in effect: ``ngram``, ``draft_model``, or None for no speculation."""
        if self.speculative_method is None and self.draft_model_path is not None:
            return "draft_model"
        return self.speculative_method

    @property
    def max_drafts(self) -> int:
        """Maximum number of draft tokens of a request in one step; 0 without speculation."""
        return self.num_speculative_tokens if self.method else 0
