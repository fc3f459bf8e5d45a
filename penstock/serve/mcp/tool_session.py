"""A connection to a tool server, to list and call its tools."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from mcp import Client

MAX_OUTPUT_CHARACTERS = 2**18
"""Maximum number of characters of a tool's output; longer outputs are cut."""
MAX_TOOLS = 1000
"""Maximum number of tools of one server. Further tools are ignored."""
_CLOSE_SECONDS = 2.0
"""Seconds to wait for the end of a session's task before the task is cancelled."""

UNREACHABLE = 502
TIMED_OUT = 504
"""Error codes of calls without an answer, with the meanings of the HTTP status codes."""


@dataclass(frozen=True)
class ToolServer:
    """The name, the address and the token of a tool server."""

    name: str
    url: str
    token: str | None = field(default=None, repr=False)
    """Sent as a bearer token."""


@dataclass(frozen=True)
class ServerTool:
    """A tool of a server."""

    name: str
    description: str | None
    input_schema: Mapping[str, object]
    annotations: Mapping[str, object] | None = None

    @property
    def is_read_only(self) -> bool:
        """Whether the server annotates the tool as read-only."""
        return (self.annotations or {}).get("readOnlyHint") is True


@dataclass(frozen=True)
class ToolOutput:
    """The result of a call: the tool's text output, or an error in the format of the Responses API."""

    output: str | None = None
    error: Mapping[str, object] | None = None

    @classmethod
    def failed(cls, code: int, message: str, error_type: str = "http_error") -> ToolOutput:
        """Return the result of a call that failed with a code and a message."""
        return cls(error={"type": error_type, "code": code, "message": message})

    @property
    def text(self) -> str:
        """The text of the output or of the error, for the prompt of the next turn."""
        if self.error is None:
            return self.output or ""
        if "message" in self.error:
            return f"Error: {self.error['message']}"
        parts = self.error.get("content")
        texts = [part.get("text", "") for part in parts] if isinstance(parts, list) else []
        return "Error: " + "\n".join(texts)


class ToolServerError(Exception):
    """A tool server cannot be reached, takes too long, or returns an error."""


class ToolSession:
    """A session with a tool server; an async context manager. `list_tools` and `call` connect if needed.

    The client of the package ``mcp`` must be opened and closed in the same task. A task of the session opens
    and closes the client, so that any task can call the session's methods.

    Args:
        server: the server.
        timeout: seconds for each call, and for listing the tools.
    """

    def __init__(self, server: ToolServer, timeout: float) -> None:
        self._server = server
        self._timeout = timeout
        self._client: asyncio.Future[Client] | None = None
        self._close_event = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def list_tools(self) -> list[ServerTool]:
        """Return the tools of the server, at most `MAX_TOOLS`.

        Raises:
            ToolServerError: the server cannot be reached, takes too long, or returns an error.
        """
        tools: list[ServerTool] = []
        cursor = None
        try:
            async with asyncio.timeout(self._timeout):
                client = await self._connect()
                while True:
                    page = await client.list_tools(cursor=cursor)
                    tools += [_server_tool(tool) for tool in page.tools]
                    cursor = page.next_cursor
                    if cursor is None or len(tools) >= MAX_TOOLS:
                        return tools[:MAX_TOOLS]
        except TimeoutError:
            raise ToolServerError(self._timeout_message()) from None
        except Exception as error:  # the errors of the client and of its transports have no common base class
            raise ToolServerError(self._error_message(error)) from error

    async def call(self, name: str, arguments: Mapping[str, object]) -> ToolOutput:
        """Call a tool and return its output. Errors of the tool or of the server are returned, not raised."""
        from mcp import MCPError

        try:
            async with asyncio.timeout(self._timeout):
                client = await self._connect()
                result = await client.call_tool(name, dict(arguments))
        except TimeoutError:
            return ToolOutput.failed(TIMED_OUT, self._timeout_message())
        except MCPError as error:
            return ToolOutput.failed(error.code, _shortened(error.message), "mcp_protocol_error")
        except Exception as error:  # no common base class, as in `list_tools`
            return ToolOutput.failed(UNREACHABLE, self._error_message(error))
        return _tool_output(result)

    async def close(self) -> None:
        """Close the session. Running calls fail."""
        if self._task is None:
            return
        self._close_event.set()
        await asyncio.wait((self._task,), timeout=_CLOSE_SECONDS)
        self._task.cancel()
        await asyncio.wait((self._task,))
        self._task = None

    async def _connect(self) -> Client:
        """Return the client. The first call connects."""
        if self._client is None:
            self._client = asyncio.get_running_loop().create_future()
            self._task = asyncio.create_task(self._run(self._client))
        return await asyncio.shield(self._client)

    async def _run(self, connection: asyncio.Future[Client]) -> None:
        from mcp import Client
        from mcp.client.streamable_http import streamable_http_client

        try:
            async with AsyncExitStack() as stack:
                transport: Any = self._server.url
                if self._server.token is not None:
                    import httpx2

                    headers = {"authorization": f"Bearer {self._server.token}"}
                    http_client = await stack.enter_async_context(
                        httpx2.AsyncClient(headers=headers, timeout=self._timeout)
                    )
                    transport = streamable_http_client(self._server.url, http_client=http_client)
                client = await stack.enter_async_context(Client(transport))
                connection.set_result(client)
                await self._close_event.wait()
        except Exception as error:  # the connection failed; the calls report errors that occur later
            if not connection.done():
                connection.set_exception(error)
                # If the caller has timed out, asyncio would log the exception as never retrieved.
                connection.exception()
        finally:
            connection.cancel()

    def _timeout_message(self) -> str:
        return f"the tool server {self._server.name} has not answered within {self._timeout:g} seconds"

    def _error_message(self, error: BaseException) -> str:
        reason = "; ".join(dict.fromkeys(str(leaf) or type(leaf).__name__ for leaf in _leaf_errors(error)))
        return _shortened(f"the tool server {self._server.name} cannot be used: {reason}")


def _leaf_errors(error: BaseException) -> Iterator[BaseException]:
    """Yield the errors in an exception group and its nested groups, or the error itself if it is no group."""
    if isinstance(error, BaseExceptionGroup):
        for exception in error.exceptions:
            yield from _leaf_errors(exception)
    else:
        yield error


def _server_tool(tool: Any) -> ServerTool:
    annotations = tool.annotations
    return ServerTool(
        tool.name,
        tool.description,
        tool.input_schema,
        None if annotations is None else annotations.model_dump(by_alias=True, exclude_none=True),
    )


def _tool_output(result: Any) -> ToolOutput:
    """Return a result in the format of the Responses API."""
    text = "\n".join(_texts(result.content))
    if not result.content and result.structured_content is not None:
        text = json.dumps(result.structured_content, ensure_ascii=False)
    if result.is_error:
        return ToolOutput(
            error={
                "type": "mcp_tool_execution_error",
                "content": [{"type": "text", "text": _shortened(text)}],
            }
        )
    return ToolOutput(_shortened(text))


def _texts(blocks: Sequence[Any]) -> Iterator[str]:
    """Yield the text of each content block of a result; for a block that is not text, a URI or a note."""
    for block in blocks:
        match block.type:
            case "text":
                yield block.text
            case "resource" if isinstance(getattr(block.resource, "text", None), str):
                yield block.resource.text
            case "resource":
                yield f"[resource {block.resource.uri}, not text]"
            case "resource_link":
                yield str(block.uri)
            case block_type:
                yield f"[{block_type} {getattr(block, 'mime_type', '')}, not text]"


def _shortened(text: str) -> str:
    num_cut = len(text) - MAX_OUTPUT_CHARACTERS
    return text if num_cut <= 0 else f"{text[:MAX_OUTPUT_CHARACTERS]}\n[{num_cut} more characters]"
