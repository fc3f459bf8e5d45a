"""The comparison and metrics pages, API keys and the keyboard in the playground, in headless Chromium."""

from __future__ import annotations

import asyncio
import re
import time
from typing import Any

import pytest
from support.browser import controls_in_tab_order, open_playground, send_message, wait_until
from support.kv_contexts import kv_manager

from penstock.pipelines.core import TextContext
from penstock.testing import FakePipeline

COMPARISON_ENDED = (
    "document.getElementById('compare-sides').ariaBusy === 'false' && document.querySelector('.numbers b')"
)


def make_endless_pipeline() -> FakePipeline:
    """Return a pipeline that generates one letter every few milliseconds, without an end."""

    def choose(context: TextContext) -> int:
        time.sleep(0.005)
        return ord("x")

    return FakePipeline(choose)


def record_bodies(page: Any) -> list[dict[str, Any]]:
    """Return a list to which the body of each later chat request is appended."""
    bodies: list[dict[str, Any]] = []
    page.on(
        "request",
        lambda request: (
            bodies.append(request.post_data_json) if request.url.endswith("completions") else None
        ),
    )
    return bodies


async def send_comparison(page: Any, text: str) -> None:
    await page.fill("#draft", text)
    await page.press("#draft", "Enter")
    await wait_until(page, COMPARISON_ENDED)


async def test_two_settings_are_compared() -> None:
    model = FakePipeline.answering(lambda prompt: "Ahoy!" if "pirate" in prompt else "Hello!")
    async with open_playground(model, adapters=("tone",)) as (page, _):
        bodies = record_bodies(page)
        await page.fill("[data-field=temperature]", "0.5")
        await page.get_by_role("link", name="Compare").click()
        assert await page.locator("#log").is_hidden()
        side_a, side_b = page.get_by_role("region", name="Side A"), page.get_by_role("region", name="Side B")
        await side_b.get_by_label("System prompt").fill("You are a pirate.")
        await side_b.get_by_label("Temperature").fill("0")
        await side_b.get_by_label("Model").select_option("tone")
        await send_comparison(page, "Hi")
        assert await side_a.locator("article .markdown").inner_text() == "Hello!"
        assert await side_b.locator("article .markdown").inner_text() == "Ahoy!"
        plain_body, pirate_body = sorted(bodies, key=lambda body: len(body["messages"]))
        assert (plain_body["model"], plain_body["temperature"], plain_body["messages"]) == (
            "demo",
            0.5,
            [{"role": "user", "content": "Hi"}],
        )
        assert (pirate_body["model"], pirate_body["temperature"]) == ("tone", 0)
        assert pirate_body["messages"][0] == {"role": "system", "content": "You are a pirate."}
        assert await page.inner_text("#compare-note") == "The answers differ from character 1 on."
        assert await page.inner_text("#compare-prompt article .text:visible") == "Hi"
        await side_b.get_by_label("System prompt").fill("")
        await page.press("#draft", "Enter")  # sends the last message again
        await wait_until(page, "document.getElementById('compare-note').textContent.includes('same text')")
        assert [body["messages"][-1] for body in bodies] == [{"role": "user", "content": "Hi"}] * 4
        # The chat does not contain the message of the comparison.
        await page.get_by_role("link", name="Chat").click()
        assert await page.locator("#log article").count() == 0


async def test_invalid_numbers_are_not_sent() -> None:
    async with open_playground(FakePipeline.saying("Hello!")) as (page, _):
        await page.get_by_role("link", name="Compare").click()
        bodies = record_bodies(page)
        await page.get_by_role("region", name="Side B").get_by_label("Temperature").fill("3")
        await page.fill("#draft", "Hi")
        await page.press("#draft", "Enter")
        assert not bodies
        assert await page.input_value("#draft") == "Hi"
        focus_condition = (
            "document.activeElement === document.querySelectorAll('.side')[1].querySelector('input')"
        )
        await wait_until(page, focus_condition)


async def test_both_answers_are_streamed_and_stopped_together() -> None:
    async with open_playground(make_endless_pipeline()) as (page, chat):
        await page.get_by_role("link", name="Compare").click()
        await page.fill("#draft", "Hi")
        await page.press("#draft", "Enter")
        texts = (
            "[...document.querySelectorAll('.side-answer .text.markdown')].map((e) => e.textContent.length)"
        )
        await wait_until(page, f"{texts}.filter((length) => length > 20).length === 2")
        assert await page.get_attribute("#compare-sides", "aria-busy") == "true"
        await page.get_by_role("button", name="Stop").click()
        finish_notes = page.locator(".side-answer .finish")
        await finish_notes.nth(1).wait_for()
        assert await finish_notes.all_inner_texts() == ["stopped by you", "stopped by you"]
        assert await page.get_attribute("#compare-sides", "aria-busy") == "false"
        async with asyncio.timeout(30):
            while chat.services.worker.stats.num_running:
                await asyncio.sleep(0.02)
        await page.fill("#draft", "Again")
        await page.press("#draft", "Enter")
        await wait_until(page, "document.getElementById('compare-sides').ariaBusy === 'true'")
        await page.keyboard.press("Escape")
        await wait_until(page, "document.getElementById('compare-sides').ariaBusy === 'false'")


async def test_metrics_are_shown() -> None:
    model = FakePipeline.saying("Hello!", kv=kv_manager(1000))
    async with open_playground(model, fragment="#metrics") as (page, chat):
        assert await page.title() == "Penstock: metrics"
        assert await page.locator("#composer").is_hidden()
        rows = page.locator("#metrics-rows tr")
        await wait_until(page, "document.getElementById('metrics-running').textContent === '0'")
        for _ in range(3):
            await chat.chat(messages=[{"role": "user", "content": "Hi " * 100}])
        await wait_until(
            page, "document.getElementById('metrics-rows').rows[2].cells[2].textContent[0] === '3'"
        )
        cells = {row.split("\t")[0]: row.split("\t")[1:] for row in await rows.all_inner_texts()}
        assert cells["Output throughput"][1] == "21 tokens"  # three outputs of 7 tokens: Hello! and EOS
        assert re.fullmatch(r"\d+\.\d tokens/s|\d+ tokens/s", cells["Output throughput"][0])
        for name in ("Time to first token, median", "Inter-token latency, median"):
            assert re.fullmatch(r"[\d.]+ m?s, 95 % below [\d.]+ m?s", cells[name][0]), cells
        stats = chat.services.worker.stats
        hit_rate = stats.num_prefix_hit_tokens / stats.num_prefix_query_tokens
        assert 0.5 < hit_rate < 0.7  # two of the three prompts are cached
        assert cells["Prefix cache hit rate"] == [f"{100 * hit_rate:.0f} %"] * 2
        assert "of 1,000 blocks" in await page.inner_text("#metrics-kv")
        label = await page.get_attribute("#metrics-rate-line", "aria-label")
        assert re.fullmatch(r"Output throughput in the last minute, at most [\d.]+ tokens/s", label or "")
        await page.check("#metrics-announce")
        await wait_until(
            page, "document.getElementById('announce').textContent.includes('0 running, 0 waiting')"
        )


async def test_metrics_count_running_requests() -> None:
    async with open_playground(make_endless_pipeline(), fragment="#metrics") as (page, chat):
        running_tasks = [
            asyncio.create_task(chat.chat(messages=[{"role": "user", "content": "Hi"}])) for _ in "ab"
        ]
        await wait_until(page, "document.getElementById('metrics-running').textContent === '2'")
        await wait_until(page, "parseInt(document.getElementById('metrics-tokens').textContent) > 10")
        for task in running_tasks:
            task.cancel()
        await wait_until(page, "document.getElementById('metrics-running').textContent === '0'")


async def test_the_metrics_page_works_behind_a_proxy_with_a_key() -> None:
    """The page shows a form for the key, and sends the key with later requests."""
    async with open_playground(FakePipeline.saying("Hello!"), "401") as (page, _):

        async def check_key(route: Any) -> None:
            if route.request.headers.get("authorization") == "Bearer secret":
                await route.continue_()
            else:
                error = {"error": {"message": "an API key is required", "code": "missing_api_key"}}
                await route.fulfill(status=401, json=error)

        await page.route("**/metrics", check_key)
        await page.get_by_role("link", name="Metrics").click()
        await page.locator("#key-form").wait_for()
        assert await page.inner_text("#metrics-error") == "an API key is required"
        assert await page.evaluate("document.activeElement.id") == "key"
        await page.fill("#key", "secret")
        await page.press("#key", "Enter")
        await wait_until(page, "document.getElementById('metrics-running').textContent === '0'")
        assert await page.inner_text("#metrics-error") == ""
        assert await page.locator("#key-form").is_hidden()


async def test_the_chat_page_sends_the_api_key() -> None:
    async with open_playground(FakePipeline.saying("Hello!"), "401", api_key=("secret",)) as (page, _):
        await page.fill("#key", "secret")
        await page.press("#key", "Enter")
        await wait_until(page, "document.getElementById('model').value === 'demo'")
        await send_message(page, "Hi")
        assert await page.inner_text("article.assistant .markdown") == "Hello!"


@pytest.mark.parametrize("name", ["Compare", "Metrics"])
async def test_controls_of_each_page_are_reached_by_keyboard(name: str) -> None:
    """Tab reaches the first controls in the order of the page. Each reached control has a name."""
    async with open_playground(FakePipeline.saying("Hello!")) as (page, _):
        await page.get_by_role("link", name=name).focus()
        await page.keyboard.press("Enter")
        await wait_until(page, f"document.title === 'Penstock: {name.lower()}'")
        assert await page.get_by_role("link", name=name).get_attribute("aria-current") == "page"
        controls = await controls_in_tab_order(page, 40)
        assert all(label for _, label in controls), controls
        labels = [label for _, label in controls]
        first_labels = ["Skip to the main content", "Model", "Chat", "Compare", "Metrics"]
        for label, start in zip(labels, first_labels, strict=False):
            assert label.startswith(start), labels
        expected_texts = ["Temperature", "Top p", "Seed"] if name == "Compare" else []
        for text in expected_texts:
            assert sum(text in label for label in labels[: 40 if expected_texts else 0]) >= 2, text
        num_unnamed = await page.evaluate(
            "[...document.querySelectorAll('svg[role=img], section, nav, form')]"
            ".filter((e) => e.checkVisibility() && !e.ariaLabel && !e.getAttribute('aria-labelledby')"
            " && e.tagName !== 'FORM').length"
        )
        assert num_unnamed == 0
