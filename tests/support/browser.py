"""The playground in headless Chromium, controlled by Playwright."""

from __future__ import annotations

import asyncio
import shutil
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import uvicorn
from support.in_process_server import InProcessServer, run_in_process

from penstock.serve.app import create_app
from penstock.testing import FakePipeline

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
READY_CONDITION = "document.getElementById('model').value === 'demo'"
FOCUSED_SCRIPT = """() => {
  const element = document.activeElement;
  const labels = [...(element.labels ?? [])].map((label) => label.textContent).join(" ");
  const name = element.getAttribute("aria-label") || labels || element.textContent || "";
  return [element.tagName, name.trim(), element.id];
}"""
"""Returns tag, name and id of the focused element."""
FOCUS_START_SCRIPT = (
    "document.body.tabIndex = -1, document.body.focus(), document.body.removeAttribute('tabindex')"
)
"""JavaScript that moves the focus to the start of the page."""


@asynccontextmanager
async def open_page(url: str, expected_error: str = "nothing", **options: Any) -> AsyncIterator[Any]:
    """Open a page. The test fails if the page reports an unexpected error, and is skipped without a browser.

    Args:
        url: the address.
        expected_error: errors whose message contains this text are ignored.
        options: arguments of Playwright's ``new_page``, such as ``color_scheme``.
    """
    playwright = pytest.importorskip("playwright.async_api")
    if CHROMIUM is None:
        pytest.skip("needs chromium")
    errors: list[str] = []
    async with playwright.async_playwright() as driver:
        browser = await driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = await browser.new_page(**options)
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
        await page.goto(url)
        yield page
        await browser.close()
    assert not [message_text for message_text in errors if expected_error not in message_text]


@asynccontextmanager
async def open_playground(
    pipeline: FakePipeline, expected_error: str = "nothing", fragment: str = "", **config: Any
) -> AsyncIterator[tuple[Any, InProcessServer]]:
    """Open the playground of a server with a fake model. `config` are options of `run_in_process`.

    Unless the server has an API key, wait until the playground has read the list of models.
    """
    async with run_in_process(pipeline, **config) as server:
        server.services.gate.open()
        server.services.metrics.add_engine(server.services.worker)
        listener = socket.create_server(("127.0.0.1", 0))
        uvicorn_server = uvicorn.Server(uvicorn.Config(create_app(server.services), log_config=None))
        server_task = asyncio.create_task(uvicorn_server.serve(sockets=[listener]))
        try:
            url = f"http://127.0.0.1:{listener.getsockname()[1]}/{fragment}"
            async with open_page(url, expected_error) as page:
                if not config.get("api_key"):
                    await wait_until(page, READY_CONDITION)
                yield page, server
        finally:
            uvicorn_server.should_exit = True
            await server_task


async def wait_until(page: Any, condition: str) -> None:
    """Wait until a JavaScript expression is true, for at most 60 s.

    The page's content security policy forbids Playwright's ``wait_for_function``.
    """
    async with asyncio.timeout(60):
        while not await page.evaluate(condition):
            await asyncio.sleep(0.02)


async def send_message(page: Any, text: str) -> None:
    """Send a message and wait for the end of the answer."""
    count = await page.locator("article.assistant").count()
    await page.fill("#draft", text)
    await page.press("#draft", "Enter")
    await wait_until(
        page,
        f"document.querySelectorAll('article.assistant').length === {count + 1}"
        " && document.getElementById('stop-answer').hidden",
    )


async def controls_in_tab_order(page: Any, count: int = 90) -> list[tuple[str, str]]:
    """Press Tab ``count`` times. Return (element id, accessible name) of each control that it reaches."""
    await page.evaluate(FOCUS_START_SCRIPT)
    controls: list[tuple[str, str]] = []
    for _step in range(count):
        await page.keyboard.press("Tab")
        tag, name, element_id = await page.evaluate(FOCUSED_SCRIPT)
        if tag != "BODY":
            controls.append((element_id, name))
    return controls
