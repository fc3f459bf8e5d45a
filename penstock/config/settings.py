"""What a field of a configuration knows of itself: its flat name, what is legal, and the help text.

Flags, files, environment variables and documents are all made from these.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from math import isfinite
from typing import Any, get_type_hints

import msgspec

from penstock.errors import ConfigError
from penstock.plain_numbers import plain


@dataclass(frozen=True, slots=True)
class Rule:
    """Which values a field may have: in words, as a test, and the few there are where they can be listed."""

    legal: str
    holds: Callable[[Any], bool]
    choices: tuple[str, ...] = ()
    read: Callable[[str], Any] | None = None
    """Turns a text that stands for a value into the value, and leaves any other text as it is."""


@dataclass(frozen=True, slots=True)
class ConfigField:
    """One setting, under its flat name."""

    name: str
    section: str  # the PipelineConfig attribute that holds it: model, kv_cache, sampling, or "" for its own
    attribute: str
    type: Any
    default: Any
    help: str
    rule: Rule
    parse: Callable[[str], Any] | None
    secret: bool = False

    def convert(self, value: Any, *, from_text: bool = False, source: str = "") -> Any:
        """The value as the field holds it, of a legal one.

        Args:
            value: as it was given.
            from_text: whether a string may stand for a number or a truth value, as in a flag.
            source: the file or variable that gave it, for the message; empty where it was given by hand.

        Raises:
            ConfigError: wrong type or an impossible value.
        """
        if self.rule.read is not None and isinstance(value, str):
            value = self.rule.read(value)
        try:
            value = plain(value)
            if self.parse is not None:
                converted = self.parse(value) if isinstance(value, str) else value
                converted = tuple(converted) if isinstance(converted, list) else converted  # a file's
            else:
                strict = not (from_text and isinstance(value, str))
                converted = msgspec.convert(value, self.type, strict=strict)
        except msgspec.ValidationError:
            raise self._refusal(value, source) from None
        if converted is not None and not self.rule.holds(converted):
            raise self._refusal(value, source)
        return converted

    def _refusal(self, value: Any, source: str) -> ConfigError:
        where = f" (from {source})" if source else ""
        what = "what was given is not" if self.secret else f"was {value!r}"
        return ConfigError(self.name, f"must be {self.rule.legal}, {what}{where}")


def setting(
    default: Any,
    rule: Rule,
    help: str,
    *,
    flat: str | None = None,
    parse: Callable[[str], Any] | None = None,
    secret: bool = False,
) -> Any:
    """Declares a field of a configuration class.

    Args:
        default: the value where none is given.
        rule: which values are legal, None aside where the type allows it.
        help: a sentence or two for flags and documents.
        flat: the name outside the class, where the attribute's own would be ambiguous.
        parse: turns text into the value, where the type alone does not say how.
        secret: no message and no list of settings shows the value.
    """
    metadata = {"rule": rule, "help": help, "flat": flat, "parse": parse, "secret": secret}
    return dataclasses.field(default=default, metadata=metadata)


def fields_of(cls: type, section: str = "") -> tuple[ConfigField, ...]:
    """The settings that a configuration class declares, in its order."""
    types = get_type_hints(cls)
    return tuple(
        ConfigField(
            name=field.metadata["flat"] or field.name,
            section=section,
            attribute=field.name,
            type=types[field.name],
            default=field.default,
            help=field.metadata["help"],
            rule=field.metadata["rule"],
            parse=field.metadata["parse"],
            secret=field.metadata["secret"],
        )
        for field in dataclasses.fields(cls)
        if "rule" in field.metadata
    )


def check_fields(config: object) -> None:
    """Refuses a configuration object with a field of the wrong type or an impossible value, and replaces
    values of similar types, such as numpy's scalars, by those of the fields' own.

    Raises:
        ConfigError: names the field.
    """
    for field in fields_of(type(config)):
        value = getattr(config, field.attribute)
        converted = field.convert(value)
        if converted is not value:
            object.__setattr__(config, field.attribute, converted)


FLAG = Rule("true or false", lambda value: True)
TEXT = Rule("text that is not empty", lambda value: bool(value.strip()))
COUNT = Rule("a whole number of at least 1", lambda value: value >= 1)
THREADS = Rule("a whole number from 1 to 1024", lambda value: 1 <= value <= 1024)

_SIZE = re.compile(r"(\d+(?:\.\d+)?) ?([kmgt]i?b)", re.IGNORECASE)


def read_size(text: str) -> int | str:
    """Return the bytes that a size such as ``4GiB`` or ``500MB`` stands for, or any other text as it is."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        return text
    number, unit = match.group(1), match.group(2).lower()
    return int(Decimal(number) * (1024 if "i" in unit else 1000) ** ("kmgt".index(unit[0]) + 1))


NUM_BYTES = Rule(
    "a number of bytes, at least 1, or a size such as 4GiB or 500MB", lambda value: value >= 1, read=read_size
)
FRACTION = Rule("a number above 0 and at most 1", lambda value: isfinite(value) and 0 < value <= 1)


def one_of(*choices: str) -> Rule:
    """One of a few words."""
    return Rule(f"one of {', '.join(choices)}", lambda value: value in choices, choices)
