"""The Python API: `LLM` runs the model in this process, `AsyncLLM` in a worker process.

Importing this package does not import torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.host.lazy_names import lazy_names

if TYPE_CHECKING:
    from penstock.llm.async_llm import AsyncLLM
    from penstock.llm.llm import LLM
    from penstock.llm.outputs import GenerationOutput, TextStream

__all__ = ["LLM", "AsyncLLM", "GenerationOutput", "TextStream"]

_MODULES_BY_NAME = {
    "AsyncLLM": "penstock.llm.async_llm",
    "LLM": "penstock.llm.llm",
    "GenerationOutput": "penstock.llm.outputs",
    "TextStream": "penstock.llm.outputs",
}


if not TYPE_CHECKING:  # a type checker must report names that do not exist
    __getattr__ = lazy_names(__name__, _MODULES_BY_NAME)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
