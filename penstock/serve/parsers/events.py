"""The events that a parser extracts from the text of a model."""

from __future__ import annotations

import msgspec


class Content(msgspec.Struct, frozen=True, tag=True):
    """The next part of the content, which is the text outside reasoning and tool calls."""

    text: str


class Reasoning(msgspec.Struct, frozen=True, tag=True):
    """The next part of the reasoning."""

    text: str


class ToolCallStart(msgspec.Struct, frozen=True, tag=True):
    """The beginning of a tool call; ``index`` is the number of the call in the output, from 0."""

    index: int
    id: str
    name: str


class ToolCallArguments(msgspec.Struct, frozen=True, tag=True):
    """The next part of the JSON text of a call's arguments.

    The concatenated parts of a call are one JSON object. If the model's output ends early or becomes invalid
    JSON, the concatenated parts are an incomplete prefix of an object, never a shorter complete object.
    """

    index: int
    text: str


Event = Content | Reasoning | ToolCallStart | ToolCallArguments


def merge_events(events: list[Event]) -> list[Event]:
    """Merge adjacent texts of the same type. Parts of arguments are merged only within the same call.

    >>> merge_events([Content("a"), Content("b"), ToolCallArguments(0, "{"), ToolCallArguments(0, "}")])
    [Content(text='ab'), ToolCallArguments(index=0, text='{}')]
    """
    result: list[Event] = []
    for event in events:
        last_event = result[-1] if result else None
        if isinstance(event, Content) and isinstance(last_event, Content):
            result[-1] = Content(last_event.text + event.text)
        elif isinstance(event, Reasoning) and isinstance(last_event, Reasoning):
            result[-1] = Reasoning(last_event.text + event.text)
        elif (
            isinstance(event, ToolCallArguments)
            and isinstance(last_event, ToolCallArguments)
            and event.index == last_event.index
        ):
            result[-1] = ToolCallArguments(last_event.index, last_event.text + event.text)
        else:
            result.append(event)
    return result
