"""The page takes pictures: chosen and dropped, shown before they are sent, and refused by name."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from llmopt.engine.base.image_input import MediaLimits
from llmopt.engine.server.protocol.server_options import ServerOptions

from ...support.browser import CHROMIUM, Page, opened_page
from ...support.live_server import RunningServer, make_engine, running
from .test_images_api import TEMPLATE, RowsOfPictures

THUMBS = "[...document.querySelectorAll('#tray img')].filter((image) => image.naturalWidth)"
PROBLEM = "document.getElementById('picture-problem').textContent"
NAME = "<img src=x>.png"
FILES = f"""
    window.put = async (isPicture) => {{
      const canvas = document.createElement('canvas');
      canvas.width = 12;
      canvas.height = 8;
      canvas.getContext('2d').fillRect(0, 0, 12, 8);
      const blob = await new Promise((made) => canvas.toBlob(made));
      const files = new DataTransfer();
      files.items.add(new File([isPicture ? blob : 'text'], '{NAME}', {{ type: 'image/png' }}));
      return files;
    }}; 1
"""


@pytest.fixture
def seeing() -> Iterator[RunningServer]:
    engine = make_engine("stories260K")
    engine.images = RowsOfPictures(engine.tokenizer)  # type: ignore[assignment]
    with running(engine, ServerOptions(media=MediaLimits()), chat_template=TEMPLATE) as it:
        yield it


async def _choose(page: Page) -> None:
    await page.run(
        "put(true).then((files) => { const chooser = document.getElementById('chooser');"
        "chooser.files = files.files; chooser.dispatchEvent(new Event('change')); })"
    )


async def _drop(page: Page, *, is_picture: bool) -> None:
    await page.run(
        f"put({str(is_picture).lower()}).then((files) => document.body.dispatchEvent("
        "new DragEvent('drop', { dataTransfer: files, bubbles: true, cancelable: true })))"
    )


@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium here")
def test_pictures_are_chosen_dropped_removed_and_sent(seeing: RunningServer) -> None:
    async def visit() -> None:
        async with opened_page() as page:
            await page.open(seeing.url)
            await page.wait_for("!document.getElementById('choose').hidden")
            await page.run(FILES)
            await _choose(page)
            await page.wait_for(f"{THUMBS}.length === 1")
            for count in (2, 3):
                await _drop(page, is_picture=True)
                await page.wait_for(f"{THUMBS}.length === {count}")
            await _drop(page, is_picture=False)
            await page.wait_for(f"{PROBLEM}.startsWith({NAME!r})")
            assert await page.run("document.querySelectorAll('#picture-problem img').length") == 0
            await page.run("document.querySelector('#tray button').click()")
            await page.wait_for(f"{THUMBS}.length === 2")
            await page.run("document.getElementById('max-tokens').value = 3")
            await page.run("document.getElementById('message').focus()")
            await page.type("What?")
            await page.press("Enter")
            await page.wait_for(
                "document.querySelector('.turn.assistant .meta')?.textContent.includes('tokens/s')"
            )
            assert await page.run("document.querySelectorAll('.turn.user img').length") == 2
            assert await page.run("document.getElementById('tray').hidden")
            assert page.problems == []

    asyncio.run(visit())
    made: Any = seeing.engine.images
    ((text, images),) = made.prompts
    assert text == "user: <image><image>What?\n"
    assert [image.size for image in images] == [(12, 8)] * 2
