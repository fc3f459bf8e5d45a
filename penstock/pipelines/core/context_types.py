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
    """Return the first class in the context's method resolution order that is in `CONTEXT_TYPES`.

    Returns the context's own class if no class is. For a class ``MyContext(TextContext)`` the result is
    `TextContext`.
    """
    return _class_context_type(type(context))


@cache
def _class_context_type(context_class: type[InputContext]) -> type[InputContext]:
    return next((base for base in context_class.__mro__ if base in CONTEXT_TYPES), context_class)
