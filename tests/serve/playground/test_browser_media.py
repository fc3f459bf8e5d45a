"""Images and speech of the playground in headless Chromium, with demo models, and token probabilities."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.browser import CHROMIUM, open_page, open_playground, send_message, wait_until
from support.documents import ROOT, running_server

from penstock.testing import FakePipeline

needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")
SHAPES = ROOT / "examples" / "shapes.png"


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Serve a model that reads images and a speech model. Yield the URL."""
    pytest.importorskip("playwright.async_api")
    folder = tmp_path_factory.mktemp("playground")
    models = ("--model", "demo-vision", "--model", "demo-voice,task=audio-generation")
    with running_server(folder, *models, "--kv-cache-memory", "8MiB") as address:
        yield address


@needs_chromium
async def test_an_image_file_is_attached_and_described(url: str) -> None:
    async with open_page(url) as page:
        await wait_until(page, "document.getElementById('model').value === 'demo-vision'")
        await page.get_by_role("button", name="Image", exact=True).wait_for()
        await page.set_input_files("#image-file", SHAPES)
        await page.get_by_role("button", name="Remove image 1").wait_for()
        await page.fill("[data-field=temperature]", "0")
        await send_message(page, "What is in the picture?")
        answer = await page.inner_text("article.assistant .markdown")
        assert answer == "There is a red circle and a blue square."
        assert await page.locator("article.user img").get_attribute("alt") == "Image 1"
        assert await page.locator("#attached").is_hidden()


@needs_chromium
async def test_speech_is_played_and_drawn(url: str) -> None:
    async with open_page(url) as page:
        await wait_until(page, "document.getElementById('model').value === 'demo-vision'")
        await page.select_option("#model", "demo-voice")
        await page.get_by_label("Text", exact=True).fill("Please open the door.")
        assert await page.locator("#composer").is_hidden()
        assert await page.get_by_role("link", name="Speech").get_attribute("aria-current") == "page"
        await page.get_by_role("button", name="Speak").click()
        await page.get_by_role("button", name="Play again").wait_for()
        await wait_until(page, "document.getElementById('speech').ariaBusy === 'false'")
        note = await page.inner_text("#speech-note")
        seconds = float(note.split("; ")[1].split(" s of audio")[0])
        assert 0.5 < seconds < 3
        count_drawn_pixels = """() => {
          const wave = document.getElementById("speech-wave");
          const { data } = wave.getContext("2d").getImageData(0, 0, wave.width, wave.height);
          return data.filter((value, i) => i % 4 === 3 && value > 0).length;
        }"""
        assert await page.evaluate(count_drawn_pixels) > 1000
        await page.select_option("#model", "demo-vision")
        assert await page.locator("#composer").is_visible()


async def test_token_probabilities_are_shown(tmp_path: Path) -> None:
    async with open_playground(FakePipeline.saying("Hé!")) as (page, _):
        await page.check("#logprobs")
        await send_message(page, "Hi")
        tokens = page.locator("article.assistant .token")
        assert await tokens.all_inner_texts() == ["H", "é", "!"]
        box = page.get_by_role("tooltip")
        assert await box.is_hidden()
        await tokens.nth(0).hover()
        assert "H" in await box.inner_text()
        assert "100 %" in await box.inner_text()
        await page.hover("#draft")
        assert await box.is_hidden()
        await tokens.nth(0).focus()
        assert await box.is_visible()
        await page.keyboard.press("ArrowRight")
        assert await page.evaluate("document.activeElement.textContent") == "é"
        assert await page.locator("#alternatives table").count() == 2  # one table for each byte of é
        assert await tokens.nth(1).get_attribute("aria-describedby") == "alternatives"
        await page.keyboard.press("Escape")
        assert await box.is_hidden()
