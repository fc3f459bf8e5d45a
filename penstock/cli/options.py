"""Command-line flags made from the fields of the configuration classes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import click

from penstock.pipelines.config import ConfigField, PipelineConfig, config_fields
from penstock.pipelines.config.sources import collect_values
from penstock.serve.config import ServeConfig, serve_fields

Decorated = TypeVar("Decorated", bound=Callable[..., Any])

_SHORTER = {"model_path": "--model"}
"""A field's flag where that is not its name."""


def config_options(function: Decorated) -> Decorated:
    """Adds a flag for every field of `PipelineConfig`, ``--config-file`` and ``--print-config``."""
    function = click.option(
        "--config-file", metavar="FILE", help="JSON or TOML file of these settings; flags come before it."
    )(function)
    function = click.option(
        "--print-config", is_flag=True, help="Print every setting and where it came from; do nothing."
    )(function)
    return _with_options(function, config_fields())


def serve_options(function: Decorated) -> Decorated:
    """Adds a flag for every field of `ServeConfig`."""
    return _with_options(function, serve_fields())


def config_from_flags(flags: Mapping[str, Any]) -> PipelineConfig:
    """The configuration that the flags of `config_options`, the environment and the file give.

    Raises:
        ConfigError: unknown name, wrong type or impossible value.
    """
    return configs_from_flags(flags)[0]


def configs_from_flags(flags: Mapping[str, Any]) -> tuple[PipelineConfig, ServeConfig]:
    """Both configurations that flags, the environment and the file give.

    Every command reads one environment and one file, which may have what only another command uses.

    Raises:
        ConfigError: unknown name, wrong type or impossible value.
    """
    given = {name: value for name, value in flags.items() if value != ()}  # a flag that may be repeated
    values = collect_values([*config_fields(), *serve_fields()], given, "flag", os.environ)
    return PipelineConfig.from_given(values), ServeConfig.from_given(values)


def print_settings(rows: Iterable[tuple[str, Any, str]]) -> None:
    """Prints the rows of ``describe()``: name, value, and where it was given."""
    shown = [(name, _plain(value), source) for name, value, source in rows]
    widths = [max(len(row[column]) for row in shown) for column in range(2)]
    for name, value, source in shown:
        click.echo(f"{name:{widths[0]}}  {value:{widths[1]}}  {source}")


def _with_options(function: Decorated, fields: Iterable[ConfigField]) -> Decorated:
    for field in reversed(list(fields)):
        function = _option(field)(function)
    return function


def _option(field: ConfigField) -> Callable[[Decorated], Decorated]:
    # Values stay text, and absent ones None: `from_flat` converts and refuses, as for every other source.
    name = field.name.replace("_", "-")
    has_default = field.default not in (None, False, ())
    help = f"{field.help}  [default: {_shown(field.default)}]" if has_default else field.help
    if isinstance(field.default, bool):
        return click.option(f"--{name}/--no-{name}", field.name, default=None, help=help)
    flags = [_SHORTER[field.name]] if field.name in _SHORTER else []
    is_text = field.parse is not None or isinstance("", field.type)
    metavar = "|".join(field.rule.choices) or ("TEXT" if is_text else "N")
    return click.option(
        *flags, f"--{name}", field.name, metavar=metavar, help=help, multiple=field.type == tuple[str, ...]
    )


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return "on"
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _plain(value: object) -> str:
    if isinstance(value, tuple):
        return ",".join(map(str, value)) or "-"
    return "-" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
