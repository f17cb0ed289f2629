"""Take the picture of a page, as a reader sees it: for the documentation, and to look at.

    python -m tools.page_picture PAGE PICTURE.png [--width 1280] [--height PIXELS] [--dark]

PAGE is an HTML file or a URL. Needs a Chromium on the PATH. The picture holds the whole page, or its first
`--height` pixels.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import sys
from pathlib import Path

from tests.support.browser import CHROMIUM, opened_page


async def take(url: str, width: int, height: int | None, *, dark: bool) -> bytes:
    """The picture as PNG."""
    async with opened_page() as page:
        await page.open(url, width=width, scheme="dark" if dark else "light")
        whole = await page.run("document.documentElement.scrollHeight")
        clip = {"x": 0, "y": 0, "width": width, "height": min(whole, height or whole), "scale": 1}
        found = await page.call("Page.captureScreenshot", captureBeyondViewport=True, clip=clip)
        return base64.b64decode(found["data"])


def main() -> int:
    arguments = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    arguments.add_argument("page", help="an HTML file or a URL")
    arguments.add_argument("picture", type=Path, help="the PNG file to write")
    arguments.add_argument("--width", type=int, default=1280, help="of the window, in pixels")
    arguments.add_argument("--height", type=int, help="pixels from the top; all of the page")
    arguments.add_argument(
        "--dark", action="store_true", help="for a reader who prefers dark pages"
    )
    given = arguments.parse_args()
    if CHROMIUM is None:
        print("error: there is no Chromium on the PATH", file=sys.stderr)
        return 2
    url = given.page if "://" in given.page else Path(given.page).resolve().as_uri()
    picture = asyncio.run(take(url, given.width, given.height, dark=given.dark))
    given.picture.write_bytes(picture)
    return 0


if __name__ == "__main__":
    sys.exit(main())
