"""Command-line flags made from the fields of the configuration classes."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

import click

from penstock.cli.formatting import GroupedOption
from penstock.config import ConfigField, PipelineConfig, config_fields
from penstock.config.sources import CONFIG_FILE, collect_values
from penstock.ray.config import RayConfig, ray_fields
from penstock.serve.config import ServeConfig, serve_fields

Decorated = TypeVar("Decorated", bound=Callable[..., object])

_SHORT_FLAGS = {"model_path": "--model"}
"""`ConfigField.name` of a setting -> an additional, shorter flag."""

_GROUPS = {
    "model": "Model",
    "kv_cache": "KV cache",
    "sampling": "Sampling",
    "lora": "LoRA adapters",
    "speculative": "Speculation",
    "structured_output": "Structured output",
    "vision": "Images",
    "speech": "Speech",
    "parallel": "Several processes",
    "": "Execution",
}
"""Section of `PipelineConfig` -> the heading of its flags in ``--help``."""

_LIMIT_NAMES = re.compile(r"max_.*|.*_(timeout|limit|ping|grace|alive)")
_SERVE_GROUPS = {
    "Server": ("host", "port", "playground"),
    "Access": ("api_key", "cors_origins", "allowed_hosts"),
    "Tool servers": (
        "mcp_server",
        "mcp_token",
        "mcp_timeout",
        "mcp_max_turns",
        "mcp_require_approval",
    ),
    "Log and traces": ("access_log", "log_format", "log_level", "otlp_endpoint"),
}
"""Heading -> flags of `ServeConfig` under it; `_serve_group` returns the headings of other flags."""


def config_options(function: Decorated) -> Decorated:
    """Add the options of the configuration to a command for one model."""
    return _config_options(function)


def several_models_options(function: Decorated) -> Decorated:
    """Add the options of the configuration to a command for several models: ``--model`` may be repeated."""
    return _config_options(function, repeated=("model_path",))


def _config_options(function: Decorated, repeated: tuple[str, ...] = ()) -> Decorated:
    """Add MODEL, ``--config-file``, ``--print-config`` and a flag for each field of `PipelineConfig`."""
    function = click.argument("model", required=False, metavar="[MODEL]")(function)
    function = click.option(
        "--config-file", metavar="FILE", help="JSON or TOML file of these settings; flags override it."
    )(function)
    function = click.option(
        "--print-config", is_flag=True, help="Print every setting and its source, then exit."
    )(function)
    return _with_options(function, config_fields(), lambda field: _GROUPS[field.section], repeated)


def serve_options(function: Decorated) -> Decorated:
    """Add a flag for each field of `ServeConfig`."""
    return _with_options(function, serve_fields(), _serve_group)


def ray_options(function: Decorated) -> Decorated:
    """Add a flag for each field of `RayConfig`."""
    return _with_options(function, ray_fields(), lambda field: "Ray")


def take_ray_config(flags: dict[str, object]) -> RayConfig:
    """Remove the flags of `ray_options` from all flags.

    Returns the configuration from these flags, the environment and the file.

    Raises:
        ConfigError: unknown name, wrong type or invalid value.
    """
    ray_flags = {field.name: flags.pop(field.name) for field in ray_fields()}
    return RayConfig.from_given(_collect_settings({**ray_flags, CONFIG_FILE: flags.get(CONFIG_FILE)}))


def config_from_flags(flags: Mapping[str, object], *, default_model: str | None = None) -> PipelineConfig:
    """Return the configuration from the flags of `config_options`, the environment and the file.

    Args:
        flags: the values of the flags.
        default_model: the model of the command if none of the three sources sets one.

    Raises:
        ConfigError: unknown name, wrong type or invalid value.
        click.UsageError: MODEL and --model name different models.
    """
    return configs_from_flags(flags, default_model=default_model)[0]


def configs_from_flags(
    flags: Mapping[str, object], *, default_model: str | None = None
) -> tuple[PipelineConfig, ServeConfig]:
    """Return both configurations from flags, the environment and the file.

    All commands read the same environment and file, which may also contain settings of other commands.

    Args:
        flags: the values of the flags.
        default_model: the model of the command if none of the three sources sets one.

    Raises:
        ConfigError: unknown name, wrong type or invalid value.
        click.UsageError: MODEL and --model name different models.
    """
    values = _collect_settings(_with_model(flags))
    if default_model is not None:
        values.setdefault("model_path", (default_model, "default"))
    return PipelineConfig.from_given(values), ServeConfig.from_given(values)


def _collect_settings(flags: Mapping[str, object]) -> dict[str, tuple[object, str]]:
    """Return the settings of all commands from flags, the environment and the file."""
    # click returns () for a repeatable flag that is not given.
    given_flags = {name: value for name, value in flags.items() if value != ()}
    return collect_values([*config_fields(), *serve_fields(), *ray_fields()], given_flags, "flag", os.environ)


def print_settings(rows: Iterable[tuple[str, object, str]]) -> None:
    """Print the rows that ``describe()`` of a configuration returns: name, value and source."""
    formatted_rows = [(name, _format_value(value), source) for name, value, source in rows]
    widths = [max(len(row[column]) for row in formatted_rows) for column in range(2)]
    for name, value, source in formatted_rows:
        click.echo(f"{name:{widths[0]}}  {value:{widths[1]}}  {source}")


def _with_model(flags: Mapping[str, object]) -> dict[str, object]:
    """Return the flags with the argument MODEL as the flag --model."""
    given_flags = dict(flags)
    model, flag = given_flags.pop("model", None), given_flags.get("model_path")
    if model is None:
        return given_flags
    if flag is not None and flag != model:
        raise click.UsageError(f"the model is given twice, as {model!r} and as --model {flag!r}: give one")
    return given_flags | {"model_path": model}


def _serve_group(field: ConfigField) -> str:
    for group, names in _SERVE_GROUPS.items():
        if field.name in names:
            return group
    return "Limits and time-outs" if _LIMIT_NAMES.fullmatch(field.name) else "Requests and answers"


def _with_options(
    function: Decorated,
    fields: Iterable[ConfigField],
    group: Callable[[ConfigField], str],
    repeated: tuple[str, ...] = (),
) -> Decorated:
    for field in reversed(list(fields)):
        function = _option(field, group(field), is_repeated=field.name in repeated)(function)
    return function


def _option(field: ConfigField, group: str, *, is_repeated: bool = False) -> Callable[[Decorated], Decorated]:
    # Values remain text, except those of boolean flags. An absent flag is None, or () if it is repeatable.
    # `collect_values` converts and checks the values.
    name = field.name.replace("_", "-")
    has_default = field.default not in (None, False, ())
    help = f"{field.help}  [default: {_format_default(field.default)}]" if has_default else field.help
    if isinstance(field.default, bool):
        flag = f"--{name}/--no-{name}"
        return click.option(flag, field.name, default=None, help=help, cls=GroupedOption, group=group)
    flags = [_SHORT_FLAGS[field.name]] if field.name in _SHORT_FLAGS else []
    is_text = field.parse is not None or isinstance("", field.type)
    metavar = "|".join(field.rule.choices) or ("TEXT" if is_text else "N")
    return click.option(
        *flags,
        f"--{name}",
        *(f"--{alias.replace('_', '-')}" for alias in field.aliases),
        field.name,
        metavar=metavar,
        help=help,
        multiple=is_repeated or field.type == tuple[str, ...],
        cls=GroupedOption,
        group=group,
    )


def _format_default(value: object) -> str:
    if isinstance(value, bool):
        return "on"
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _format_value(value: object) -> str:
    if isinstance(value, tuple):
        return ",".join(map(str, value)) or "-"
    return "-" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
