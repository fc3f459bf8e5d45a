"""Collects the values of settings from arguments or flags, environment variables and a file."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import cast

from penstock.config.settings import ConfigField
from penstock.errors import CheckpointError, ConfigError
from penstock.weights.json_files import read_json_object

CONFIG_FILE = "config_file"
ENVIRONMENT_PREFIX = "PENSTOCK_"


def collect_values(
    fields: Sequence[ConfigField],
    values: Mapping[str, object],
    source: str,
    environment: Mapping[str, str],
) -> dict[str, tuple[object, str]]:
    """Return flat name -> (converted value, source) of all fields that are given.

    ``values`` override environment variables, which override the values of the configuration file.

    Raises:
        ConfigError: unknown name, wrong type, invalid value, a file that cannot be read, or a field and its
            alias in one source.
    """
    fields_by_name = {name: field for field in fields for name in (field.name, *field.aliases)}
    values = {name: value for name, value in values.items() if value is not None}
    variables = _environment_values(environment, [*fields_by_name, CONFIG_FILE])
    config_file = values.pop(CONFIG_FILE, variables.pop(CONFIG_FILE, None))
    given_values: dict[str, tuple[object, str]] = {}
    if config_file is not None:
        error_source = f"file {config_file}"
        _add_values(
            given_values,
            fields_by_name,
            _read_config_file(cast(str, config_file)),
            error_source,
            error_source,
        )
    given_names: dict[str, str] = {}  # flat name -> name or alias in the environment
    for name, text in variables.items():
        error_source = f"environment {ENVIRONMENT_PREFIX}{name.upper()}"
        if given_names.setdefault(fields_by_name[name].name, name) != name:
            raise ConfigError(
                name,
                f"is another name of {given_names[fields_by_name[name].name]} (from {error_source}): "
                "give one of them",
            )
        _add_values(given_values, fields_by_name, {name: text}, error_source, error_source, from_text=True)
    # Errors about arguments do not name a source, because the caller has just passed the arguments.
    _add_values(given_values, fields_by_name, values, source, "", from_text=source == "flag")
    return given_values


def _add_values(
    given_values: dict[str, tuple[object, str]],
    fields_by_name: Mapping[str, ConfigField],
    values: Mapping[str, object],
    source: str,
    error_source: str,
    *,
    from_text: bool = False,
) -> None:
    """Convert the values of one source and add them to ``given_values``.

    The values replace those of earlier sources. Values of None are ignored.

    Args:
        given_values: flat name -> (converted value, source).
        fields_by_name: name or alias -> field.
        values: name or alias -> value as given.
        source: the source of the values.
        error_source: the source for error messages; empty for arguments.
        from_text: whether strings are converted to the types of the fields.
    """
    given_names: dict[str, str] = {}  # flat name -> name or alias in ``values``
    for name, value in values.items():
        if name not in fields_by_name:
            raise _unknown_field_error(name, [*fields_by_name, CONFIG_FILE], error_source)
        if value is None:
            continue
        field = fields_by_name[name]
        if given_names.setdefault(field.name, name) != name:
            origin = f" (from {error_source})" if error_source else ""
            raise ConfigError(name, f"is another name of {given_names[field.name]}{origin}: give one of them")
        plain_value = os.fspath(value) if isinstance(value, os.PathLike) else value
        given_values[field.name] = (
            field.convert(plain_value, from_text=from_text, source=error_source),
            source,
        )


def _unknown_field_error(name: str, field_names: Iterable[str], error_source: str) -> ConfigError:
    nearest = get_close_matches(name, field_names, n=1, cutoff=0.5)
    hint = f"did you mean {nearest[0]}?" if nearest else f"the fields are {', '.join(field_names)}"
    origin = f" (from {error_source})" if error_source else ""
    return ConfigError(name, f"is not a configuration field{origin}: {hint}")


def _environment_values(environment: Mapping[str, str], names: Sequence[str]) -> dict[str, str]:
    """Return field name or alias in lower case -> text, for the environment variables that set fields.

    Other variables with the prefix are ignored, because another program may use them. Empty variables are
    ignored, too.

    Raises:
        ConfigError: the name of a variable is similar to the name of a field, so it is probably misspelt.
    """
    texts_by_name = {}
    for variable, text in environment.items():
        name = variable.removeprefix(ENVIRONMENT_PREFIX).lower()
        if not variable.startswith(ENVIRONMENT_PREFIX) or not text.strip():
            continue
        if name in names:
            texts_by_name[name] = text
        elif get_close_matches(name, names, n=1, cutoff=0.65):
            raise _unknown_field_error(name, names, f"environment {variable}")
    return texts_by_name


def _read_config_file(file: str | os.PathLike[str]) -> dict[str, object]:
    try:
        path = Path(file).expanduser()
    except TypeError:
        raise ConfigError(CONFIG_FILE, f"must be a path, was {file!r}") from None
    try:
        if path.suffix == ".json":
            return read_json_object(path)
        if path.suffix == ".toml":
            return tomllib.loads(path.read_text(encoding="utf-8"))
    except CheckpointError as problem:
        raise ConfigError(CONFIG_FILE, str(problem)) from problem
    except OSError as problem:
        raise ConfigError(CONFIG_FILE, f"{path}: cannot be read: {problem.strerror}") from problem
    except (ValueError, RecursionError) as problem:  # malformed TOML, or bytes that are not UTF-8
        raise ConfigError(CONFIG_FILE, f"{path}: is not valid TOML: {problem}") from problem
    raise ConfigError(CONFIG_FILE, f"{path}: must end in .json or .toml")
