"""Write docs/configuration.md from the configuration classes: ``python tools/write_configuration.py``."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable
from pathlib import Path

from penstock.config import ConfigField, config_fields
from penstock.driver import DeviceSpec
from penstock.ray.config import ray_fields
from penstock.serve.config import serve_fields

PAGE = Path(__file__).parents[1] / "docs" / "configuration.md"

HEAD = """# Configuration

A setting has the same name in all places where it can be set. The table has these places in order of
precedence:

| source | example |
|---|---|
| flag, or keyword argument in Python | `--max-length 2048`, `LLM(max_length=2048)` |
| environment variable | `PENSTOCK_MAX_LENGTH=2048` |
| configuration file, TOML or JSON, given by `--config-file` | `max_length = 2048` |
| none of these | the default in the lists below |

Each entry below has the name of the setting, the allowed values, the default value if it is fixed, and
the meaning.

The flag `--print-config` of a command such as `penstock serve` prints the value of each setting and the
source of the value. The error for an unknown name, a wrong type or an invalid value names the setting.

The kernels also read the environment variable `PENSTOCK_ISA` (generic, avx2, avx512_vnni or avx512). It
limits the instruction set of Penstock's kernels and of torch's kernels, so that every code path can be
tested on one machine.

`tools/write_configuration.py` generates this page from the configuration classes; a test compares the
two.
"""

SECTIONS = {
    "model": "Model: `PipelineConfig.model`",
    "kv_cache": "KV cache: `PipelineConfig.kv_cache`",
    "sampling": "Sampling: `PipelineConfig.sampling`",
    "lora": "LoRA adapters: `PipelineConfig.lora`",
    "speculative": "Speculation: `PipelineConfig.speculative`",
    "structured_output": "Structured output: `PipelineConfig.structured_output`",
    "vision": "Images: `PipelineConfig.vision`",
    "speech": "Speech: `PipelineConfig.speech`",
    "parallel": "Several processes: `PipelineConfig.parallel`",
    "": "Pipeline: `PipelineConfig`",
}

SERVER = "Server: `penstock.serve.config.ServeConfig`, for `penstock serve`"
RAY = "Ray: `penstock.ray.RayConfig`, for `penstock serve --ray` and `penstock batch run --ray`"


def page() -> str:
    """Return the text of docs/configuration.md."""
    parts = [HEAD]
    for section, title in SECTIONS.items():
        parts.append(_list(title, [field for field in config_fields() if field.section == section]))
    return "\n".join([*parts, _list(SERVER, serve_fields()), _list(RAY, ray_fields())])


def _list(title: str, fields: Iterable[ConfigField]) -> str:
    """Return a section with one list item per setting."""
    return "\n".join([f"## {title}", "", *map(_item, fields), ""])


def _item(field: ConfigField) -> str:
    """Return the list item of a setting, wrapped at 120 columns."""
    names = ", ".join(f"`{name}`" for name in (field.name, *field.aliases))
    default = _format_default(field.default)
    values = f"{field.rule.allowed_values}; default {default}" if default else field.rule.allowed_values
    return textwrap.fill(
        f"- {names} ({values}): {field.help}",
        width=120,
        subsequent_indent="  ",
        break_long_words=False,
        break_on_hyphens=False,
    )


def _format_default(value: object) -> str:
    """Return a default value as inline code; empty if there is none."""
    if value is None or value == ():
        return ""
    if isinstance(value, tuple) and all(isinstance(item, DeviceSpec) for item in value):
        return f"`{','.join(map(str, value))}`"
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


if __name__ == "__main__":
    PAGE.write_text(page())
