"""The engine's options, as `EngineConfig` defines them."""

from __future__ import annotations

from typing import Any

from ...engine.config.config import EngineConfig
from .config_words import keywords_of, words_of

PANEL = "Engine"


class EngineOptions(words_of(EngineConfig, PANEL)):
    """Every option of `EngineConfig`, as words."""

    def keywords(self) -> dict[str, Any]:
        """Keywords for `EngineConfig`, but for the model.

        Raises:
            BadInput: a word that is not understood.
        """
        return keywords_of(EngineConfig, self)
