"""Run result: the record as strict JSON, with its schema checked on reading."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ...quant.base.errors import BadInput
from ..metrics.trace import LoadPass
from ..quality.positions import QualitySeries
from ..tasks.items import TaskItems

SCHEMA_VERSION = 1
RESULT_NAME = "result.json"


@dataclass(slots=True)
class BenchRun:
    """A finished benchmark: its record, and what it was computed from: the passes, the quality series, the
    tasks' scores per item."""

    result: dict[str, Any]
    passes: list[LoadPass]
    series: QualitySeries | None = None
    items: TaskItems | None = None

    @property
    def interrupted(self) -> bool:
        return self.result["llmopt"]["interrupted"]


def mean_output_len(result: Mapping[str, Any]) -> float | None:
    """Mean output tokens of the completed requests; None without any.

    The token total of a run of fixed duration counts its window alone, so that run records the mean.
    """
    if not result["completed"]:
        return None
    if window := result["llmopt"].get("window"):
        return window["mean_output_len"]
    return result["total_output_tokens"] / result["completed"]


def to_json(value: Any) -> str:
    """Strict JSON text: NaN and infinities become null, numpy values become plain ones."""
    return json.dumps(plain(value), indent=2, allow_nan=False) + "\n"


def plain(value: Any) -> Any:
    """The value converted to dicts, lists, text and finite numbers."""
    if isinstance(value, Mapping):
        return {str(key): plain(inner) for key, inner in value.items()}
    if isinstance(value, np.ndarray | list | tuple):
        return [plain(inner) for inner in value]
    if isinstance(value, np.generic):
        return plain(value.item())
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Path):
        return str(value)
    return value


def read_result(path: Path) -> dict[str, Any]:
    """A `result.json`, or the one in a run folder.

    Raises:
        BadInput: missing, not JSON, or not a result of llmopt.
    """
    from ...quant.model.checkpoint import read_json

    if path.is_dir():
        path = path / RESULT_NAME
    result = read_json(path)
    ours = result.get("llmopt")
    if not isinstance(ours, dict) or "identity" not in ours:
        raise BadInput(f"{path} is not a result of llmopt bench: it has no llmopt.identity")
    if ours.get("schema") != SCHEMA_VERSION:
        raise BadInput(
            f"{path} has result schema {ours.get('schema')!r}; this version reads {SCHEMA_VERSION}"
        )
    return result
