"""Command-line flags made from the fields of the configuration classes."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import click

from penstock.pipelines.config import ConfigField, PipelineConfig, config_fields

Decorated = TypeVar("Decorated", bound=Callable[..., Any])

_SHORTER = {"model_path": "--model"}
"""A field's flag where that is not its name."""


def config_options(function: Decorated) -> Decorated:
    """Adds a flag for every field of `PipelineConfig`, and ``--config-file``."""
    file = click.option(
        "--config-file", metavar="FILE", help="JSON or TOML file of these settings; flags come before it."
    )
    function = file(function)
    for field in reversed(config_fields()):
        function = _option(field)(function)
    return function


def config_from_flags(flags: Mapping[str, Any]) -> PipelineConfig:
    """The configuration that the flags of `config_options` and the environment give.

    Raises:
        ConfigError: unknown name, wrong type or impossible value.
    """
    return PipelineConfig.from_flat(flags, "flag", environment=os.environ)


def _option(field: ConfigField) -> Callable[[Decorated], Decorated]:
    # Values stay text, and absent ones None: `from_flat` converts and refuses, as for every other source.
    name = field.name.replace("_", "-")
    help = (
        field.help if field.default in (None, False) else f"{field.help}  [default: {_shown(field.default)}]"
    )
    if isinstance(field.default, bool):
        return click.option(f"--{name}/--no-{name}", field.name, default=None, help=help)
    flags = [_SHORTER[field.name]] if field.name in _SHORTER else []
    is_text = field.parse is not None or isinstance("", field.type)
    metavar = "|".join(field.rule.choices) or ("TEXT" if is_text else "N")
    return click.option(*flags, f"--{name}", field.name, metavar=metavar, help=help)


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return "on"
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
