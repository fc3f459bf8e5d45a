"""The types of contexts: a union type for messages, and the function that finds a context's type."""

from __future__ import annotations

from functools import cache
from typing import TypeAlias, get_args

from penstock.pipelines.core.context import TextContext
from penstock.pipelines.core.embeddings import EmbeddingsContext
from penstock.pipelines.core.interfaces import InputContext
from penstock.pipelines.core.speech import TTSContext
from penstock.pipelines.core.vision import TextAndVisionContext

RequestContext: TypeAlias = TextContext | TextAndVisionContext | TTSContext | EmbeddingsContext
"""Every context that can be sent to a worker."""
CONTEXT_TYPES: tuple[type[TextContext], ...] = get_args(RequestContext)


def context_type(context: InputContext) -> type[InputContext]:
    """Return the member of `CONTEXT_TYPES` to which a context belongs, or its class if there is none.

    The member is the class of the context, or the nearest of its base classes. A context of a class
    ``MyContext(TextContext)`` belongs to `TextContext`. A `TTSContext` belongs to `TTSContext` only.
    """
    return _class_context_type(type(context))


@cache
def _class_context_type(kind: type[InputContext]) -> type[InputContext]:
    return next((base for base in kind.__mro__ if base in CONTEXT_TYPES), kind)
