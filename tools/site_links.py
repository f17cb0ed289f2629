"""Hook of mkdocs (`mkdocs.yml`): rewrite what GitHub shows and the site would not.

A link to a file outside docs/ becomes the path of that file in the repository. A link to a folder fails the
build, because the site has no page for it.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
LINK = re.compile(r"(?<!!)\[([^]]+)\]\(([^)\s#]+)(#[^)\s]*)?\)")
CODE = re.compile(r"`[^`\n]+`")


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Return the Markdown of a page with links that stay in the site."""
    folder = (DOCS / page.file.src_uri).parent
    # GitHub needs a backslash before a bar in a table's code, Python-Markdown would print it.
    markdown = CODE.sub(lambda code: code[0].replace(r"\|", "|"), markdown)
    return LINK.sub(lambda link: site_link(link, folder), markdown)


def site_link(link: re.Match[str], folder: Path) -> str:
    """Return a link as it is, or the path of its target where the site does not have it."""
    text, name = link[1], link[2]
    target = (folder / name).resolve()
    if re.match(r"[a-z]+:", name):
        return link[0]
    if target.is_relative_to(DOCS):
        if target.is_dir():
            raise PluginError(f"{folder}: the link {name} is a folder: name a page in it")
        return link[0]
    path = target.relative_to(ROOT).as_posix()
    return f"`{path}`" if text.strip("`") == path else f"{text} (`{path}` in the repository)"
