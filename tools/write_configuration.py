"""Writes docs/configuration.md from the configuration classes: ``python tools/write_configuration.py``."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from penstock.config import ConfigField, config_fields
from penstock.driver import DeviceSpec
from penstock.serve.config import serve_fields

PAGE = Path(__file__).parents[1] / "docs" / "configuration.md"

HEAD = """# Configuration

Every setting has one flat name: the flag (`--max-length 2048`), the keyword (`LLM(max_length=2048)`),
the key of a configuration file (`max_length = 2048` in TOML or JSON, given by `--config-file`) and, in
capitals behind a prefix, the variable (`PENSTOCK_MAX_LENGTH=2048`). A flag comes before a variable, a
variable before the file, the file before the default. `penstock generate --print-config` shows every
value and where it came from. An unknown name, a wrong type or an impossible value is an error that names
the field.

One variable more is read by the kernels: `PENSTOCK_ISA=generic|avx2|avx512_vnni|avx512` caps the
instruction set of Penstock's own kernels and of torch's, so that every path can be tried on one machine.

Written from the configuration classes by `tools/write_configuration.py`; a test compares the two.
"""

SECTIONS = {
    "model": "Model: `PipelineConfig.model`",
    "kv_cache": "KV cache: `PipelineConfig.kv_cache`",
    "sampling": "Sampling: `PipelineConfig.sampling`",
    "lora": "LoRA adapters: `PipelineConfig.lora`",
    "speculative": "Speculation: `PipelineConfig.speculative`",
    "structured_output": "Structured output: `PipelineConfig.structured_output`",
    "": "Pipeline: `PipelineConfig`",
}

SERVER = "Server: `penstock.serve.config.ServeConfig`, for `penstock serve`"


def page() -> str:
    """The text of the page."""
    parts = [HEAD]
    for section, title in SECTIONS.items():
        parts.append(_table(title, [field for field in config_fields() if field.section == section]))
    return "\n".join([*parts, _table(SERVER, serve_fields())])


def _table(title: str, fields: Iterable[ConfigField]) -> str:
    rows = [_row(field) for field in fields]
    return "\n".join([f"## {title}", "", "| name | default | legal | |", "|---|---|---|---|", *rows, ""])


def _row(field: ConfigField) -> str:
    return f"| `{field.name}` | {_shown(field.default)} | {field.rule.legal} | {field.help} |"


def _shown(value: object) -> str:
    if value is None or value == ():
        return ""
    if isinstance(value, tuple) and all(isinstance(one, DeviceSpec) for one in value):
        return f"`{','.join(map(str, value))}`"
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


if __name__ == "__main__":
    PAGE.write_text(page())
