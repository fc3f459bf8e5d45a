"""What a parser makes of a model's text. Joined, the events are the answer."""

from __future__ import annotations

import msgspec


class Content(msgspec.Struct, frozen=True, tag=True):
    """The next piece of the answer's text."""

    text: str


class Reasoning(msgspec.Struct, frozen=True, tag=True):
    """The next piece of what the model thinks before it answers."""

    text: str


class ToolCallStart(msgspec.Struct, frozen=True, tag=True):
    """A call of a tool that the request offers begins; ``index`` counts the answer's calls from 0."""

    index: int
    id: str
    name: str


class ToolCallArguments(msgspec.Struct, frozen=True, tag=True):
    """The next piece of the JSON text of a call's arguments.

    Joined, the pieces of a call are one JSON object, or an unfinished beginning of one where the model's
    text broke off or stopped being JSON; never an object with something left out.
    """

    index: int
    text: str


Event = Content | Reasoning | ToolCallStart | ToolCallArguments


def joined(events: list[Event]) -> list[Event]:
    """The events with neighbouring pieces of the same thing made one.

    >>> joined([Content("a"), Content("b"), ToolCallArguments(0, "{"), ToolCallArguments(0, "}")])
    [Content(text='ab'), ToolCallArguments(index=0, text='{}')]
    """
    result: list[Event] = []
    for event in events:
        last = result[-1] if result else None
        if isinstance(event, Content) and isinstance(last, Content):
            result[-1] = Content(last.text + event.text)
        elif isinstance(event, Reasoning) and isinstance(last, Reasoning):
            result[-1] = Reasoning(last.text + event.text)
        elif (
            isinstance(event, ToolCallArguments)
            and isinstance(last, ToolCallArguments)
            and event.index == last.index
        ):
            result[-1] = ToolCallArguments(last.index, last.text + event.text)
        else:
            result.append(event)
    return result
