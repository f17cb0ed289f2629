"""Result of a capacity recipe: the plan beside the measured sweep, and the formulas of both."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FORMULAS = {
    "predicted sequences": "tokens that the planned KV cache holds / tokens of a sequence, rounded down",
    "predicted TPOT": "the planner's decode step for that many sequences at the mean context (prompt + "
    "half of the output), with the ceilings measured here and the efficiency that one user reached",
    "predicted tokens/s": "users / predicted TPOT: decode alone, no prompts",
    "residual": "measured / predicted − 1",
}


@dataclass(frozen=True, slots=True)
class CapacityRun:
    """A finished capacity recipe.

    Attributes:
        sweep: the record of the sweep.
        record: the recipe's `result.json`.
    """

    folder: Path
    sweep: Mapping[str, Any]
    record: Mapping[str, Any]
