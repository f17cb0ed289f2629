"""Options of a gate: limits on quality, and which limits decide."""

from __future__ import annotations

import math
from typing import Any, Literal

from ...base.errors import BadInput
from .limits import SCORED, Limit, parse_share

GateSpeed = Literal["auto", "off", "only"]


def quality_limits(
    max_perplexity_increase: Any = None, max_kl: float | None = None, min_top1: Any = None
) -> tuple[Limit, ...]:
    """Limits on quality as options give them, shares as text or numbers: perplexity increase relative to the
    base, KL divergence from the reference in nats, and top-1 agreement as a share of positions. Raises
    BadInput: an invalid share, or a limit out of range."""
    rise, agreement = (
        None if share is None else parse_share(str(share))
        for share in (max_perplexity_increase, min_top1)
    )
    if max_kl is not None and not 0 <= max_kl < math.inf:
        raise BadInput(f"the highest KL divergence is {max_kl}: give nats, such as 0.02")
    if agreement is not None and agreement > 1:
        raise BadInput(f"the least top-1 agreement is {agreement:.0%}: give at most 100%")
    given = (
        ("perplexity", True, rise, True),
        ("kl", True, max_kl, False),
        ("top1", False, agreement, False),
    )
    return tuple(
        Limit(SCORED[key], at_most, bound, relative)
        for key, at_most, bound, relative in given
        if bound is not None
    )
