"""`LLM` generates in this process, `AsyncLLM` in asyncio programs. This package loads no torch."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.llm.async_llm import AsyncLLM
    from penstock.llm.llm import LLM
    from penstock.llm.outputs import GenerationOutput, TextStream

__all__ = ["LLM", "AsyncLLM", "GenerationOutput", "TextStream"]

_HOMES = {
    "AsyncLLM": "penstock.llm.async_llm",
    "LLM": "penstock.llm.llm",
    "GenerationOutput": "penstock.llm.outputs",
    "TextStream": "penstock.llm.outputs",
}


if not TYPE_CHECKING:  # a type checker must report names that do not exist

    def __getattr__(name: str) -> object:
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
