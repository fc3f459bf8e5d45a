"""All types of contexts: a union for messages, and the lookup of a context's type."""

from __future__ import annotations

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

    A subclass of the caller counts as the nearest of its base classes, so that ``class
    MyContext(TextContext)`` is a `TextContext`, but a `TTSContext` is not."""
    ancestry = type(context).__mro__
    return next((context_type for context_type in ancestry if context_type in CONTEXT_TYPES), type(context))
