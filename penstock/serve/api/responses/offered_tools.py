"""Finds the tools of tool servers (MCP) that a request offers to the model."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from pydantic import Field

from penstock.serve.api.parameters import UndeclaredFieldChecker
from penstock.serve.api.schemas import RequestBody
from penstock.serve.api.unsupported import RefusedField
from penstock.serve.api.validation import validated
from penstock.serve.http.problems import RequestProblem
from penstock.serve.mcp.tool_server import ServerTools, ToolServers
from penstock.serve.mcp.tool_session import ServerTool, ToolServer
from penstock.serve.services import Services

MCP_TOOL_TYPE = "mcp"
"""The value of ``type`` for an entry of ``tools`` that stands for the tools of a tool server."""
_INVALID_NAME_CHARACTERS = re.compile(r"[^a-zA-Z0-9_.-]")
_MAX_NAME_LENGTH = 64
"""Maximum number of characters of a function name."""
_MAX_LISTED_NAMES = 20
"""Maximum number of tool or server names in an error message."""


class ToolFilter(RequestBody):
    """A filter of the tools of a server. A tool must satisfy all members that are present."""

    tool_names: list[str] | None = None
    read_only: bool | None = None
    """The required value of the tool's annotation ``readOnlyHint``."""

    def matches(self, tool: ServerTool) -> bool:
        """Return whether a tool matches. A filter without members matches no tool."""
        if self.tool_names is None and self.read_only is None:
            return False
        is_named = self.tool_names is None or tool.name in self.tool_names
        return is_named and self.read_only in (None, tool.is_read_only)


class ApprovalFilter(RequestBody):
    """Filters for tools whose calls always require the client's approval, or never do."""

    always: ToolFilter | None = None
    never: ToolFilter | None = None


class McpTool(RequestBody):
    """A tool of type ``mcp``. It offers the tools of a server that is configured with ``--mcp-server``."""

    unsupported: ClassVar[Mapping[str, RefusedField]] = {
        "allowed_callers": RefusedField("the model calls tools directly", (["direct"],)),
        "authorization": RefusedField("the server sends the token of --mcp-token"),
        "connector_id": RefusedField("the server has no connectors: send server_label"),
        "defer_loading": RefusedField("all tools are in the prompt", accepts_all=True),
        "headers": RefusedField("the server sends the token of --mcp-token", ({},)),
        "server_description": RefusedField("chat templates do not read it", accepts_all=True),
        "tunnel_id": RefusedField("the server has no tunnels: send server_label"),
    }

    type: Literal["mcp"]
    server_label: str = Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")
    server_url: str | None = None
    """The URL of a configured server. If present, this URL and not ``server_label`` selects the server."""
    allowed_tools: list[str] | ToolFilter | None = None
    require_approval: Literal["always", "never"] | ApprovalFilter | None = None

    def allows(self, tool: ServerTool) -> bool:
        """Return whether the request allows a tool."""
        allowed_tools = self.allowed_tools
        if isinstance(allowed_tools, ToolFilter):
            return allowed_tools.matches(tool)
        return allowed_tools is None or tool.name in allowed_tools

    def needs_approval(self, tool: ServerTool, default_approval: str) -> bool:
        """Return whether calls of a tool require approval.

        The result is `default_approval` if ``require_approval`` is absent, or if it has neither a filter
        ``never`` nor a matching filter ``always``.
        """
        rule = self.require_approval
        if not isinstance(rule, ApprovalFilter):
            return (rule or default_approval) == "always"
        if rule.always is not None and rule.always.matches(tool):
            return True
        if rule.never is not None and rule.never.matches(tool):
            return False
        # A filter "never" means that all other tools require approval.
        return rule.never is not None or default_approval == "always"


@dataclass(frozen=True)
class OfferedTool:
    """A tool of a tool server that the model may call."""

    label: str
    """The label of the server in the request."""
    server: ToolServer
    tool: ServerTool
    needs_approval: bool
    field_path: str
    """The field of the request that offers the tool."""

    def function(self, name: str) -> dict[str, object]:
        """Return the tool as a function of a chat request."""
        function = {"name": name, "description": self.tool.description, "parameters": self.tool.input_schema}
        return {"type": "function", "function": function}


@dataclass(frozen=True)
class ToolListing:
    """The content of an ``mcp_list_tools`` item: the tools of a server, or an error."""

    label: str
    tools: Sequence[Mapping[str, object]] = ()
    error: str | None = None


@dataclass(frozen=True)
class OfferedTools:
    """All tools of tool servers that a request offers."""

    functions: Mapping[str, OfferedTool] = field(default_factory=dict)
    """Function name in the prompt -> tool."""
    listings: Sequence[ToolListing] = ()
    implied_servers: Sequence[str] = ()
    """Names of the servers whose tools are offered because the request names no server."""

    def function_name(self, label: str, tool_name: str) -> str:
        """Return the function name of a tool in the prompt.

        If the request does not offer the tool, the result is the tool's name in the form of a function name.
        """
        for name, offered_tool in self.functions.items():
            if (offered_tool.label, offered_tool.tool.name) == (label, tool_name):
                return name
        return _plain_name(tool_name)

    def function_names(self, label: str) -> list[str]:
        """Return the function names of the tools of a server."""
        return [name for name, offered_tool in self.functions.items() if offered_tool.label == label]


def tool_servers(services: Services) -> ToolServers:
    """Return the tool servers. The first call reads the configuration.

    Raises:
        MissingDependencyError: the package ``mcp`` is not installed.
    """
    config = services.config
    return services.states.get_or_make(
        ToolServers, lambda: ToolServers(config.mcp_server, config.mcp_token, config.mcp_timeout)
    )


async def find_offered_tools(services: Services, raw: object) -> OfferedTools:
    """Return the tools of tool servers that a request offers.

    A request offers the tools of the servers that it names. If it names none, it offers the tools of all
    servers, or no tools if it has ``tool_choice: "none"`` or the chat template omits tools. If a server
    cannot list its tools, its `ToolListing` has an error and no tools.

    Args:
        services: the objects that routes use.
        raw: the decoded body of the request, which has not been validated.

    Raises:
        RequestProblem: 400; a tool of type ``mcp`` is invalid, names a server that is not configured, repeats
            the label of another tool, or allows a tool that the server does not have.
        MissingDependencyError: the package ``mcp`` is not installed.
    """
    raw_tools = raw.get("tools") if isinstance(raw, dict) else None
    tools = (
        [tool if isinstance(tool, dict) else {} for tool in raw_tools] if isinstance(raw_tools, list) else []
    )
    raw_mcp_tools = [
        (f"tools[{index}]", tool) for index, tool in enumerate(tools) if tool.get("type") == MCP_TOOL_TYPE
    ]
    if (not raw_mcp_tools and not services.config.mcp_server) or not isinstance(raw, dict):
        return OfferedTools()
    servers = tool_servers(services)
    mcp_tools = [
        (field_path, _validated_mcp_tool(services, tool, field_path)) for field_path, tool in raw_mcp_tools
    ]
    implied_servers = [] if raw_mcp_tools or raw.get("tool_choice") == "none" else servers.names
    if implied_servers and not services.tokenizer.template_mentions("tools"):
        services.warn_once(["tools of tool servers, which the chat template omits"])
        implied_servers = []
    mcp_tools += [("tools", McpTool(type="mcp", server_label=name)) for name in implied_servers]
    configured_servers = [
        _configured_server(servers, mcp_tool, field_path) for field_path, mcp_tool in mcp_tools
    ]
    labels = [mcp_tool.server_label for _, mcp_tool in mcp_tools]
    for index, label in enumerate(labels):
        if label in labels[:index]:
            field_path = f"{mcp_tools[index][0]}.server_label"
            raise RequestProblem(
                400, f"{field_path} is {label!r}, but another tool has the same label", param=field_path
            )
    tool_lists = await asyncio.gather(*(servers.tools_of(server) for server in configured_servers))
    taken_names = {str(tool.get("name")) for tool in tools if tool.get("type") in ("function", "custom")}
    functions: dict[str, OfferedTool] = {}
    listings = []
    default_approval = services.config.mcp_require_approval
    for (field_path, mcp_tool), server, tool_list in zip(
        mcp_tools, configured_servers, tool_lists, strict=True
    ):
        _check_allowed(mcp_tool, tool_list, field_path)
        allowed_tools = [tool for tool in tool_list.tools if mcp_tool.allows(tool)]
        listings.append(
            ToolListing(
                mcp_tool.server_label, [_tool_description(tool) for tool in allowed_tools], tool_list.error
            )
        )
        for tool in allowed_tools:
            name = _free_name(mcp_tool.server_label, tool.name, taken_names)
            taken_names.add(name)
            functions[name] = OfferedTool(
                mcp_tool.server_label,
                server,
                tool,
                mcp_tool.needs_approval(tool, default_approval),
                field_path,
            )
    return OfferedTools(functions, listings, implied_servers)


def _validated_mcp_tool(services: Services, raw: Mapping[str, object], field_path: str) -> McpTool:
    """Validate and return a tool of type ``mcp``."""
    try:
        mcp_tool = validated(McpTool, raw)
    except RequestProblem as problem:
        param = f"{field_path}.{problem.param}" if problem.param else field_path
        message = problem.message.replace(problem.param, param, 1) if problem.param else problem.message
        raise RequestProblem(400, message, param=param, code=problem.code) from None
    UndeclaredFieldChecker(services.config.unknown_fields == "error", services.log).check(
        mcp_tool, field_path
    )
    return mcp_tool


def _configured_server(servers: ToolServers, mcp_tool: McpTool, field_path: str) -> ToolServer:
    """Return the configured server that a tool of type ``mcp`` names.

    Raises:
        RequestProblem: 400; the server is not configured.
    """
    url = mcp_tool.server_url
    server = servers.by_name(mcp_tool.server_label) if url is None else servers.by_url(url)
    if server is not None:
        return server
    param = f"{field_path}.{'server_label' if url is None else 'server_url'}"
    requested_server = repr((mcp_tool.server_label if url is None else url)[:200])
    names = servers.names
    hint = f"send server_label {_joined_names(names)}" if names else "set tool servers with --mcp-server"
    raise RequestProblem(
        400,
        f"{param} is {requested_server}, which is not a tool server in the configuration: {hint}",
        param=param,
        code="unsupported_value",
    )


def _check_allowed(mcp_tool: McpTool, tool_list: ServerTools, field_path: str) -> None:
    """Check that the server has the tools in ``allowed_tools``, unless the server failed to list its tools.

    Raises:
        RequestProblem: 400; the server does not have one of the tools.
    """
    allowed_tools = mcp_tool.allowed_tools
    path = f"{field_path}.allowed_tools"
    if isinstance(allowed_tools, ToolFilter):
        allowed_tools, path = allowed_tools.tool_names, f"{path}.tool_names"
    if tool_list.error is not None:
        return
    tool_names = [tool.name for tool in tool_list.tools]
    for name in allowed_tools or ():
        if name not in tool_names:
            raise RequestProblem(
                400,
                f"{path} has {name[:200]!r}, but the server has only {_joined_names(tool_names)}",
                param=path,
            )


def _joined_names(names: Sequence[str]) -> str:
    num_hidden = len(names) - _MAX_LISTED_NAMES
    return ", ".join(names[:_MAX_LISTED_NAMES]) + (f" and {num_hidden} more" if num_hidden > 0 else "")


def _tool_description(tool: ServerTool) -> dict[str, object]:
    return {
        "name": tool.name,
        "description": tool.description,
        "input_schema": tool.input_schema,
        "annotations": tool.annotations,
    }


def _plain_name(tool_name: str) -> str:
    """Return the name of a tool in the form of a function name."""
    return _INVALID_NAME_CHARACTERS.sub("_", tool_name)[:_MAX_NAME_LENGTH]


def _free_name(label: str, tool_name: str, taken_names: Iterable[str]) -> str:
    """Return an unused function name. It begins with the server label if the tool's name is in use."""
    name = _plain_name(tool_name)
    if name not in taken_names:
        return name
    name = _plain_name(f"{label}_{tool_name}")
    suffix_number = 2
    while name in taken_names:
        name = _plain_name(f"{label}_{tool_name}"[: _MAX_NAME_LENGTH - 4]) + f"_{suffix_number}"
        suffix_number += 1
    return name
