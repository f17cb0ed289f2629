"""A page in headless Chromium, over its DevTools protocol."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import shutil
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp

CHROMIUM = next(
    (p for n in ("chromium", "chromium-browser", "google-chrome") if (p := shutil.which(n))), None
)
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--remote-debugging-port=0",
]


class Page:
    """One tab. `problems` are errors of scripts and of the console."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self.problems: list[str] = []
        self._socket = socket
        self._next_id = 0
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._reading = asyncio.ensure_future(self._read())

    async def _read(self) -> None:
        async for message in self._socket:
            found = message.json()
            if "id" in found:
                self._answers.pop(found["id"]).set_result(found)
            elif found["method"] == "Runtime.exceptionThrown":
                self.problems.append(str(found["params"]["exceptionDetails"]))
            elif (
                found["method"] == "Log.entryAdded" and found["params"]["entry"]["level"] == "error"
            ):
                self.problems.append(found["params"]["entry"]["text"])

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        self._next_id += 1
        answer = self._answers[self._next_id] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": self._next_id, "method": method, "params": params})
        found = await asyncio.wait_for(answer, 30)
        assert "error" not in found, found
        return found["result"]

    async def run(self, script: str) -> Any:
        """The value of an expression, awaited."""
        found = await self.call(
            "Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    async def wait_for(self, condition: str, seconds: float = 20) -> None:
        for _ in range(int(seconds / 0.05)):
            if await self.run(f"!!({condition})"):
                return
            await asyncio.sleep(0.05)
        raise AssertionError(f"not within {seconds} s: {condition}; {self.problems}")

    async def open(self, url: str, *, width: int = 1440, scheme: str = "light") -> None:
        for domain in ("Page", "Runtime", "Log"):
            await self.call(f"{domain}.enable")
        await self.resize(width)
        feature = {"name": "prefers-color-scheme", "value": scheme}
        await self.call("Emulation.setEmulatedMedia", features=[feature])
        await self.call("Page.navigate", url=url)
        await self.wait_for("document.readyState === 'complete'")

    async def resize(self, width: int) -> None:
        await self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=900,
            deviceScaleFactor=1,
            mobile=False,
        )

    async def press(self, key: str, *, shift: bool = False) -> None:
        text = {"Enter": "\r", "Tab": ""}.get(key, "")
        code = {"Enter": 13, "Escape": 27, "Tab": 9}[key]
        for kind in ("keyDown", "keyUp"):
            await self.call(
                "Input.dispatchKeyEvent",
                type=kind,
                key=key,
                windowsVirtualKeyCode=code,
                modifiers=8 if shift else 0,
                **({"text": text} if kind == "keyDown" and text else {}),
            )

    async def type(self, text: str) -> None:
        await self.call("Input.insertText", text=text)

    async def screenshot(self) -> bytes:
        return base64.b64decode((await self.call("Page.captureScreenshot"))["data"])


@contextlib.asynccontextmanager
async def opened_page() -> AsyncIterator[Page]:
    """A tab of a browser with an empty profile."""
    assert CHROMIUM is not None
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        process = await asyncio.create_subprocess_exec(
            *(CHROMIUM, *FLAGS, f"--user-data-dir={profile}", "about:blank"),
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
        )
        try:
            port_file = Path(profile) / "DevToolsActivePort"
            for _ in range(600):
                if port_file.is_file() and port_file.read_text().count("\n"):
                    break
                await asyncio.sleep(0.05)
            port = port_file.read_text().split()[0]
            async with aiohttp.ClientSession() as session:
                async with session.get(f"http://127.0.0.1:{port}/json/list") as response:
                    tabs = [tab for tab in await response.json() if tab["type"] == "page"]
                async with session.ws_connect(
                    tabs[0]["webSocketDebuggerUrl"], max_msg_size=0
                ) as socket:
                    yield Page(socket)
        finally:
            process.kill()
            await process.wait()
