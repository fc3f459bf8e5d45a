"""The incremental parser of one choice: content, reasoning and tool calls.

The parser drops white space before a call and before a marker that begins or ends reasoning, line ends at the
beginning of reasoning, and line ends between a call or reasoning and the first content. It also drops white
space between a call or reasoning and the end of the output. It keeps all other white space.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

from penstock.serve.parsers.events import Content, Event, Reasoning, ToolCallArguments, ToolCallStart
from penstock.serve.parsers.json_scanner import JsonScanner
from penstock.serve.parsers.reasoning import ReasoningFormat
from penstock.serve.parsers.stream import IncrementalText, MarkerSearch, NotAToolCallError, Reader, advance
from penstock.serve.parsers.tools import Tools


class OutputParser(Protocol):
    """Converts the text of one choice to events."""

    @property
    def done(self) -> bool:
        """Whether the output is complete because the only allowed call has ended.

        The parser drops later text, so the server can stop the generation.
        """
        ...

    def push(self, text: str) -> list[Event]:
        """Process the next chunk of text. Return the events that later text cannot change."""
        ...

    def finish(self) -> list[Event]:
        """End the text and return the remaining events.

        The text of an incomplete call becomes content, unless `ToolCallStart` has been emitted for the call.
        """
        ...


class ToolCallReader(Protocol):
    """The syntax of calls in one format; see `penstock.serve.parsers.formats`."""

    @property
    def markers(self) -> tuple[str, ...]:
        """Texts that begin calls, anywhere in the output."""
        ...

    @property
    def unmarked_starts(self) -> str:
        """Characters that can begin a call without a marker at the beginning of the output."""
        ...

    @property
    def unmarked_in_text(self) -> bool:
        """Whether calls without a marker may also follow other text."""
        ...

    def read(self, parser: ReasoningToolParser, marker: str) -> Reader[None]:
        """Read calls after `marker`, which the parser has taken. The marker "" means a call without a marker.

        Raises:
            NotAToolCallError: the text is not a call. The text since the last call becomes content.
        """
        ...


class _OutputDone(Exception):
    """The only allowed call has ended."""


class PlainParser:
    """The parser for text without markup."""

    done = False

    def push(self, text: str) -> list[Event]:
        return [Content(text)] if text else []

    def finish(self) -> list[Event]:
        return []


class ReasoningToolParser:
    """The `OutputParser` for reasoning and calls. The `ToolCallReader` of the format calls its methods."""

    def __init__(
        self,
        tools: Tools,
        call_reader: ToolCallReader | None,
        reasoning: ReasoningFormat | None,
        *,
        dropped_markers: Iterable[str],
        in_reasoning: bool,
        parallel: bool,
        unmarked_in_text: bool,
        new_id: Callable[[], str],
    ) -> None:
        self.stream = IncrementalText()
        self.done = False
        self._tools = tools
        self._call_reader = call_reader
        self._reasoning = reasoning
        self._allows_parallel = parallel
        self._new_id = new_id
        self._reasoning_begin_markers = reasoning.begin_markers if reasoning else ()
        self._reasoning_end_markers = reasoning.end_markers if reasoning else ()
        self._call_markers = call_reader.markers if call_reader else ()
        self._unmarked_starts_in_text = (
            call_reader.unmarked_starts
            if call_reader and call_reader.unmarked_in_text and unmarked_in_text
            else ""
        )
        ignored_markers = (*dropped_markers, *(reasoning.dropped_markers if reasoning else ()))
        self._markers = MarkerSearch(
            [
                *self._reasoning_begin_markers,
                *self._reasoning_end_markers,
                *self._call_markers,
                *ignored_markers,
                *self._unmarked_starts_in_text,
            ]
        )
        # Scans an incomplete JSON value in the content; None outside of such a value. Calls without a marker
        # cannot begin inside the value.
        self._json_scanner: JsonScanner | None = None
        self._events: list[Event] = []
        self._in_reasoning = in_reasoning
        # White space at the end of the text so far. It is dropped if a call or a reasoning marker follows.
        self._pending_space: list[str] = []
        self._after_markup = in_reasoning  # whether no text follows the last call or reasoning marker yet
        self._has_content = False
        self._num_calls = 0
        self._call_ids: set[str] = set()
        self._call_is_open = False
        self._has_call = False  # whether a call has begun after the current marker
        self._has_unknown_tool = False  # whether the taken text contains a call of an unknown tool
        self._reader = self._read_output()
        advance(self._reader)

    def push(self, text: str) -> list[Event]:
        if self.done or not text:
            return []
        self.stream.push(text)
        return self._run_reader()

    def finish(self) -> list[Event]:
        if self.done or self.stream.has_ended:
            return []
        self.stream.has_ended = True
        events = self._run_reader()
        white_space = "".join(self._pending_space)
        if white_space and not self._after_markup and not self.done:
            events.append(Reasoning(white_space) if self._in_reasoning else Content(white_space))
        return events

    # Methods for call readers.

    def has_tool(self, name: str) -> bool:
        """Return whether the request allows calls of this tool."""
        return name in self._tools

    def schema_types(self, name: str, argument: str) -> frozenset[str] | None:
        """Return the JSON types that an argument of a tool may have; None if they are not restricted."""
        return self._tools.argument_types(name, argument)

    def mark_unknown_tool(self) -> None:
        """Mark the current call as a call of an unknown tool. The whole text of the call becomes content."""
        self._has_unknown_tool = True

    def has_id(self, call_id: str) -> bool:
        """Return whether a call of this output already has this id."""
        return call_id in self._call_ids

    @property
    def num_calls(self) -> int:
        """The number of calls that have begun in this output."""
        return self._num_calls

    def start_call(self, name: str, call_id: str = "") -> None:
        """Begin a call and emit its start. A call that has begun cannot become content.

        Args:
            call_id: the id that the model wrote. If it is empty or another call has it, a new id is
                generated.
        """
        if not call_id or call_id in self._call_ids:
            call_id = self._new_id()
        self._call_ids.add(call_id)
        self.stream.clear_taken()
        self._in_reasoning = False
        self._pending_space.clear()
        self._after_markup = True
        self._events.append(ToolCallStart(self._num_calls, call_id, name))
        self._num_calls += 1
        self._has_call = self._call_is_open = True

    def add_arguments(self, text: str) -> None:
        """Emit the next part of the arguments of the call that has begun last."""
        self.stream.clear_taken()
        if text:
            self._events.append(ToolCallArguments(self._num_calls - 1, text))

    def end_call(self) -> None:
        """End a call whose arguments are complete.

        Raises:
            _OutputDone: the output may have only one call.
        """
        self.stream.clear_taken()
        self._call_is_open = False
        if not self._allows_parallel:
            raise _OutputDone

    def commit(self) -> None:
        """Drop the taken text, which is markup of calls. For a call of an unknown tool, emit it as content.

        Does nothing if no call, of a known or unknown tool, has begun after the current marker.
        """
        if self._has_unknown_tool:
            self._emit_taken_text()
        elif self._has_call:
            self.stream.clear_taken()

    # The main loop.

    def _run_reader(self) -> list[Event]:
        advance(self._reader)
        events, self._events = self._events, []
        return events

    def _read_output(self) -> Reader[None]:
        if not self._in_reasoning:
            yield from self._read_unmarked_calls()
        while not self.done:
            text, marker = yield from self.stream.take_text_or_marker(self._markers)
            if marker in self._call_markers:
                yield from self._read_calls(marker)
                continue
            if marker and marker in self._unmarked_starts_in_text:
                self._scan_json(marker)
                if not self._in_reasoning and self._json_scanner is None:
                    self.stream.put_back(len(marker))
                    yield from self._read_calls("")
                    continue
                self.stream.clear_taken()
                self._emit_text(marker)
                continue
            self.stream.clear_taken()
            if text:
                self._scan_json(text)
                self._emit_text(text)
            elif not marker:
                return
            elif marker in self._reasoning_begin_markers or marker in self._reasoning_end_markers:
                was_in_reasoning, self._in_reasoning = (
                    self._in_reasoning,
                    marker in self._reasoning_begin_markers,
                )
                if was_in_reasoning != self._in_reasoning:
                    self._pending_space.clear()
                    self._after_markup = True
                if was_in_reasoning and not self._in_reasoning:
                    yield from self._read_unmarked_calls()

    def _read_unmarked_calls(self) -> Reader[None]:
        if self._call_reader is None or not self._call_reader.unmarked_starts:
            return
        yield from self.stream.skip_space()
        next_character = yield from self.stream.peek()
        if next_character and next_character in self._call_reader.unmarked_starts:
            yield from self._read_calls("")
        else:
            self._emit_taken_text()

    def _read_calls(self, marker: str) -> Reader[None]:
        """Read calls after a marker; the marker "" means calls without a marker."""
        assert self._call_reader is not None
        self._json_scanner = None
        self._has_call = False
        try:
            yield from self._call_reader.read(self, marker)
        except NotAToolCallError:
            # If the output ends inside a call, its incomplete markup at the end is dropped.
            is_cut_short = self._call_is_open and self.stream.has_ended
            self._has_unknown_tool = not is_cut_short
            self._call_is_open = False
            if is_cut_short:
                self.stream.take_rest()
        except _OutputDone:
            self.done = True
        if self._has_unknown_tool or not self._has_call:
            self._look_for_json()
            self._emit_taken_text()
        self.stream.clear_taken()

    def _look_for_json(self) -> None:
        """Start to scan the first JSON value in the taken text. The taken text becomes content."""
        text = self.stream.taken_text
        json_starts = [
            position for position in map(text.find, self._unmarked_starts_in_text) if position >= 0
        ]
        if json_starts and "{" in self._unmarked_starts_in_text:
            self._json_scanner = JsonScanner()
            self._scan_json(text[min(json_starts) :])

    def _scan_json(self, text: str) -> None:
        if self._json_scanner is not None:
            self._json_scanner.feed(text)
            if self._json_scanner.is_complete or self._json_scanner.is_invalid:
                self._json_scanner = None

    def _emit_taken_text(self) -> None:
        text = self.stream.taken_text
        self.stream.clear_taken()
        self._has_unknown_tool = self._has_call = False
        self._emit_text(text)

    def _emit_text(self, text: str) -> None:
        visible_text = text.rstrip()
        if not visible_text:
            self._pending_space.append(text)
            return
        white_space = "".join(self._pending_space)
        if self._after_markup and (self._in_reasoning or not self._has_content):
            visible_text = (white_space + visible_text).lstrip("\r\n")
        else:
            visible_text = white_space + visible_text
        self._pending_space = [text[len(text.rstrip()) :]]
        self._after_markup = False
        self._has_content = self._has_content or not self._in_reasoning
        self._events.append(Reasoning(visible_text) if self._in_reasoning else Content(visible_text))
