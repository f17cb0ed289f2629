"""The engine's options, as `EngineConfig` defines them."""

from __future__ import annotations

from collections.abc import Mapping
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


def check_models(keywords: Mapping[str, Any]) -> None:
    """Raises BadInput for adapters and a draft model that are not there, before torch is imported."""
    from ...quant.adapters.settings import LoraSettings
    from ...quant.models import resolve_model

    for folder in keywords.get("loras", {}).values():
        LoraSettings.read(folder)
    speculation = keywords.get("speculation")
    if speculation is not None and speculation.draft_model is not None:
        resolve_model(str(speculation.draft_model))
