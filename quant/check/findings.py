"""One thing that a check says about a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Severity = Literal["broken", "suspect", "note"]


@dataclass(frozen=True, slots=True)
class Finding:
    """A fact about a checkpoint that a person can act on.

    Attributes:
        code: kebab-case name of the kind of fact, stable for scripts (`missing-shard`).
        subject: the module, tensor or file that it concerns.
        message: one sentence: the fact and its remedy.
        severity: `broken` is wrong in every loader, `suspect` is very probably so, `note` is neither.
    """

    code: str
    subject: str
    message: str
    severity: Severity = "broken"
