"""Penstock: an LLM inference library and server.

>>> from penstock import LLM, SamplingParams
>>> llm = LLM("demo")
>>> llm.generate("Once upon a time", SamplingParams(max_new_tokens=20))[0].text  # doctest: +SKIP
' there was a ...'

Importing this package imports neither torch nor transformers. The classes are imported on first use.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.llm.async_llm import AsyncLLM
    from penstock.llm.llm import LLM
    from penstock.llm.outputs import GenerationOutput
    from penstock.pipelines.core import SamplingParams

__version__ = "0.2.0"

__all__ = ["LLM", "AsyncLLM", "GenerationOutput", "SamplingParams", "__version__"]

_MODULES_BY_NAME = {
    "AsyncLLM": "penstock.llm.async_llm",
    "LLM": "penstock.llm.llm",
    "GenerationOutput": "penstock.llm.outputs",
    "SamplingParams": "penstock.pipelines.core",
}


if not TYPE_CHECKING:  # type checkers must report unknown names

    def __getattr__(name: str) -> object:
        if name not in _MODULES_BY_NAME:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from penstock.host.garbage_collection import gc_disabled

        with gc_disabled():
            return getattr(import_module(_MODULES_BY_NAME[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _limit_torch_instruction_set() -> None:
    """Limit torch and oneDNN to the instruction set ``PENSTOCK_ISA``, if they have a limit for it.

    This function sets environment variables that torch and oneDNN read, unless the user has set them.
    """
    isa = os.environ.get("PENSTOCK_ISA")
    for variable, values in _TORCH_VARIABLES.items():
        if isa in values:
            os.environ.setdefault(variable, values[isa])


_TORCH_VARIABLES = {
    "ATEN_CPU_CAPABILITY": {"generic": "default", "avx2": "avx2"},
    "ONEDNN_MAX_CPU_ISA": {"generic": "SSE41", "avx2": "AVX2", "avx512_vnni": "AVX512_CORE_VNNI"},
}

_limit_torch_instruction_set()
