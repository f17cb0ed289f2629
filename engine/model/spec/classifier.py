"""Sequence classifiers: checkpoints of a decoder with a classification head in place of the language head."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_SUFFIX = "ForSequenceClassification"


def is_classifier(config: Mapping[str, Any]) -> bool:
    """Whether a raw `config.json` names a sequence classifier."""
    return any(str(name).endswith(_SUFFIX) for name in config.get("architectures") or ())
