"""The chat page of the playground in headless Chromium.

Needs the extra `browser` and the program chromium.
"""

from __future__ import annotations

import json
from typing import Any

from support.browser import READY_CONDITION, controls_in_tab_order, open_playground, send_message, wait_until

from penstock.testing import FakePipeline

MARKDOWN = """# Title

Some **bold**, *thin* and `x < 1` text, see [docs](https://example.org/a).

- one
  - inner
- two

| a | b |
|---|---|
| 1 | 2 |

```python
print("<b>")
```

<img src=x onerror=alert(1)> [bad](javascript:alert(1))
"""


async def test_markdown_is_rendered_without_html_and_its_code_can_be_copied() -> None:
    async with open_playground(FakePipeline.saying(MARKDOWN)) as (page, _):
        await send_message(page, "Hi **you**")
        assert await page.locator("article.user .text:visible").inner_text() == "Hi **you**"
        answer = page.locator("article.assistant .markdown")
        assert await answer.locator("h3").inner_text() == "Title"
        assert await answer.locator("strong").inner_text() == "bold"
        assert await answer.locator("em").inner_text() == "thin"
        assert await answer.locator("p code").inner_text() == "x < 1"
        assert await answer.locator("a").get_attribute("href") == "https://example.org/a"
        assert await answer.locator("a").count() == 1
        assert await answer.locator("li").all_inner_texts() == ["one\ninner", "inner", "two"]
        assert await answer.locator("td").all_inner_texts() == ["1", "2"]
        assert await answer.locator("pre").inner_text() == 'print("<b>")'
        assert await answer.locator("img").count() == 0
        assert "<img src=x" in await answer.inner_text()
        await page.context.grant_permissions(["clipboard-read", "clipboard-write"])
        await answer.get_by_role("button", name="Copy code").click()
        await answer.get_by_role("button", name="Copied").wait_for()
        assert await page.evaluate("navigator.clipboard.readText()") == 'print("<b>")'


async def test_conversations_are_stored_branched_and_deleted() -> None:
    model = FakePipeline.answering(lambda prompt: f"I see {prompt.count('user: ')}.")
    async with open_playground(model) as (page, _):
        await send_message(page, "First")
        await send_message(page, "Second")
        await page.reload()
        await wait_until(page, READY_CONDITION)
        names = page.locator("#conversations option")
        assert await names.all_inner_texts() == ["New conversation", "First"]
        await page.select_option("#conversations", label="First")
        visible_texts = page.locator("article .text:visible")
        assert await visible_texts.all_inner_texts() == ["First", "I see 1.", "Second", "I see 2."]
        branch = page.locator("article.assistant").first.get_by_role("button", name="Branch")
        await branch.click()
        assert await visible_texts.all_inner_texts() == ["First", "I see 1."]
        await send_message(page, "Other")
        assert await visible_texts.all_inner_texts() == ["First", "I see 1.", "Other", "I see 2."]
        conversations = json.loads(await page.evaluate("localStorage.getItem('penstock.conversations')"))
        assert [[message["text"] for message in entry["messages"]] for entry in conversations] == [
            ["First", "I see 1.", "Other", "I see 2."],
            ["First", "I see 1.", "Second", "I see 2."],
        ]
        await page.click("#delete-chat")
        assert await names.all_inner_texts() == ["New conversation", "First"]
        assert await page.locator("article").count() == 0


async def test_an_invalid_json_schema_is_marked_and_a_valid_one_is_sent() -> None:
    async with open_playground(FakePipeline.saying("{}"), "status of 400") as (page, _):
        bodies: list[Any] = []
        page.on(
            "request",
            lambda request: (
                bodies.append(request.post_data_json) if request.url.endswith("completions") else None
            ),
        )
        await page.click("#schema-box summary")
        await page.fill("#schema", "[1")
        await page.fill("#draft", "Hi")
        await page.press("#draft", "Enter")
        assert await page.get_attribute("#schema", "aria-invalid") == "true"
        assert await page.inner_text("#schema-error")
        assert not bodies
        await page.click("#example-schema")
        assert await page.get_attribute("#schema", "aria-invalid") == "false"
        await page.press("#draft", "Enter")
        await page.wait_for_selector("article.assistant")
        assert bodies[0]["response_format"]["type"] == "json_schema"
        assert bodies[0]["response_format"]["json_schema"]["schema"]["required"] == ["name", "age"]
        await page.wait_for_selector("article .error p")  # this server supports no grammars


async def test_each_control_of_the_chat_has_a_name() -> None:
    """Each control that Tab reaches has a name for screen readers."""
    async with open_playground(FakePipeline.saying("Hello.")) as (page, _chat):
        await send_message(page, "Hi")
        await page.click("#new-chat")
        await send_message(page, "Again")
        controls = await controls_in_tab_order(page)
        assert {"conversations", "delete-chat", "new-chat", "draft", "model"} <= {
            name for name, _ in controls
        }
        assert all(label for _, label in controls), controls
