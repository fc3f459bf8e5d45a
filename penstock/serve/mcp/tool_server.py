"""The MCP servers of ``--mcp-server``, and the cached lists of their tools."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec

from penstock.errors import MissingDependencyError
from penstock.serve.mcp.tool_session import ServerTool, ToolServer, ToolServerError, ToolSession
from penstock.serve.observability.logs import log_event

_log = logging.getLogger(__name__)

LIST_CACHE_SECONDS = 300.0
"""Seconds for which a list of tools is cached."""
FAILURE_CACHE_SECONDS = 10.0
"""Seconds for which the failure to list tools is cached."""


@dataclass(frozen=True)
class ServerTools:
    """The tools of a server, or the error that occurred when they were listed."""

    tools: Sequence[ServerTool] = ()
    error: str | None = None


class ToolServers:
    """The tool servers of ``--mcp-server``, by name. Lists their tools on demand and caches the lists.

    Args:
        servers: ``NAME=URL`` of each server.
        tokens: ``NAME=TOKEN`` of servers that need a bearer token.
        timeout: maximum seconds of each call of a tool, and of listing the tools of a server.

    Raises:
        MissingDependencyError: there are servers, but the package ``mcp`` is not installed.
    """

    def __init__(self, servers: Sequence[str], tokens: Sequence[str], timeout: float) -> None:
        check_package(servers)
        token_by_server = dict(_name_and_value(token) for token in tokens)
        self._servers: Mapping[str, ToolServer] = {
            name: ToolServer(name, url, token_by_server.get(name))
            for name, url in map(_name_and_value, servers)
        }
        self._timeout = timeout
        self._lists: dict[str, tuple[float, ServerTools]] = {}  # server name -> (expiry time, tools)
        self._locks: dict[str, asyncio.Lock] = {}

    def __iter__(self) -> Iterator[ToolServer]:
        return iter(self._servers.values())

    @property
    def names(self) -> list[str]:
        """The names of all servers."""
        return [*self._servers]

    def by_name(self, name: str) -> ToolServer | None:
        """Return the server with a name, or None."""
        return self._servers.get(name)

    def by_url(self, url: str) -> ToolServer | None:
        """Return the first server with a URL, or None. Ignores slashes at the end of URLs."""
        return next((server for server in self if server.url.rstrip("/") == url.rstrip("/")), None)

    def session(self, server: ToolServer) -> ToolSession:
        """Return a new session with a server. The caller closes the session."""
        return ToolSession(server, self._timeout)

    async def tools_of(self, server: ToolServer) -> ServerTools:
        """Return the tools of a server, or the error if they cannot be listed. The result is cached."""
        async with self._locks.setdefault(server.name, asyncio.Lock()):
            expires_at, tools = self._lists.get(server.name, (0.0, ServerTools()))
            if time.monotonic() < expires_at:
                return tools
            try:
                async with self.session(server) as session:
                    tools, cache_seconds = ServerTools(await session.list_tools()), LIST_CACHE_SECONDS
            except ToolServerError as error:
                tools, cache_seconds = ServerTools(error=str(error)), FAILURE_CACHE_SECONDS
                log_event(
                    _log,
                    logging.WARNING,
                    "the tools of a tool server cannot be listed",
                    server=server.name,
                    error=str(error),
                )
            self._lists[server.name] = time.monotonic() + cache_seconds, tools
            return tools

    def close(self) -> None:
        """Clear the cached lists of tools. Does not close sessions, which the callers of `session` close."""
        self._lists.clear()


def check_package(servers: Sequence[str]) -> None:
    """Check that the package ``mcp`` is installed if there are tool servers.

    Raises:
        MissingDependencyError: the package is not installed. The message names the extra that installs it.
    """
    if servers and find_spec("mcp") is None:
        raise MissingDependencyError("mcp", "mcp", "--mcp-server")


def _name_and_value(text: str) -> tuple[str, str]:
    name, _, value = text.partition("=")
    return name, value
