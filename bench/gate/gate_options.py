"""Options of a gate: limits on quality, and which limits decide."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

from ...base.errors import BadInput
from .limits import SCORED, Limit, parse_share

GateSpeed = Literal["auto", "off", "only"]


@dataclass(frozen=True, slots=True)
class QualityGate:
    """Limits on quality, if any: perplexity increase relative to the base, KL divergence from the reference
    in nats, and top-1 agreement as a share of positions."""

    max_perplexity_increase: float | None = None
    max_kl: float | None = None
    min_top1: float | None = None

    def __post_init__(self) -> None:
        if self.max_kl is not None and not 0 <= self.max_kl < math.inf:
            raise BadInput(f"the highest KL divergence is {self.max_kl}: give nats, such as 0.02")
        if self.min_top1 is not None and self.min_top1 > 1:
            raise BadInput(f"the least top-1 agreement is {self.min_top1:.0%}: give at most 100%")

    @classmethod
    def parse(
        cls, max_ppl_increase: Any = None, max_kl: float | None = None, min_top1: Any = None
    ) -> QualityGate:
        """The limits as options give them: shares as text or numbers. Raises BadInput: an invalid share, or a
        limit out of range."""
        rise, agreement = (
            None if share is None else parse_share(str(share))
            for share in (max_ppl_increase, min_top1)
        )
        return cls(rise, max_kl, agreement)

    @property
    def limits(self) -> list[Limit]:
        given = (
            ("perplexity", True, self.max_perplexity_increase, True),
            ("kl", True, self.max_kl, False),
            ("top1", False, self.min_top1, False),
        )
        return [
            Limit(SCORED[key], at_most, bound, relative)
            for key, at_most, bound, relative in given
            if bound is not None
        ]
