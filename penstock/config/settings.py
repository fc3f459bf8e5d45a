"""Declarations of configuration fields: flat name, allowed values, default and help text.

Command-line flags, configuration files, environment variables and documentation are derived from these
declarations.
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
    """The allowed values of a field.

    ``allowed_values`` describes the allowed values for messages, and ``is_allowed`` checks a value.
    ``choices`` lists the allowed texts if the rule is a fixed list of texts, else it is empty.
    """

    allowed_values: str
    is_allowed: Callable[[Any], bool]
    choices: tuple[str, ...] = ()
    convert_text: Callable[[str], object] | None = None
    """Replaces a text before the conversion to the field's type and the check; None for no replacement."""


@dataclass(frozen=True, slots=True)
class ConfigField:
    """One configuration field under its flat name."""

    name: str
    section: str  # the section of PipelineConfig: model, kv_cache, ...; "" for its direct fields
    attribute: str
    type: Any
    default: object
    help: str
    rule: Rule
    parse: Callable[[str], object] | None  # converts text, for types without a standard conversion
    secret: bool = False  # whether the value is hidden in messages and in lists of settings
    aliases: tuple[str, ...] = ()
    """Other names of the field, in flags, keyword arguments, files and the environment."""

    def convert(self, value: object, *, from_text: bool = False, source: str = "") -> object:
        """Convert a value to the field's type and check it.

        Args:
            value: the value as given.
            from_text: whether a string is converted to a number or a boolean, as for flags.
            source: the file or variable that gave the value, for error messages; empty for an argument.

        Raises:
            ConfigError: the value has a wrong type or is invalid.
        """
        if self.rule.convert_text is not None and isinstance(value, str):
            value = self.rule.convert_text(value)
        try:
            value = plain(value)
            if self.parse is not None:
                converted = self.parse(value) if isinstance(value, str) else value
                # Files have lists, while the values of settings are tuples.
                converted = tuple(converted) if isinstance(converted, list) else converted
            else:
                strict = not (from_text and isinstance(value, str))
                converted = msgspec.convert(value, self.type, strict=strict)
        except msgspec.ValidationError:
            raise self._error(value, source) from None
        if converted is not None and not self.rule.is_allowed(converted):
            raise self._error(value, source)
        return converted

    def _error(self, value: object, source: str) -> ConfigError:
        source_text = f" (from {source})" if source else ""
        given_text = "the given value is not" if self.secret else f"was {value!r}"
        return ConfigError(self.name, f"must be {self.rule.allowed_values}, {given_text}{source_text}")


def setting(
    default: object,
    rule: Rule,
    help: str,
    *,
    flat_name: str | None = None,
    parse: Callable[[str], object] | None = None,
    secret: bool = False,
    aliases: tuple[str, ...] = (),
) -> Any:
    """Declare a field of a configuration class.

    Args:
        default: the default value.
        rule: the allowed values. None is also allowed if the type includes it.
        help: a short text for flags and documentation.
        flat_name: the flat name; by default the name of the attribute.
        parse: converts text to the value, for types without a standard conversion from text.
        secret: whether the value is hidden in messages and in lists of settings.
        aliases: other flat names.
    """
    metadata = {"rule": rule, "help": help, "flat_name": flat_name, "parse": parse, "secret": secret}
    metadata["aliases"] = aliases
    return dataclasses.field(default=default, metadata=metadata)


def fields_of(cls: type, section: str = "") -> tuple[ConfigField, ...]:
    """Return the settings that a configuration class declares, in order of declaration."""
    types = get_type_hints(cls)
    return tuple(
        ConfigField(
            name=field.metadata["flat_name"] or field.name,
            section=section,
            attribute=field.name,
            type=types[field.name],
            default=field.default,
            help=field.metadata["help"],
            rule=field.metadata["rule"],
            parse=field.metadata["parse"],
            secret=field.metadata["secret"],
            aliases=field.metadata["aliases"],
        )
        for field in dataclasses.fields(cls)
        if "rule" in field.metadata
    )


def check_fields(config: object) -> None:
    """Check all fields of a configuration object.

    Values of other accepted types, such as numpy scalars and lists, are converted to the types of the fields.

    Raises:
        ConfigError: a field has a wrong type or an invalid value; the message names the field.
    """
    for field in fields_of(type(config)):
        value = getattr(config, field.attribute)
        converted = field.convert(value)
        if converted is not value:
            object.__setattr__(config, field.attribute, converted)


FLAG = Rule("true or false", lambda value: True)
TEXT = Rule("text that is not empty", lambda value: bool(value.strip()))
COUNT = Rule("a whole number of at least 1", lambda value: value >= 1)
WORKERS = Rule("a whole number from 1 to 256", lambda value: 1 <= value <= 256)
THREADS = Rule("a whole number from 1 to 1024", lambda value: 1 <= value <= 1024)

_SIZE = re.compile(r"(\d+(?:\.\d+)?) ?([kmgt]i?b)", re.IGNORECASE)


def read_size(text: str) -> int | str:
    """Return the number of bytes of a size such as ``4GiB`` or ``500MB``; return other text unchanged."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        return text
    number, unit = match.group(1), match.group(2).lower()
    return int(Decimal(number) * (1024 if "i" in unit else 1000) ** ("kmgt".index(unit[0]) + 1))


NUM_BYTES = Rule(
    "a number of bytes, at least 1, or a size such as 4GiB or 500MB",
    lambda value: value >= 1,
    convert_text=read_size,
)
FRACTION = Rule("a number above 0 and at most 1", lambda value: isfinite(value) and 0 < value <= 1)


def one_of(*choices: str) -> Rule:
    """Return the rule that a value is one of ``choices``."""
    return Rule(f"one of {', '.join(choices)}", lambda value: value in choices, choices)
