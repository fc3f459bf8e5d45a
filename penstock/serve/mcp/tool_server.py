"""The configured tool servers, and the lists of their tools."""

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

LIST_SECONDS = 300.0
"""Seconds for which a list of tools is cached."""
FAILURE_SECONDS = 10.0
"""Seconds for which the failure to list tools is cached."""


@dataclass(frozen=True)
class ServerTools:
    """The tools of a server, or the reason why they could not be listed."""

    tools: Sequence[ServerTool] = ()
    error: str | None = None


class ToolServers:
    """The tool servers of ``--mcp-server``, by name. Lists of tools are requested on demand.

    Args:
        servers: ``NAME=URL`` of each server.
        tokens: ``NAME=TOKEN`` of servers that need a bearer token.
        timeout: seconds for a call of a tool, and for a list of tools.

    Raises:
        MissingDependencyError: the package ``mcp`` is not installed.
    """

    def __init__(self, servers: Sequence[str], tokens: Sequence[str], timeout: float) -> None:
        check_package(servers)
        secrets = dict(_pair(one) for one in tokens)
        self._servers: Mapping[str, ToolServer] = {
            name: ToolServer(name, url, secrets.get(name)) for name, url in map(_pair, servers)
        }
        self._timeout = timeout
        self._lists: dict[str, tuple[float, ServerTools]] = {}
        self._locks: dict[str, asyncio.Lock] = {}

    def __iter__(self) -> Iterator[ToolServer]:
        return iter(self._servers.values())

    @property
    def names(self) -> list[str]:
        """The names of all servers."""
        return [*self._servers]

    def named(self, name: str) -> ToolServer | None:
        """Return the server of a name, or None."""
        return self._servers.get(name)

    def at(self, url: str) -> ToolServer | None:
        """Return the server at a URL, or None."""
        return next((one for one in self if one.url.rstrip("/") == url.rstrip("/")), None)

    def session(self, server: ToolServer) -> ToolSession:
        """Return a new session with a server."""
        return ToolSession(server, self._timeout)

    async def tools_of(self, server: ToolServer) -> ServerTools:
        """Return the tools of a server. A list is cached for `LIST_SECONDS`, an error for
        `FAILURE_SECONDS`."""
        async with self._locks.setdefault(server.name, asyncio.Lock()):
            until, found = self._lists.get(server.name, (0.0, ServerTools()))
            if time.monotonic() < until:
                return found
            try:
                async with self.session(server) as session:
                    found, seconds = ServerTools(await session.list_tools()), LIST_SECONDS
            except ToolServerError as error:
                found, seconds = ServerTools(error=str(error)), FAILURE_SECONDS
                log_event(
                    _log,
                    logging.WARNING,
                    "the tools of a tool server cannot be listed",
                    server=server.name,
                    error=str(error),
                )
            self._lists[server.name] = time.monotonic() + seconds, found
            return found

    def close(self) -> None:
        """Clear the cached lists. Open sessions are closed by the responses that opened them."""
        self._lists.clear()


def check_package(servers: Sequence[str]) -> None:
    """Check that the package ``mcp`` is installed if there are tool servers.

    Raises:
        MissingDependencyError: names the extra that installs it.
    """
    if servers and find_spec("mcp") is None:
        raise MissingDependencyError("mcp", "mcp", "--mcp-server")


def _pair(text: str) -> tuple[str, str]:
    name, _, value = text.partition("=")
    return name, value
