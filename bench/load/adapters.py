"""Assignment of LoRA adapters to the requests of a pass, as `vllm bench serve --lora-assignment`."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..metrics.metrics import samples
from ..metrics.trace import LoadPass, RequestTrace
from .dialogue import position

ROUND_ROBIN, RANDOM = "round-robin", "random"


def adapter_of(request_id: str, names: Sequence[str], assignment: str, seed: int) -> str | None:
    """The adapter of a request; None without adapters. The same in every pass, cycle and turn.

    Round-robin goes by the request's position in the workload, random draws by seed and position.
    """
    if not names:
        return None
    number = position(request_id)
    if assignment == ROUND_ROBIN:
        return names[number % len(names)]
    return random.Random(f"{seed}/{number}").choice(list(names))


def lora_part(
    loads: Sequence[LoadPass], names: Sequence[str], assignment: str
) -> dict[str, Any] | None:
    """`llmopt.lora` of a result: the assignment, and what the requests of each adapter took; None without."""
    if not names:
        return None
    traces = [trace for load in loads for trace in load.traces]
    by_adapter = {
        name: _figures([trace for trace in traces if trace.lora == name]) for name in names
    }
    return {"assignment": assignment, "by_adapter": by_adapter}


def _figures(traces: Sequence[RequestTrace]) -> dict[str, Any]:
    values = samples(traces)
    medians = {
        f"median_{metric}_ms": float(np.median(values[metric])) if len(values[metric]) else None
        for metric in ("ttft", "tpot", "e2el")
    }
    return {
        "requests": len(traces),
        "failed": sum(not trace.success for trace in traces),
        "output_tokens": sum(trace.output_len for trace in traces if trace.success),
        **medians,
    }
