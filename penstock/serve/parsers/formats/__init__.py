"""How models write calls of tools: one file a format, all of them in one table."""

from __future__ import annotations

from penstock.serve.parsers.formats import (
    apriel,
    cohere,
    deepseek,
    deepseek_dsml,
    firefunction,
    functionary,
    glm,
    granite,
    harmony,
    hermes,
    kimi_k2,
    lfm2,
    llama3_json,
    mistral,
    pythonic,
    qwen3_coder,
)
from penstock.serve.parsers.formats.tool_format import ToolFormat

# In the order in which a chat template is asked whose it is: special ones before those that they resemble.
TOOL_FORMATS: dict[str, ToolFormat] = {
    tool_format.name: tool_format
    for tool_format in (
        harmony.FORMAT,
        functionary.FORMAT,
        qwen3_coder.SEED_OSS_FORMAT,
        qwen3_coder.FORMAT,
        glm.FORMAT,
        apriel.FORMAT,
        kimi_k2.FORMAT,
        deepseek.FORMAT,
        deepseek.V31_FORMAT,
        deepseek_dsml.FORMAT,
        deepseek_dsml.V4_FORMAT,
        cohere.FORMAT,
        firefunction.FORMAT,
        granite.FORMAT,
        mistral.FORMAT,
        mistral.LIST_FORMAT,
        lfm2.FORMAT,
        llama3_json.FORMAT,
        pythonic.FORMAT,
        hermes.FORMAT,
    )
}

__all__ = ["TOOL_FORMATS", "ToolFormat"]
