"""Acceptance of draft tokens, by request: a task score, so that two models are paired request by request.

A decode step yields its accepted draft tokens and one token of the model, and a request's chunks in process
are its steps. The first chunk is the prefill's and the requested length cuts the last: both are left out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..metrics.trace import RequestTrace
from .chat_items import TaskScoring
from .task_items import COLUMNS, TaskItems

TASK, LENGTH, ACCEPTED = "drafts", "acceptance_length", "accepted"
VERSION = 1.0


def draft_scores(
    traces: Sequence[RequestTrace], num_tokens: int
) -> tuple[list[dict[str, Any]], TaskItems]:
    """Rows and items of the requests of a pass with up to `num_tokens` draft tokens a step: the mean tokens
    of a step, and by position the share of the steps that accept so many draft tokens. Without a step none.
    """
    steps = [np.array(trace.chunk_tokens[1:-1], int) for trace in traces if trace.success]
    names = [trace.request_id for trace in traces if trace.success]
    if not sum(map(len, steps)):
        return [], TaskItems()
    scored = {(LENGTH, "none"): [float(of.sum()) for of in steps]}
    scored |= {
        (ACCEPTED, str(position)): [float((of > position).sum()) for of in steps]
        for position in range(1, num_tokens + 1)
    }
    weights, scoring = [float(len(of)) for of in steps], TaskScoring(TASK, VERSION)
    columns: dict[str, list[Any]] = {name: [] for name in COLUMNS}
    for (metric, filter_name), values in scored.items():
        ratio = sum(values) / sum(weights)
        rests = (value - ratio * weight for value, weight in zip(values, weights, strict=True))
        error = math.hypot(*rests) / sum(weights)  # of a ratio of sums over requests
        scoring.add_row(metric, filter_name, ratio, len(steps), error)
        for number, (name, value, weight) in enumerate(zip(names, values, weights, strict=True)):
            cells = (TASK, number, name, metric, filter_name, value, weight, "", "")
            for column, cell in zip(COLUMNS, cells, strict=True):
                columns[column].append(cell)
    return [row | {"aggregation": "mean"} for row in scoring.rows], TaskItems(columns)
