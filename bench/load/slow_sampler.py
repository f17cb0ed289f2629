"""A sampler that takes longer on purpose: a slowdown in one part of a step, for proving that a comparison
notices what is small in the whole."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ...engine.engine import Engine


def slow_sampler(engine: Engine, factor: float) -> None:
    """Make every draw of `engine` last `factor` times as long. Spins, so that the core stays awake."""
    sampler: Any = engine.runner._sampler
    begin = sampler.begin

    def slow(*args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        drawn = begin(*args, **kwargs)
        until = start + (time.perf_counter() - start) * factor
        while time.perf_counter() < until:
            pass
        return drawn

    sampler.begin = slow
