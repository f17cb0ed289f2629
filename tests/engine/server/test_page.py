"""The page at `/`, in a real browser on a real server."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator

import pytest
from llmopt.engine.server.endpoints.page import FOLDER
from llmopt.engine.server.protocol.server_options import ServerOptions

from ...support.browser import CHROMIUM, opened_page
from ...support.live_server import RunningServer, make_engine, running, slow_steps

browses = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium here")
TEXT = "document.querySelector('.turn.assistant .text:not(.who)')?.textContent ?? ''"
META = "document.querySelector('.turn.assistant .meta')?.textContent ?? ''"


@pytest.fixture(scope="module")
def locked() -> Iterator[RunningServer]:
    engine = make_engine(num_blocks=60, block_size=16)
    with running(engine, ServerOptions(api_keys=("sesame",))) as it:
        yield it


def test_the_page_is_whole_and_fetches_nothing_from_elsewhere(locked: RunningServer) -> None:
    with locked.http() as http:
        index = http.get("/")
        assert index.headers["content-type"] == "text/html; charset=utf-8"
        assert "default-src 'self'" in index.headers["content-security-policy"]
        for path in FOLDER.iterdir():
            found = http.get(f"/page/{path.name}")
            assert found.status_code == 200 and found.content == path.read_bytes()
            text = path.read_text(encoding="utf-8")
            assert not re.search(
                r"(?:https?:)?//[\w.-]+\.\w", text.replace("http://www.w3.org/", "")
            )
            for script in re.findall(r'from "\./([\w.]+)"', text):
                assert (FOLDER / script).is_file()
        assert set(re.findall(r"/page/([\w.]+)", index.text)) <= {p.name for p in FOLDER.iterdir()}
        for path in (
            "/page/nothing.js",
            "/page/..%2fapp.py",
            "/page/%2e%2e/app.py",
            "/page/../app.py",
        ):
            assert http.get(path).status_code in (401, 404)
        assert http.get("/engine/state").status_code == 401


def test_the_state_holds_no_text_and_costs_nothing_unwatched(server: RunningServer) -> None:
    secret = "Lily kept a secret garden"
    with slow_steps(server), server.http() as http:
        body = {"prompt": secret, "max_tokens": 200, "ignore_eos": True, "stream": True, "n": 2}
        with http.stream("POST", "/v1/completions", json=body) as answer:
            lines = answer.iter_lines()
            next(lines)
            with http.stream("GET", "/engine/state") as state:
                event = next(state.iter_lines())
    assert '"running":[{' in event and secret not in event and "garden" not in event
    server.wait_until_idle()
    assert not server.loop._calls


@browses
def test_one_talks_stops_and_sees_the_blocks_change(locked: RunningServer) -> None:
    async def visit() -> None:
        async with opened_page() as page:
            await page.open(locked.url)
            # The key is asked for once, and a wrong one again.
            await page.wait_for("document.getElementById('key-dialog').open")
            await page.type("open up")
            await page.press("Enter")
            await page.wait_for("document.getElementById('key-text').className === 'problem'")
            await page.wait_for("document.getElementById('key-dialog').open")
            await page.type("sesame")
            await page.press("Enter")
            await page.wait_for("document.getElementById('state').textContent === 'serving'")
            await page.wait_for("document.getElementById('model').value === 'tiny'")
            idle = await page.run("document.getElementById('blocks').toDataURL()")

            await page.run("document.getElementById('message').focus()")
            await page.type("Once upon a time <b>there</b> was")
            with slow_steps(locked, 0.03):
                await page.press("Enter")
                await page.wait_for(f"{TEXT}.length > 30")
                assert await page.run("document.querySelectorAll('#log b').length") == 0
                await page.wait_for("document.querySelectorAll('tr.mine').length === 1")
                assert await page.run("document.getElementById('running').textContent") == "1"
                assert "yours" in await page.run("document.getElementById('sequences').textContent")
                assert await page.run("document.getElementById('blocks').toDataURL()") != idle
                label = await page.run("document.getElementById('blocks').ariaLabel")
                assert re.search(r"[1-9]\d* of 60 in use", label)
                await page.press("Escape")
                await page.wait_for(f"{META}.startsWith('stopped')")
                await page.wait_for("document.getElementById('running').textContent === '0'")
            assert locked.wait_until_idle().kv_blocks_used == 0
            await page.wait_for(
                "document.getElementById('ttft-note').textContent.startsWith('p50')"
            )

            # A complete response, in the other colour scheme, on a phone.
            await page.run("document.getElementById('theme').click()")
            await page.run("document.getElementById('theme').click()")
            assert (
                await page.run("getComputedStyle(document.body).backgroundColor")
                == "rgb(16, 23, 31)"
            )
            await page.run("document.getElementById('clear').click()")
            await page.run("document.getElementById('max-tokens').value = 12")
            await page.resize(360)
            await page.run("document.querySelector('#samples button').click()")
            await page.wait_for(f"{META}.includes('tokens/s')")
            assert await page.run("document.documentElement.scrollWidth") <= 360
            refused = [text for text in page.problems if "401" not in text]
            assert refused == []

    asyncio.run(visit())


@browses
def test_keyboard_and_screen_reader_find_every_control(server: RunningServer) -> None:
    async def visit() -> None:
        async with opened_page() as page:
            await page.open(server.url)
            await page.wait_for("document.getElementById('state').textContent === 'serving'")
            tree = await page.call("Accessibility.getFullAXTree")
            nodes = [node for node in tree["nodes"] if not node["ignored"]]

            def names(role: str) -> list[str]:
                found = [node for node in nodes if node["role"]["value"] == role]
                return [node.get("name", {}).get("value", "") for node in found]

            assert {"Chat", "Engine", "KV blocks", "Sequences"} <= set(names("heading"))
            for role in ("button", "textbox", "combobox", "spinbutton", "image", "link", "region"):
                assert all(names(role)), role
            assert {"Send", "New chat", "Pause view"} <= set(names("button"))
            assert "Message" in names("textbox")

            seen = []
            await page.run("document.body.focus()")
            for _ in range(15):
                await page.press("Tab")
                seen.append(
                    await page.run(
                        "document.activeElement.id || document.activeElement.textContent"
                    )
                )
            for control in (
                "fold",
                "theme",
                "clear",
                "message",
                "send",
                "pause",
                "sequences-scroll",
            ):
                assert control in seen, (control, seen)
            assert page.problems == []

    asyncio.run(visit())
