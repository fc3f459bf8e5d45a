"""Sessions with MCP tool servers, and cached tool lists. The test servers use the package mcp."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from importlib.util import find_spec

import pytest
from support.tool_servers import ServedTools, broken_server, tool_server

from penstock.errors import ConfigError, MissingDependencyError
from penstock.serve.config import ServeConfig
from penstock.serve.mcp import tool_server as tool_server_module
from penstock.serve.mcp.tool_server import ToolServers, check_package
from penstock.serve.mcp.tool_session import MAX_OUTPUT_CHARACTERS, ToolServer, ToolServerError, ToolSession

needs_mcp = pytest.mark.skipif(find_spec("mcp") is None, reason="needs the package mcp")


@pytest.fixture(scope="module")
def calculator() -> Iterator[ServedTools]:
    with tool_server() as running_server:
        yield running_server


@needs_mcp
async def test_tools_are_listed_and_called(calculator: ServedTools) -> None:
    async with ToolSession(ToolServer("t", calculator.url), 20) as session:
        tools = {tool.name: tool for tool in await session.list_tools()}
        assert list(tools) == ["add", "fail", "slow", "long", "get/picture"]
        assert tools["add"].description == "Add two numbers."
        assert tools["add"].input_schema["required"] == ["a", "b"]
        assert [tool.name for tool in tools.values() if tool.is_read_only] == ["add"]
        outputs = await asyncio.gather(*(session.call("add", {"a": n, "b": 2}) for n in range(4)))
        assert [output.output for output in outputs] == ["2", "3", "4", "5"]
        image_result = await session.call("get/picture", {})
        assert image_result.output == "A dot:\n[image image/png, not text]"
        long_output = (await session.call("long", {})).output
        assert long_output is not None
        assert long_output.startswith("x" * MAX_OUTPUT_CHARACTERS + "\n[")
        assert long_output.endswith(f"[{300_000 - MAX_OUTPUT_CHARACTERS} more characters]")


@needs_mcp
async def test_errors_of_a_tool_are_in_the_output(calculator: ServedTools) -> None:
    async with ToolSession(ToolServer("t", calculator.url), 20) as session:
        failed_call = await session.call("fail", {})
        assert failed_call.error is not None
        assert failed_call.error["type"] == "mcp_tool_execution_error"
        assert failed_call.text.startswith("Error: ")
        invalid_call = await session.call("add", {"a": "x"})
        assert invalid_call.error is not None
        assert "valid integer" in invalid_call.text
    async with ToolSession(ToolServer("t", calculator.url), 0.5) as session:
        timed_out_call, successful_call = await asyncio.gather(
            session.call("slow", {}), session.call("add", {"a": 1, "b": 1})
        )
        assert timed_out_call.error == {
            "type": "http_error",
            "code": 504,
            "message": "the tool server t has not answered within 0.5 seconds",
        }
        assert successful_call.output == "2"


@needs_mcp
async def test_a_broken_or_unreachable_server_is_reported() -> None:
    with broken_server() as url:
        for address in (url, "http://127.0.0.1:9/mcp"):
            async with ToolSession(ToolServer("t", address), 20) as session:
                output = await session.call("add", {})
                assert output.error is not None
                assert (output.error["type"], output.error["code"]) == ("http_error", 502)
                with pytest.raises(ToolServerError, match="the tool server t cannot be used"):
                    await session.list_tools()


@needs_mcp
async def test_a_token_is_sent_and_not_printed() -> None:
    with tool_server("secret") as authenticated_server:
        servers = ToolServers([f"g={authenticated_server.url}"], ["g=secret"], 20)
        (server,) = servers
        assert "secret" not in repr(server)
        assert len((await servers.tools_of(server)).tools) == 5
        (server,) = servers_without_token = ToolServers([f"g={authenticated_server.url}"], [], 20)
        assert (await servers_without_token.tools_of(server)).error is not None


@needs_mcp
async def test_tool_lists_and_failures_are_cached_and_lists_expire(
    calculator: ServedTools, monkeypatch: pytest.MonkeyPatch
) -> None:
    servers = ToolServers([f"t={calculator.url}", "away=http://127.0.0.1:9/mcp"], [], 20)
    reachable, unreachable = servers
    num_list_requests_before = calculator.num_list_requests
    first_list, *other_lists = await asyncio.gather(*(servers.tools_of(reachable) for _ in range(5)))
    assert all(tool_list is first_list for tool_list in other_lists)
    assert calculator.num_list_requests == num_list_requests_before + 1
    failed_list = await servers.tools_of(unreachable)
    assert failed_list.error is not None
    assert await servers.tools_of(unreachable) is failed_list
    monkeypatch.setattr(tool_server_module, "LIST_CACHE_SECONDS", -1.0)
    servers.close()
    await servers.tools_of(reachable)
    await servers.tools_of(reachable)
    assert calculator.num_list_requests == num_list_requests_before + 3
    assert servers.by_url(calculator.url + "/") is reachable
    assert servers.by_url("http://example.org/mcp") is None


def test_a_missing_package_is_reported_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tool_server_module, "find_spec", lambda name: None)
    check_package(())
    with pytest.raises(MissingDependencyError, match=r"pip install 'penstock-llm\[mcp\]'"):
        check_package(("a=http://localhost/mcp",))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"mcp_server": ["http://localhost/mcp"]}, "mcp_server"),
        ({"mcp_server": ["a=ftp://localhost/mcp"]}, "mcp_server"),
        ({"mcp_server": ["a=http://x/", "a=http://y/"]}, "different names"),
        ({"mcp_server": ["a=http://x/"], "mcp_token": ["b=1"]}, "names 'b'"),
    ],
)
def test_invalid_settings_are_refused(values: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ServeConfig.from_flat(values)
