"""The parser of one answer: plain text, reasoning and calls, told apart as the text comes.

White space belongs to the markup that it stands beside: it is dropped before a call, around reasoning (its
line ends) and after both, and kept everywhere else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

from penstock.serve.parsers.events import Content, Event, Reasoning, ToolCallArguments, ToolCallStart
from penstock.serve.parsers.json_scanner import JsonScanner
from penstock.serve.parsers.reasoning import ReasoningFormat
from penstock.serve.parsers.stream import IncrementalText, Markers, NotAToolCallError, Steps, is_finished
from penstock.serve.parsers.tools import Schema, Tools


class OutputParser(Protocol):
    """Makes events of the text of one choice."""

    @property
    def done(self) -> bool:
        """Whether the answer is complete, whatever text may follow: the only call that was allowed has ended.

        The rest of the text is dropped, as after a stop string, so generation may end here.
        """
        ...

    def push(self, text: str) -> list[Event]:
        """The events that this text settles."""
        ...

    def finish(self) -> list[Event]:
        """What was held back. Text that became no call comes out as the text that it is."""
        ...


class ToolCallReader(Protocol):
    """How calls look in one format; see `penstock.serve.parsers.formats`."""

    @property
    def markers(self) -> tuple[str, ...]:
        """What begins calls, anywhere in the text."""
        ...

    @property
    def bare_starts(self) -> str:
        """Characters with which a call without a marker may begin, at the beginning of the output."""
        ...

    @property
    def bare_in_text(self) -> bool:
        """Whether calls that no marker announces stand behind other text, too."""
        ...

    def read(self, parser: ReasoningToolParser, marker: str) -> Steps[None]:
        """Reads the calls behind a marker, taken already, or where a bare call may stand (marker "").

        Raises:
            NotAToolCallError: what follows is none. What was taken since the last call is plain text.
        """
        ...


class _OutputDone(Exception):
    """The one call that was allowed has ended."""


class PlainParser:
    """The parser where nothing is markup."""

    done = False

    def push(self, text: str) -> list[Event]:
        return [Content(text)] if text else []

    def finish(self) -> list[Event]:
        return []


class ReasoningToolParser:
    """An `OutputParser`, and what a `ToolCallReader` works on: the text's stream and where calls go."""

    def __init__(
        self,
        tools: Tools,
        calls: ToolCallReader | None,
        reasoning: ReasoningFormat | None,
        *,
        dropped: Iterable[str],
        in_reasoning: bool,
        parallel: bool,
        bare_in_text: bool,
        new_id: Callable[[], str],
    ) -> None:
        self.stream = IncrementalText()
        self.done = False
        self._tools = tools
        self._calls = calls
        self._reasoning = reasoning
        self._parallel = parallel
        self._new_id = new_id
        self._begins = reasoning.begins if reasoning else ()
        self._ends = reasoning.ends if reasoning else ()
        self._call_markers = calls.markers if calls else ()
        self._bare_in_text = calls.bare_starts if calls and calls.bare_in_text and bare_in_text else ""
        ignored = (*dropped, *(reasoning.dropped if reasoning else ()))
        self._markers = Markers(
            [*self._begins, *self._ends, *self._call_markers, *ignored, *self._bare_in_text]
        )
        self._json: JsonScanner | None = (
            None  # JSON in the text that is no call, up to here: nothing in it is
        )
        self._events: list[Event] = []
        self._in_reasoning = in_reasoning
        self._space: list[str] = []  # white space that is text only if text follows
        self._after_markup = in_reasoning
        self._has_content = False
        self._num_calls = 0
        self._ids: set[str] = set()
        self._call_is_open = False
        self._called = False  # a call began behind the marker at hand
        self._refused = False  # a call of something that is no tool was taken since the last settled text
        self._run = self._read()
        is_finished(self._run)

    def push(self, text: str) -> list[Event]:
        if self.done or not text:
            return []
        self.stream.push(text)
        return self._go_on()

    def finish(self) -> list[Event]:
        if self.done or self.stream.ended:
            return []
        self.stream.ended = True
        events = self._go_on()
        space = "".join(self._space)
        if space and not self._after_markup and not self.done:
            events.append(Reasoning(space) if self._in_reasoning else Content(space))
        return events

    # What call readers use.

    def knows(self, name: str) -> bool:
        """Whether the request offers this tool."""
        return name in self._tools

    def schema_types(self, name: str, argument: str) -> frozenset[str] | None:
        return self._tools.argument_types(name, argument)

    def properties(self, name: str) -> dict[str, Schema | bool]:
        return self._tools.properties(name)

    def refuse(self) -> None:
        """The call at hand names no tool of the request: all that belongs to it is text."""
        self._refused = True

    def has_id(self, call_id: str) -> bool:
        """Whether a call of this answer has this id."""
        return call_id in self._ids

    @property
    def num_calls(self) -> int:
        return self._num_calls

    def start_call(self, name: str, call_id: str = "") -> None:
        """A call begins; from here on it cannot be taken back.

        Args:
            call_id: the id that the model wrote; without one, or with one that another call has, a new one
                is made.
        """
        if not call_id or call_id in self._ids:
            call_id = self._new_id()
        self._ids.add(call_id)
        self.stream.forget()
        self._in_reasoning = False
        self._space.clear()
        self._after_markup = True
        self._events.append(ToolCallStart(self._num_calls, call_id, name))
        self._num_calls += 1
        self._called = self._call_is_open = True

    def add_arguments(self, text: str) -> None:
        self.stream.forget()
        if text:
            self._events.append(ToolCallArguments(self._num_calls - 1, text))

    def end_call(self) -> None:
        """The arguments of the call are complete."""
        self.stream.forget()
        self._call_is_open = False
        if not self._parallel:
            raise _OutputDone

    def commit(self) -> None:
        """What was taken is the markup of a call, as it should be; of one that was refused, it is text."""
        if self._refused:
            self._give_back()
        elif self._called:
            self.stream.forget()

    # The answer's own reader.

    def _go_on(self) -> list[Event]:
        is_finished(self._run)
        events, self._events = self._events, []
        return events

    def _read(self) -> Steps[None]:
        if not self._in_reasoning:
            yield from self._bare_calls()
        while not self.done:
            text, marker = yield from self.stream.piece(self._markers)
            if marker in self._call_markers:
                yield from self._read_calls(marker)
                continue
            if marker and marker in self._bare_in_text:
                self._pass_over(marker)
                if not self._in_reasoning and self._json is None:
                    self.stream.put_back(len(marker))
                    yield from self._read_calls("")
                    continue
                self.stream.forget()
                self._text(marker)
                continue
            self.stream.forget()
            if text:
                self._pass_over(text)
                self._text(text)
            elif not marker:
                return
            elif marker in self._begins or marker in self._ends:
                was_in_reasoning, self._in_reasoning = self._in_reasoning, marker in self._begins
                if was_in_reasoning != self._in_reasoning:
                    self._space.clear()
                    self._after_markup = True
                if was_in_reasoning and not self._in_reasoning:
                    yield from self._bare_calls()

    def _bare_calls(self) -> Steps[None]:
        if self._calls is None or not self._calls.bare_starts:
            return
        yield from self.stream.skip_space()
        first = yield from self.stream.peek()
        if first and first in self._calls.bare_starts:
            yield from self._read_calls("")
        else:
            self._give_back()

    def _read_calls(self, marker: str) -> Steps[None]:
        """Reads calls behind a marker, or with the marker "" bare ones."""
        assert self._calls is not None
        self._json = None
        self._called = False
        try:
            yield from self._calls.read(self, marker)
        except NotAToolCallError:
            # Of a call that the text's end cuts short, the last unfinished piece of markup is no text.
            is_cut_short = self._call_is_open and self.stream.ended
            self._refused = not is_cut_short
            self._call_is_open = False
            if is_cut_short:
                self.stream.take_rest()
        except _OutputDone:
            self.done = True
        if self._refused or not self._called:
            self._look_for_json()
            self._give_back()
        self.stream.forget()

    def _look_for_json(self) -> None:
        """Notes that what was taken for calls in JSON and is given back is the beginning of other JSON."""
        text = self.stream.taken
        starts = [at for at in map(text.find, self._bare_in_text) if at >= 0]
        if starts and "{" in self._bare_in_text:
            self._json = JsonScanner()
            self._pass_over(text[min(starts) :])

    def _pass_over(self, text: str) -> None:
        if self._json is not None:
            self._json.feed(text)
            if self._json.done or self._json.broken:
                self._json = None

    def _give_back(self) -> None:
        text = self.stream.taken
        self.stream.forget()
        self._refused = self._called = False
        self._text(text)

    def _text(self, text: str) -> None:
        body = text.rstrip()
        if not body:
            self._space.append(text)
            return
        space = "".join(self._space)
        if self._after_markup and (self._in_reasoning or not self._has_content):
            body = (space + body).lstrip("\r\n")
        else:
            body = space + body
        self._space = [text[len(text.rstrip()) :]]
        self._after_markup = False
        self._has_content = self._has_content or not self._in_reasoning
        self._events.append(Reasoning(body) if self._in_reasoning else Content(body))
