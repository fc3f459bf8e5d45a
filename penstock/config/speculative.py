"""How tokens are drafted."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.config.settings import COUNT, FLAG, TEXT, Rule, check_fields, one_of, setting
from penstock.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class SpeculativeConfig:
    """How tokens are drafted, for the model to verify several in one forward.

    Raises:
        ConfigError: a field has an impossible value, or two do not go together.
    """

    speculative_method: str | None = setting(
        None,
        one_of("ngram", "draft_model"),
        "Who drafts tokens: ngram, what followed the last time the text read like this; draft_model, a small "
        "model with the same tokenizer, which draft_model_path names. By default draft_model where that is "
        "given, else nobody.",
    )
    draft_model_path: str | None = setting(
        None, TEXT, "The draft model: a checkpoint's folder or a model's id on the Hugging Face hub."
    )
    draft_quantization_encoding: str | None = setting(
        None, TEXT, "How the draft model's weights are stored; by default as in its checkpoint."
    )
    num_speculative_tokens: int = setting(
        8, Rule("a whole number from 1 to 64", lambda value: 1 <= value <= 64), "Most tokens drafted at once."
    )
    adaptive_speculation: bool = setting(
        True,
        FLAG,
        "Draft fewer tokens, or none, where measured acceptance and time say that more do not pay; "
        "otherwise always num_speculative_tokens. Texts are the same either way.",
    )
    ngram_min: int = setting(2, COUNT, "Tokens that must match at least for ngram to draft.")
    ngram_max: int = setting(4, COUNT, "Longest run of tokens that ngram looks up at once.")

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
        """Who drafts: ``ngram``, ``draft_model``, or None."""
        if self.speculative_method is None and self.draft_model_path is not None:
            return "draft_model"
        return self.speculative_method

    @property
    def max_drafts(self) -> int:
        """The most drafts of a context in one step; 0 where nobody drafts."""
        return self.num_speculative_tokens if self.method else 0
