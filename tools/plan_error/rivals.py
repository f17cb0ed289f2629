"""Rivals of the plan's speed: interpolation between measured rows, and aiconfigurator's own prediction."""

from __future__ import annotations

from importlib.util import find_spec

import numpy as np
from llmopt.engine.planner.expected import throughput

from .columns import Column, Columns, Predicted
from .rows import Row

NEAREST = 8
RIDGE = 0.5
_SAME = (("engine", 3.0), ("model", 3.0), ("weights", 1.0), ("version", 0.5))


def nearest_rows(known: Columns, asked: Columns) -> Predicted:
    """Log-linear interpolation: a linear fit, in logarithms, of the nearest known rows of each row."""
    places = [_place(columns) for columns in (known, asked)]
    logs = np.log([known.measured.ttft, known.measured.tpot]).T
    found = np.array(
        [
            _interpolated(places[0] - place, _mismatch(known, row), logs)
            for row, place in zip(asked.rows, places[1], strict=True)
        ]
    )
    ttft, tpot = np.exp(found).T
    return Predicted(ttft, tpot, throughput(asked.loop, ttft, tpot))


def _place(columns: Columns) -> Column:
    loop = columns.loop
    gpus = [row.parallel.gpus for row in columns.rows]
    bandwidth = [row.device.bandwidth or 1.0 for row in columns.rows]
    return np.log2([loop.prompt, loop.output, loop.concurrency, gpus, bandwidth]).T


def _mismatch(known: Columns, row: Row) -> Column:
    return np.array(
        [
            sum(cost for name, cost in _SAME if getattr(other, name) != getattr(row, name))
            for other in known.rows
        ]
    )


def _interpolated(offsets: Column, mismatch: Column, logs: Column) -> Column:
    distance = np.sqrt((offsets**2).sum(1)) + mismatch
    chosen = np.argsort(distance, kind="stable")[:NEAREST]
    weights = 1 / (0.25 + distance[chosen])
    design = np.column_stack([np.ones(len(chosen)), offsets[chosen]])
    ridge = RIDGE * np.diag([1e-6, *[1.0] * offsets.shape[1]])
    weighted = design * weights[:, None]
    return np.linalg.solve(weighted.T @ design + ridge, weighted.T @ logs[chosen])[0]


def has_aiconfigurator() -> bool:
    """Whether its package is installed beside this one."""
    return find_spec("aiconfigurator") is not None


def aiconfigurator(asked: Columns) -> Predicted:
    """Predictions of its default database for each row; NaN where it gives none."""
    found = np.array([_estimate(row) for row in asked.rows])
    ttft, tpot = found.T / 1e3
    return Predicted(ttft, tpot, throughput(asked.loop, ttft, tpot))


def _estimate(row: Row) -> tuple[float, float]:
    from aiconfigurator.cli.api import cli_estimate  # type: ignore[import-not-found]

    parallel, names = row.parallel, row.names
    mixture = row.planned.shape.experts is not None
    try:
        result = cli_estimate(
            names["model_path"],
            names["system"],
            backend_name=row.engine,
            isl=row.prompt,
            osl=row.output,
            batch_size=max(1, row.concurrency // parallel.attention_dp),
            tp_size=parallel.tp,
            attention_dp_size=parallel.attention_dp,
            moe_tp_size=parallel.tp * parallel.attention_dp // parallel.ep if mixture else None,
            moe_ep_size=parallel.ep if mixture else None,
            gemm_quant_mode=names["gemm_quant_mode"] or None,
            moe_quant_mode=(names["moe_quant_mode"] or None) if mixture else None,
        )
    except Exception:  # its errors are of many types: no answer for this row
        return np.nan, np.nan
    return result.ttft, result.tpot
