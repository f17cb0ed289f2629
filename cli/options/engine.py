"""The engine's options, as `EngineConfig` defines them."""

from __future__ import annotations

from typing import Any

from ...engine.config.config import EngineConfig
from .config_words import keywords_of, words_of

PANEL = "Engine"


class EngineOptions(words_of(EngineConfig, PANEL)):
    """Every option of `EngineConfig`, as command-line options."""

    def keywords(self) -> dict[str, Any]:
        """Keyword arguments for `EngineConfig`, without the model.

        Raises:
            BadInput: an invalid value.
        """
        return keywords_of(EngineConfig, self)
