"""How grammars are compiled, and how much they may cost."""

from __future__ import annotations

from dataclasses import dataclass
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


@dataclass(frozen=True, kw_only=True)
class StructuredOutputConfig:
    """How output is held to a schema, a regular expression or another grammar.

    Raises:
        ConfigError: a field has an impossible value.
    """

    enable: bool = setting(
        True,
        FLAG,
        "Serve requests that hold their output to a schema or another grammar.",
        flat="enable_structured_output",
    )
    compile_timeout: float = setting(
        20.0,
        Rule("a number of seconds above 0", lambda value: isfinite(value) and value > 0),
        "Seconds after which a grammar that is not compiled yet is refused.",
        flat="grammar_compile_timeout",
    )
    backend: str = setting(
        "llguidance",
        one_of("llguidance", "xgrammar"),
        "Library that compiles and matches grammars. `xgrammar` has no limits on memory and on the time of a "
        "mask: only for trusted grammars.",
        flat="grammar_backend",
    )
    max_symbols: int = setting(
        500_000,
        COUNT,
        "Most symbols that the rules of a grammar may have once they are compiled.",
        flat="max_grammar_symbols",
    )
    mask_items: int = setting(
        20_000,
        COUNT,
        "Most items that the parser may make for one mask; a request that needs more ends with an error.",
        flat="grammar_mask_items",
    )
    mask_fuel: int = setting(
        200_000,
        COUNT,
        "Most steps that the lexer may spend on one mask, about 14,000 a millisecond; a request that needs "
        "more ends with an error.",
        flat="grammar_mask_fuel",
    )
    max_states: int = setting(
        20_000,
        COUNT,
        "Most states that the lexer of a grammar may have, 1 to 2 kB each; a request that needs more ends "
        "with an error.",
        flat="max_grammar_states",
    )
    max_size: int = setting(
        1 << 20, COUNT, "Most characters that the text of a grammar may have.", flat="max_grammar_size"
    )
    cache_size: int = setting(
        256 << 20,
        NUM_BYTES,
        "Bytes for compiled grammars that are kept for later requests.",
        flat="grammar_cache_size",
    )
    whitespace: str = setting(
        "flexible",
        one_of("flexible", "compact"),
        "White space between the parts of JSON: `flexible` leaves it to the model, up to 20 characters in a "
        "row; `compact` has none, which makes more tokens certain and so is faster.",
        flat="json_whitespace",
    )

    def __post_init__(self) -> None:
        check_fields(self)
