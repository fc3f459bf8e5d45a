"""`StructuredOutputConfig`: the grammar compiler and its limits."""

from __future__ import annotations

from dataclasses import dataclass, fields
from math import isfinite

from penstock.config.settings import (
    COUNT,
    FLAG,
    NUM_BYTES,
    Rule,
    check_fields,
    one_of,
    setting,
)
from penstock.errors import ConfigError

_LLGUIDANCE_LIMITS = ("max_symbols", "mask_items", "mask_fuel", "max_states")


@dataclass(frozen=True, kw_only=True)
class StructuredOutputConfig:
    """Structured output: output that follows a schema, a regular expression or another grammar.

    Raises:
        ConfigError: a field has an invalid value, or a limit of llguidance is set for xgrammar.
    """

    enable: bool = setting(
        True,
        FLAG,
        "Accept requests whose output must follow a schema or another grammar.",
        flat_name="enable_structured_output",
    )
    compile_timeout: float = setting(
        20.0,
        Rule("a number of seconds above 0", lambda value: isfinite(value) and value > 0),
        "Time limit for compiling a grammar, in seconds; a grammar that takes longer is refused.",
        flat_name="grammar_compile_timeout",
    )
    backend: str = setting(
        "llguidance",
        one_of("llguidance", "xgrammar"),
        "Library that compiles and matches grammars. `xgrammar` does not limit memory and time per mask: use "
        "it for trusted grammars only.",
        flat_name="grammar_backend",
    )
    max_symbols: int = setting(
        500_000,
        COUNT,
        "Maximum number of symbols in the compiled rules of a grammar, with llguidance.",
        flat_name="max_grammar_symbols",
    )
    mask_items: int = setting(
        20_000,
        COUNT,
        "Maximum number of parser items per mask; a request that needs more ends with an error.",
        flat_name="grammar_mask_items",
    )
    mask_fuel: int = setting(
        200_000,
        COUNT,
        "Maximum number of lexer steps per mask, about 14,000 per millisecond; a request that needs more "
        "ends with an error.",
        flat_name="grammar_mask_fuel",
    )
    max_states: int = setting(
        20_000,
        COUNT,
        "Maximum number of lexer states of a grammar, 1 to 2 kB each; a request that needs more ends with an "
        "error.",
        flat_name="max_grammar_states",
    )
    max_size: int = setting(
        1 << 20, COUNT, "Maximum length of a grammar's text, in characters.", flat_name="max_grammar_size"
    )
    cache_size: int = setting(
        256 << 20,
        NUM_BYTES,
        "Size of the cache of compiled grammars, in bytes.",
        flat_name="grammar_cache_size",
    )
    whitespace: str = setting(
        "flexible",
        one_of("flexible", "compact"),
        "White space in JSON output. `flexible` allows up to 20 white-space characters in a row. `compact` "
        "allows none and is faster, because the grammar determines more tokens.",
        flat_name="json_whitespace",
    )

    def __post_init__(self) -> None:
        check_fields(self)
        if self.backend != "llguidance":
            for field in fields(self):
                if field.name in _LLGUIDANCE_LIMITS and getattr(self, field.name) != field.default:
                    raise ConfigError(
                        field.metadata["flat_name"],
                        f"grammar_backend {self.backend} has no such limit: omit it, or use llguidance",
                    )
