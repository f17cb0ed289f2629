"""Options of a gate: limits on speed and quality, and which limits decide."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from ...base.errors import BadInput
from ...base.option import option
from ..options.values import parse_nats
from .limits import SCORED, Limit, parse_gate, parse_share

GateSpeed = Literal["auto", "off", "only"]


@dataclass(frozen=True, slots=True)
class LimitOptions:
    """Limits for a new run that is worse, as a command line, a recipe or a plan of starts has them."""

    threshold: str = option("5%", "How much worse a speed may get: 5% or 0.05.")
    gate: str | None = option(
        None,
        'Limits instead of --threshold, such as "p99_ttft_ms<=+10% output_throughput>=-5% '
        'kl<=0.02 weight_bytes<=+0%". With % on the change, without on the value.',
    )
    max_ppl_increase: str | None = option(None, "How much perplexity may rise, such as 2%.")
    max_kl: float | None = option(
        None,
        "Most KL divergence of the new run from its reference, in nats a token.",
        metavar="FLOAT",
        word=str,
        parse=parse_nats,
    )
    min_top1: str | None = option(None, "Least top-1 agreement with the reference, such as 95%.")
    gate_speed: GateSpeed | None = option(
        None,
        "Which speeds decide: auto (those that this machine can tell), off (none), only (nothing "
        "else). Default: all limits decide, and a speed that is too noisy ends in no verdict.",
    )

    @property
    def share(self) -> float:
        return parse_share(self.threshold)

    @property
    def limits(self) -> tuple[Limit, ...]:
        """The limits of `gate`; empty without, where the threshold decides."""
        return () if self.gate is None else parse_gate(self.gate)

    @property
    def quality(self) -> tuple[Limit, ...]:
        """Limits on perplexity relative to the base, KL divergence from the reference in nats, and top-1
        agreement as a share of positions. Raises BadInput: an invalid share, or a limit out of range."""
        rise, agreement = (
            None if share is None else parse_share(str(share))
            for share in (self.max_ppl_increase, self.min_top1)
        )
        if self.max_kl is not None and not 0 <= self.max_kl < math.inf:
            raise BadInput(f"the highest KL divergence is {self.max_kl}: give nats, such as 0.02")
        if agreement is not None and agreement > 1:
            raise BadInput(f"the least top-1 agreement is {agreement:.0%}: give at most 100%")
        given = (
            ("perplexity", True, rise, True),
            ("kl", True, self.max_kl, False),
            ("top1", False, agreement, False),
        )
        return tuple(
            Limit(SCORED[key], at_most, bound, relative)
            for key, at_most, bound, relative in given
            if bound is not None
        )

    def check(self) -> None:
        """Raise BadInput for a malformed limit."""
        _ = self.quality, self.limits, self.share
