"""Builds a response of the Responses API: one object, or the events of a stream."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

import msgspec

from penstock.serve.api.choice_decoder import ChoiceDelta, Score
from penstock.serve.api.responses.mcp_events import ToolDelta
from penstock.serve.api.responses.offered_tools import MCP_TOOL_TYPE
from penstock.serve.api.responses.response_output import OutputItems
from penstock.serve.api.responses.response_request import PreparedResponse
from penstock.serve.api.responses.response_run import ResponseRun
from penstock.serve.api.responses.response_schema import INCLUDE_ENCRYPTED_REASONING
from penstock.serve.api.responses.tool_input import custom_tool_names
from penstock.serve.api.token_scores import ChatScores
from penstock.serve.api.usage import Usage
from penstock.serve.http.problems import Problem
from penstock.serve.http.sse import PING, named_event
from penstock.serve.services import Services

_FINAL_EVENTS = {"completed": "response.completed", "incomplete": "response.incomplete"}


class _Scores(msgspec.Struct):
    """The JSON object of `ChatScores`. Each entry of ``content`` is the JSON of one token."""

    content: list[msgspec.Raw]


class ResponseBuilder:
    """Builds the object or the stream events of one response.

    Args:
        services: the objects that routes use.
        prepared_response: the prepared request.
        run: the run that generates the response.
    """

    media_type = "text/event-stream"

    def __init__(self, services: Services, prepared_response: PreparedResponse, run: ResponseRun) -> None:
        body, conversation = prepared_response.body, prepared_response.conversation
        self._run = run
        self._output = OutputItems(
            custom_tool_names(body),
            prepared_response.offered_tools,
            encodes_reasoning=body.includes(INCLUDE_ENCRYPTED_REASONING),
        )
        self._scores = None
        if conversation.body.logprobs:
            self._scores = ChatScores(services.fragments_for(conversation.body), body.top_logprobs or 0)
        self._sequence_number = 0
        self._fixed_members = _response_members(prepared_response)
        self.result: dict[str, object] = self.set_status("in_progress")
        """The response in its current state."""

    def set_status(self, status: str, **members: object) -> dict[str, object]:
        """Set the status and further members of the response, and return the response."""
        self.result = {**self._fixed_members, "status": status, "output": self._output.items, **members}
        return self.result

    def whole_response(self, outputs: Sequence[ChoiceDelta], usage: Usage) -> Iterable[bytes]:
        """Yield the JSON of a response that is not streamed."""
        for output in outputs:
            self._add(output)
        self._finish(usage)
        yield msgspec.json.encode(self.result)

    def begin(self) -> bytes:
        """Return the events before the first delta."""
        event_types = ("response.created", "response.in_progress")
        return self._events([{"type": event_type, "response": self.result} for event_type in event_types])

    def events(self, index: int, delta: ChoiceDelta, usage: Usage | None = None) -> Iterable[bytes]:
        """Return the events of a delta as one `bytes` object, or an empty tuple if there are no events."""
        new_events = self._add(delta)
        return (self._events(new_events),) if new_events else ()

    def end(self, usage: Usage) -> bytes:
        """Return the events after the last delta."""
        new_events = self._finish(usage)
        return self._events(
            [*new_events, {"type": _FINAL_EVENTS[str(self.result["status"])], "response": self.result}]
        )

    def ping(self) -> bytes:
        """Return the comment that is sent during a pause, so that proxies do not close the connection."""
        return PING

    def error(self, problem: Problem) -> bytes:
        """End the response with an error, and return the error event that ends the stream."""
        return self._events([{"type": "response.failed", "response": self.end_with_error(problem)}])

    def end_with_error(self, problem: Problem) -> dict[str, object]:
        """End the response with an error and return the response."""
        self._end_open_items()
        error = {"code": problem.code or "server_error", "message": problem.message, "param": problem.param}
        return self.set_status("failed", error=error)

    def end_as_cancelled(self) -> dict[str, object]:
        """End the response with the status ``cancelled`` and return the response."""
        self._end_open_items()
        return self.set_status("cancelled")

    def _end_open_items(self) -> None:
        self._output.close(is_complete=False)
        self._output.end_calls()

    def _add(self, delta: ChoiceDelta) -> list[dict[str, object]]:
        if isinstance(delta, ToolDelta):
            return self._output.add_mcp(delta.mcp_events)
        return self._output.add(delta.events, self._logprobs(delta.scores) if delta.content else ())

    def _finish(self, usage: Usage) -> list[dict[str, object]]:
        is_complete = self._run.finish_reason != "length"
        new_events = self._output.finish(is_complete=is_complete)
        details = None if is_complete else {"reason": "max_output_tokens"}
        self.set_status(
            "completed" if is_complete else "incomplete",
            usage=_usage(usage),
            incomplete_details=details,
            completed_at=int(time.time()),
        )
        return new_events

    def _events(self, new_events: Iterable[dict[str, object]]) -> bytes:
        encoded_events = []
        for event in new_events:
            encoded_events.append(named_event({**event, "sequence_number": self._sequence_number}))
            self._sequence_number += 1
        return b"".join(encoded_events)

    def _logprobs(self, scores: Sequence[Score]) -> Sequence[msgspec.Raw]:
        if self._scores is None or not scores:
            return ()
        return msgspec.json.decode(b"".join(self._scores.parts(scores)), type=_Scores).content


def _response_members(prepared_response: PreparedResponse) -> dict[str, object]:
    """Return the members of the response object with values that do not change until the response ends."""
    body, conversation = prepared_response.body, prepared_response.conversation
    params = conversation.context.sampling_params
    reasoning, text = body.reasoning, body.text
    text_format = text.format if text is not None else None
    return {
        "id": conversation.context.request_id,
        "object": "response",
        "created_at": int(time.time()),
        "completed_at": None,
        "error": None,
        "incomplete_details": None,
        "background": bool(body.background),
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "metadata": body.metadata or {},
        "model": body.model,
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning": {"effort": reasoning.effort if reasoning else None, "summary": None},
        "safety_identifier": body.safety_identifier,
        "service_tier": "default",
        "store": body.is_stored,
        "temperature": params.temperature,
        "text": {
            "format": {"type": "text"}
            if text_format is None
            else text_format.model_dump(by_alias=True, exclude_none=True),
            "verbosity": "medium" if text is None or text.verbosity is None else text.verbosity,
        },
        "tool_choice": _json_value(body.tool_choice) or "auto",
        "tools": [
            tool.model_dump(by_alias=True, exclude_none=True)
            | ({"strict": bool(tool.strict)} if tool.type == "function" else {})
            for tool in body.tools or ()
            if not tool.is_server_side or tool.type == MCP_TOOL_TYPE
        ]
        + [
            {"type": MCP_TOOL_TYPE, "server_label": name}
            for name in prepared_response.offered_tools.implied_servers
        ],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": params.top_p,
        "truncation": body.truncation or "disabled",
        "usage": None,
        "user": body.user,
    }


def _json_value(value: object) -> object:
    return value.model_dump(by_alias=True, exclude_none=True) if hasattr(value, "model_dump") else value


def _usage(usage: Usage) -> dict[str, object]:
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {**usage["prompt_tokens_details"], "cache_write_tokens": 0},
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": usage["completion_tokens_details"],
        "total_tokens": usage["total_tokens"],
    }
