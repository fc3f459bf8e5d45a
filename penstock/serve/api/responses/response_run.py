"""Runs the turns of one response.

In each turn, the model generates output, and then the calls to tool servers in this output run.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Protocol, Self, TypeVar

from penstock.serve.api.choice_decoder import ChoiceDelta
from penstock.serve.api.conversation import Conversation
from penstock.serve.api.generation import GenerationRun
from penstock.serve.api.responses.mcp_events import ApprovedCall, ToolDelta, ToolOutcome
from penstock.serve.api.responses.offered_tools import OfferedTool, tool_servers
from penstock.serve.api.responses.response_request import PreparedResponse
from penstock.serve.api.usage import Usage
from penstock.serve.http.problems import RequestProblem
from penstock.serve.http.time_limits import TimeLimits
from penstock.serve.mcp.tool_session import ToolOutput, ToolSession
from penstock.serve.observability.request_record import RequestRecord
from penstock.serve.parsers import Content, Reasoning, ToolCallArguments, ToolCallStart
from penstock.serve.services import Services

T = TypeVar("T")

_INVALID_PARAMS = -32602
"""The JSON-RPC error code for invalid arguments."""


class Pool(Protocol):
    """Runs blocking functions in a thread pool."""

    def __call__(self, function: Callable[[], T], /) -> Awaitable[T]: ...


@dataclass
class _GeneratedCall:
    """A tool call in the model's output."""

    id: str
    name: str
    arguments: str = ""

    @property
    def message(self) -> dict[str, object]:
        """The call in the form of a ``tool_calls`` entry of a chat message."""
        return {
            "id": self.id,
            "type": "function",
            "function": {"name": self.name, "arguments": self.arguments or "{}"},
        }


@dataclass
class _TurnOutput:
    """The model's output in one turn."""

    text_parts: list[str] = field(default_factory=list)
    reasoning_parts: list[str] = field(default_factory=list)
    calls: list[_GeneratedCall] = field(default_factory=list)

    def add(self, delta: ChoiceDelta) -> None:
        """Add the output of a delta."""
        for event in delta.events:
            match event:
                case Content():
                    self.text_parts.append(event.text)
                case Reasoning():
                    self.reasoning_parts.append(event.text)
                case ToolCallStart():
                    self.calls.append(_GeneratedCall(event.id, event.name))
                case ToolCallArguments():
                    self.calls[-1].arguments += event.text

    @property
    def message(self) -> dict[str, object]:
        """The output in the form of a chat message."""
        calls = [call.message for call in self.calls]
        content = "".join(self.text_parts)
        message: dict[str, object] = {"role": "assistant", "content": content, "tool_calls": calls}
        if self.reasoning_parts:
            message["reasoning_content"] = "".join(self.reasoning_parts)
        return message


class ResponseRun:
    """Runs the turns of one response.

    A further turn starts if the last turn has tool calls, all of them are to tool servers, and none requires
    approval. No further turn starts if a token limit is reached or the run is cancelled.

    Args:
        services: the objects that routes use.
        record: the record of the request.
        prepared_response: the prepared request.
        pool: runs the preparation of later turns.

    Raises:
        UnavailableError: the worker is not ready, or the queue is full.
    """

    def __init__(
        self, services: Services, record: RequestRecord, prepared_response: PreparedResponse, pool: Pool
    ) -> None:
        self.finish_reason: str | None = None
        """The finish reason of the last finished turn, or ``length`` if a token limit ended the response.

        None before the end of the first turn.
        """
        self._services = services
        self._record = record
        self._prepared_response = prepared_response
        self._pool = pool
        self._limits = TimeLimits(services.config, record)
        self._runs: list[GenerationRun] = []
        """One run per started turn."""
        self._messages: list[dict[str, object]] = []
        """The messages that the turns so far have added to the conversation."""
        self._num_calls = 0  # calls to tool servers in this response
        self._sessions: dict[str, ToolSession] = {}
        self._tasks: dict[asyncio.Task[ToolOutput], str] = {}
        """The task of each running call -> the id of the call."""
        self._is_cancelled = False
        # With approved calls, the first turn starts after them, because its prompt contains their outputs.
        if not prepared_response.approved_calls:
            self._start_turn(prepared_response.conversation)

    async def admitted(self) -> None:
        """Wait until the scheduler has admitted the first turn.

        Does nothing if the client has approved calls, because the calls run before the first turn starts.

        Raises:
            PenstockError: the scheduler refuses the request, or its grammar cannot be compiled.
            RequestProblem: 503; the time limit of the request was exceeded.
        """
        for run in self._runs:
            await run.admitted()

    async def whole_output(self) -> list[ChoiceDelta]:
        """Wait for the end of the response.

        Return the deltas: one for all tool lists, one for all approved calls, one for each turn, and one for
        each outcome of a tool call.
        """
        async with aclosing(self._turns(as_one_delta=True)) as items:
            return [item[1] async for item in items if item is not None]

    async def deltas(self) -> AsyncGenerator[tuple[int, ChoiceDelta] | None, None]:
        """Yield (0, delta) when output arrives. 0 is the index of the only choice.

        Yields None after ``--stream-ping`` seconds without output.

        Raises:
            PenstockError: a turn failed.
            RequestProblem: 503; a time limit of the server was exceeded.
        """
        async with aclosing(self._turns(as_one_delta=False)) as items:
            async for item in items:
                yield item

    def usage(self) -> Usage:
        """Return the sum of the usage of all turns."""
        usages = [run.usage() for run in self._runs]
        cached_tokens = sum(usage["prompt_tokens_details"]["cached_tokens"] for usage in usages)
        reasoning = sum(usage["completion_tokens_details"]["reasoning_tokens"] for usage in usages)
        return {
            "prompt_tokens": sum(usage["prompt_tokens"] for usage in usages),
            "completion_tokens": sum(usage["completion_tokens"] for usage in usages),
            "total_tokens": sum(usage["total_tokens"] for usage in usages),
            "prompt_tokens_details": {"cached_tokens": cached_tokens},
            "completion_tokens_details": {"reasoning_tokens": reasoning},
        }

    def cancel(self) -> None:
        """Cancel the running turn and the running tool calls. No further turn begins. Idempotent."""
        self._is_cancelled = True
        for task in self._tasks:
            task.cancel()
        for run in self._runs:
            run.cancel()

    def finish(self) -> None:
        """Cancel running turns and tool calls, and write the token counts of all turns into the record."""
        self.cancel()
        record = self._record
        totals = [0, 0, 0]
        for run in self._runs:
            run.finish()
            totals[0] += run.job.num_prompt_tokens
            totals[1] += record.completion_tokens
            totals[2] += record.cached_tokens
        record.prompt_tokens, record.completion_tokens, record.cached_tokens = totals
        if self._num_calls:
            record.details["tool_server_calls"] = self._num_calls

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.finish()
        if self._tasks:
            await asyncio.wait(self._tasks)
        for session in self._sessions.values():
            await session.close()

    def _start_turn(self, conversation: Conversation) -> None:
        self._runs.append(GenerationRun(self._services, self._record, conversation.job(self._services)))

    async def _turns(self, *, as_one_delta: bool) -> AsyncGenerator[tuple[int, ChoiceDelta] | None, None]:
        if self._prepared_response.listings:
            yield 0, ToolDelta.of(*self._prepared_response.listings)
        if self._prepared_response.approved_calls:
            async for item in self._call_approved_tools(self._prepared_response.approved_calls):
                yield item
            if not await self._start_next_turn():
                return
        while True:
            run, turn = self._runs[-1], _TurnOutput()
            async with aclosing(_turn_output(run, as_one_delta=as_one_delta)) as items:
                async for item in items:
                    if item is not None:
                        turn.add(item[1])
                    yield item
            self.finish_reason = run.job.choices[0].finish_reason
            offered_tools = self._prepared_response.offered_tools.functions
            calls = [(call, offered_tools[call.name]) for call in turn.calls if call.name in offered_tools]
            if self._is_cancelled or self.finish_reason == "length" or not calls:
                return
            self._messages.append(turn.message)
            server_calls = [(call, tool) for call, tool in calls if not tool.needs_approval]
            async for item in self._call_tools([(call, tool, call.arguments) for call, tool in server_calls]):
                yield item
            if len(server_calls) < len(turn.calls):
                return  # the client must run a function or approve a call
            if self._is_cancelled or not await self._start_next_turn():
                return

    async def _call_approved_tools(
        self, approved_calls: Sequence[ApprovedCall]
    ) -> AsyncGenerator[tuple[int, ChoiceDelta] | None, None]:
        """Run the calls that the client has approved. Yield the calls, then their outcomes."""
        calls = [_GeneratedCall(call.call_id, call.function_name, call.arguments) for call in approved_calls]
        self._messages.append(_TurnOutput(calls=calls).message)
        yield 0, ToolDelta.of(*approved_calls)
        calls_and_approvals = zip(calls, approved_calls, strict=True)
        async for item in self._call_tools(
            [(call, approval.tool, approval.arguments) for call, approval in calls_and_approvals]
        ):
            yield item

    async def _call_tools(
        self, calls: Sequence[tuple[_GeneratedCall, OfferedTool, str]]
    ) -> AsyncGenerator[tuple[int, ChoiceDelta] | None, None]:
        """Run calls to tool servers concurrently and yield their outcomes.

        Yields None after ``--stream-ping`` seconds without an outcome.
        """
        outputs: dict[str, ToolOutput] = {}
        for call, tool, arguments in calls:
            self._tasks[asyncio.ensure_future(self._call_tool(tool, arguments))] = call.id
        ping = self._services.config.stream_ping
        while self._tasks:
            next_result = asyncio.wait(self._tasks, timeout=ping, return_when=asyncio.FIRST_COMPLETED)
            finished_tasks, _ = await self._limits.within(next_result)
            if self._is_cancelled:
                return
            if not finished_tasks:
                yield None
            for task in finished_tasks:
                call_id = self._tasks.pop(task)
                outputs[call_id] = task.result()
                yield 0, ToolDelta.of(ToolOutcome(call_id, outputs[call_id]))
        for call, _, _ in calls:
            content = outputs[call.id].text
            self._messages.append({"role": "tool", "tool_call_id": call.id, "content": content})

    async def _call_tool(self, tool: OfferedTool, arguments: str) -> ToolOutput:
        """Call a tool of a tool server and return its output.

        The output is an error if the arguments are invalid or the response has reached ``max_tool_calls``.
        """
        limit = self._prepared_response.body.max_tool_calls
        if limit is not None and self._num_calls >= limit:
            reason = f"the response has reached max_tool_calls, {limit}"
            return ToolOutput.failed(_INVALID_PARAMS, reason, "mcp_protocol_error")
        self._num_calls += 1
        try:
            parsed_arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            parsed_arguments = None
        if not isinstance(parsed_arguments, dict):
            reason = "the arguments are not a JSON object"
            return ToolOutput.failed(_INVALID_PARAMS, reason, "mcp_protocol_error")
        session = self._sessions.get(tool.server.name)
        if session is None:
            session = tool_servers(self._services).session(tool.server)
            self._sessions[tool.server.name] = session
        return await session.call(tool.tool.name, parsed_arguments)

    async def _start_next_turn(self) -> bool:
        """Start the next turn. Return False if a token limit is reached or the response was cancelled."""
        body, config = self._prepared_response.body, self._services.config
        num_remaining_tokens = None
        if body.max_output_tokens is not None:
            num_remaining_tokens = body.max_output_tokens - self.usage()["completion_tokens"]
            if num_remaining_tokens <= 0:
                self.finish_reason = "length"
                return False
        has_calls_left = body.max_tool_calls is None or self._num_calls < body.max_tool_calls
        has_tools = has_calls_left and len(self._runs) < config.mcp_max_turns
        first_request_id, messages = (
            self._prepared_response.conversation.context.request_id,
            [*self._messages],
        )
        request_id = f"{first_request_id}-{len(self._runs) + 1}"
        try:
            conversation = await self._pool(
                lambda: self._prepared_response.next_turn(
                    self._services, messages, request_id, has_tools=has_tools, max_tokens=num_remaining_tokens
                )
            )
        except RequestProblem as problem:
            if problem.code != "context_length_exceeded":
                raise
            self.finish_reason = "length"
            return False
        if self._is_cancelled:
            return False
        self._record.pause()
        self._start_turn(conversation)
        await self._runs[-1].admitted()
        return True


async def _turn_output(
    run: GenerationRun, *, as_one_delta: bool
) -> AsyncGenerator[tuple[int, ChoiceDelta] | None, None]:
    """Yield the output of a turn.

    With `as_one_delta`, the output is one delta. It has no log probabilities of reasoning tokens.
    """
    if not as_one_delta:
        async with aclosing(run.deltas()) as deltas:
            async for item in deltas:
                yield item
        return
    (output,) = await run.whole_output()
    yield 0, replace(output, scores=output.scores[run.job.choices[0].num_reasoning_tokens :])
