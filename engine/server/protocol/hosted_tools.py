"""Hosted tools of OpenAI's and Anthropic's APIs, such as web search: requests go on without them."""

from __future__ import annotations

import logging
from functools import lru_cache
from typing import Any

from pydantic import BeforeValidator

_log = logging.getLogger(__name__)

CLIENT_KINDS = (None, "function", "namespace", "custom")
"""Types of tools that a client defines and runs. Vendors add to the others with each release, so that these
are not listed."""


def client_tools(*served: str | None) -> BeforeValidator:
    """Validator of a list of tools: leaves out the hosted ones, refuses others not of the types `served`."""
    return BeforeValidator(lambda tools: _without_hosted(tools, served))


def is_hosted(tool: Any) -> bool:
    """Whether the vendor defines the tool, by its type."""
    kind = tool.get("type") if isinstance(tool, dict) else None
    return isinstance(kind, str) and kind not in CLIENT_KINDS


def _without_hosted(tools: Any, served: tuple[str | None, ...]) -> Any:
    if not isinstance(tools, list):
        return tools
    kept: list[Any] = []
    for tool in tools:
        if is_hosted(tool):
            _log_skipped(tool["type"][:64])
        elif isinstance(tool, dict) and tool.get("type") not in served:
            types = " and ".join(kind for kind in served if kind is not None)
            raise ValueError(f"tools of type {tool.get('type')!r} are not supported: {types} only")
        else:
            kept.append(tool)
    return kept


@lru_cache(maxsize=128)
def _log_skipped(kind: str) -> None:
    """Log once for each type, because an agent sends its tools with every request."""
    _log.warning("tools of type %r are hosted by their vendor: requests go on without them", kind)
