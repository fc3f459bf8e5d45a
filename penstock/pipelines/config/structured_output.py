"""How grammars are compiled, and how much they may cost."""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite

from penstock.pipelines.config.settings import (
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
