"""Translates the tools and the tool choice of Responses requests to the format of chat requests."""

from __future__ import annotations

from penstock.serve.api.responses.offered_tools import MCP_TOOL_TYPE, OfferedTools
from penstock.serve.api.responses.response_schema import ResponsesBody, ResponseTool, ToolSelection
from penstock.serve.http.problems import RequestProblem

CUSTOM_ARGUMENT = "input"
"""The name of the only parameter of a function that stands for a custom tool."""


def chat_tools(
    body: ResponsesBody, offered_tools: OfferedTools, hosted_tools: str
) -> tuple[list[dict[str, object]], list[str]]:
    """Return the tools of the chat request, and the field of the Responses request that each tool comes from.

    Args:
        body: the request.
        offered_tools: the tools of tool servers.
        hosted_tools: ``skip`` leaves out hosted tools, ``refuse`` refuses a request with hosted tools.

    Raises:
        RequestProblem: 400; the message names the tool.
    """
    tools: list[dict[str, object]] = []
    field_paths: list[str] = []
    for index, tool in enumerate(body.tools or ()):
        field_path = f"tools[{index}]"
        if tool.type == MCP_TOOL_TYPE:
            continue
        if tool.is_server_side:
            if hosted_tools == "refuse":
                raise RequestProblem(
                    400,
                    f"{field_path} is the hosted tool {tool.type!r}, and this server has no hosted tools: "
                    "send function tools (--hosted-tools skip omits hosted tools)",
                    param=f"{field_path}.type",
                    code="unsupported_value",
                )
            continue
        if tool.name is None:
            raise missing_field_error(f"{field_path}.name")
        tools.append({"type": "function", "function": _function(tool)})
        field_paths.append(field_path)
    for name, offered_tool in offered_tools.functions.items():
        tools.append(offered_tool.function(name))
        field_paths.append(offered_tool.field_path)
    return tools, field_paths


def _function(tool: ResponseTool) -> dict[str, object]:
    function: dict[str, object] = {"name": tool.name, "description": tool.description}
    if tool.type == "function":
        return function | {"parameters": tool.parameters, "strict": tool.strict}
    # Chat templates support only functions. A custom tool becomes a function with one string parameter.
    input_schema = {"type": "string"}
    input_format = tool.format or {}
    if input_format.get("type") == "grammar":
        input_schema["description"] = (
            f"Text of this {input_format.get('syntax')} grammar:\n{input_format.get('definition')}"
        )
    parameters = {
        "type": "object",
        "properties": {CUSTOM_ARGUMENT: input_schema},
        "required": [CUSTOM_ARGUMENT],
        "additionalProperties": False,
    }
    return function | {"parameters": parameters}


def hosted_tool_types(body: ResponsesBody) -> list[str]:
    """Return the types of the hosted tools of a request."""
    return sorted(
        {tool.type for tool in body.tools or () if tool.is_server_side and tool.type != MCP_TOOL_TYPE}
    )


def custom_tool_names(body: ResponsesBody) -> frozenset[str]:
    """Return the names of the custom tools of a request."""
    return frozenset(tool.name or "" for tool in body.tools or () if tool.type == "custom")


def chat_tool_choice(body: ResponsesBody, offered_tools: OfferedTools) -> dict[str, object]:
    """Return the field ``tool_choice`` of the chat request; an empty dict if the request has no tool choice.

    Raises:
        RequestProblem: 400; the message names the invalid field.
    """
    choice = body.tool_choice
    if not isinstance(choice, ToolSelection):
        return {} if choice is None else {"tool_choice": choice}
    match choice.type:
        case "function" | "custom":
            if choice.name is None:
                raise missing_field_error("tool_choice.name")
            return {"tool_choice": _function_choice(choice.name)}
        case "mcp":
            names = _server_function_names(offered_tools, choice.server_label, choice.name, "tool_choice")
            if choice.name is not None:
                return {"tool_choice": _function_choice(names[0])}
            allowed_tools = {"mode": "required", "tools": [_function_choice(name) for name in names]}
            return {"tool_choice": {"type": "allowed_tools", "allowed_tools": allowed_tools}}
        case "allowed_tools":
            return {
                "tool_choice": {
                    "type": "allowed_tools",
                    "allowed_tools": _allowed_tools(choice, offered_tools),
                }
            }
    raise _hosted_tool_error("tool_choice.type", choice.type)


def _server_function_names(
    offered_tools: OfferedTools, label: object, tool_name: object, field_path: str
) -> list[str]:
    """Return the function names of all tools of a tool server, or of one of its tools.

    Args:
        offered_tools: the tools of tool servers.
        label: the label of the server in the request.
        tool_name: the name of a tool; None for all tools of the server.
        field_path: the request field of the tool or tool choice, for error messages.

    Raises:
        RequestProblem: 400; `label` is not a string, or the request offers no such tool.
    """
    if not isinstance(label, str):
        raise missing_field_error(f"{field_path}.server_label")
    names = offered_tools.function_names(label)
    if tool_name is not None:
        names = [name for name in names if offered_tools.functions[name].tool.name == tool_name]
    if not names:
        requested_tool = "tool" if tool_name is None else f"tool {str(tool_name)[:100]!r}"
        param = f"{field_path}.{'server_label' if tool_name is None else 'name'}"
        raise RequestProblem(
            400, f"{param}: the request offers no {requested_tool} of the server {label[:100]!r}", param=param
        )
    return names


def _function_choice(name: str) -> dict[str, object]:
    return {"type": "function", "function": {"name": name}}


def _allowed_tools(choice: ToolSelection, offered_tools: OfferedTools) -> dict[str, object]:
    if choice.mode is None:
        raise missing_field_error("tool_choice.mode")
    if choice.tools is None:
        raise missing_field_error("tool_choice.tools")
    allowed_tools = []
    for index, tool in enumerate(choice.tools):
        field_path = f"tool_choice.tools[{index}]"
        if tool.get("type") == MCP_TOOL_TYPE:
            label, name = tool.get("server_label"), tool.get("name")
            allowed_tools += [
                _function_choice(function)
                for function in _server_function_names(offered_tools, label, name, field_path)
            ]
            continue
        if tool.get("type") not in ("function", "custom"):
            raise _hosted_tool_error(f"{field_path}.type", tool.get("type"))
        name = tool.get("name")
        if not isinstance(name, str):
            raise missing_field_error(f"{field_path}.name")
        allowed_tools.append(_function_choice(name))
    return {"mode": choice.mode, "tools": allowed_tools}


def _hosted_tool_error(field_path: str, tool_type: object) -> RequestProblem:
    return RequestProblem(
        400,
        f"{field_path} is {str(tool_type)[:100]!r}, a hosted tool, and this server has no hosted tools: "
        "choose a function",
        param=field_path,
        code="unsupported_value",
    )


def missing_field_error(field_path: str) -> RequestProblem:
    """Return the error for a required field that is absent."""
    return RequestProblem(
        400, f"{field_path} is required", param=field_path, code="missing_required_parameter"
    )
