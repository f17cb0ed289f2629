"""The table of a grid: one row per cell with its parameters and figures, and the Pareto front."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ...quant.base.errors import BadInput
from ...quant.model.checkpoint import read_json
from ..metrics.metrics import FORMULAS as METRIC_FORMULAS
from ..record.result import RESULT_NAME
from .params import flat
from .plan import Cell, Plan
from .run import cell_folder, failure_file, is_finished

Row = dict[str, Any]

DEFAULT_AXES = ("tokens_per_user", "tokens_per_gpu")
FIGURES = {
    "output_throughput": "tok/s",
    "request_throughput": "req/s",
    "tokens_per_user": "tok/s/user",
    "tokens_per_gpu": "tok/s/GPU",
    "median_ttft_ms": "TTFT ms",
    "p99_ttft_ms": "p99 TTFT",
    "median_tpot_ms": "TPOT ms",
    "median_e2el_ms": "E2E ms",
    "p99_e2el_ms": "p99 E2E",
    "request_goodput": "goodput",
    "slo_share": "within SLO",
    "total_token_throughput": "all tok/s",
    "joules_per_token": "J/token",
    "kv_cache_usage_max": "KV max",
    "num_requests_waiting_mean": "waiting",
    "preemptions": "preempted",
    "prefix_cache_hit_rate": "hits",
    "throughput_cv": "CV",
    "seconds_to_ready": "ready s",
    "completed": "completed",
    "failed": "failed",
    "users": "users",
    "gpus": "GPUs",
}
"""The figures of a cell, with their headings; any of them may be an axis."""
FORMULAS = {
    **{key: text for key, text in METRIC_FORMULAS.items() if key in FIGURES},
    "median_ttft_ms": METRIC_FORMULAS["ttft"],
    "median_tpot_ms": METRIC_FORMULAS["tpot"],
    "median_e2el_ms": METRIC_FORMULAS["e2el"],
    "tokens_per_user": "output throughput / the concurrency limit; without one, / the mean number of "
    "requests in flight (completed requests per second · mean end-to-end time)",
    "tokens_per_gpu": "output throughput / the product of the server's parallel sizes",
    "kv_cache_usage_max": "the highest of the server's own gauge in any scrape",
    "num_requests_waiting_mean": "the mean of the server's own gauge over the scrapes",
    "prefix_cache_hit_rate": "prompt tokens from the prefix cache / prompt tokens, as the server says",
    "throughput_cv": "standard deviation of output throughput between the passes / its mean",
    "seconds_to_ready": "from the start of the server to its first answer on /health",
}
"""How the figures of the table are made."""
LOWER_IS_BETTER = {
    "joules_per_token",
    "kv_cache_usage_max",
    "num_requests_waiting_mean",
    "preemptions",
    "throughput_cv",
    "seconds_to_ready",
    "failed",
    "gpus",
}
GPU_PARAMS = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")


def grid_rows(plan: Plan, folder: Path) -> list[Row]:
    """A row for every cell; `status` is done, failed or pending."""
    return [_row(cell, folder) for cell in plan.cells]


def _row(cell: Cell, folder: Path) -> Row:
    row: Row = {"cell": cell.key, "status": "pending", "error": None}
    row |= {f"serve.{key}": value for key, value in cell.serve.params.items()}
    row |= {f"bench.{key}": value for key, value in cell.bench.params.items()}
    row |= {"serve": cell.serve.name, "bench": cell.bench.name}
    if is_finished(folder, cell):
        row |= {
            "status": "done",
            **figures(read_json(cell_folder(folder, cell) / RESULT_NAME), cell),
        }
    elif failure_file(folder, cell).is_file():
        row |= {"status": "failed", "error": read_json(failure_file(folder, cell)).get("error")}
    return {**dict.fromkeys(FIGURES), **row}


def figures(result: Mapping[str, Any], cell: Cell) -> Row:
    """The figures of a finished cell.

    Users are the concurrency limit, and in an open loop the mean number of requests in flight by Little's
    law (rate times mean end-to-end time). GPUs are the product of the server's parallel sizes.
    """
    ours = result["llmopt"]
    metrics, server = ours["metrics"], ours.get("server_metrics") or {}
    gauges = server.get("gauges") or {}
    started = (ours.get("server") or {}).get("started") or {}
    joules = [run["joules_per_token"] for run in ours["runs"] if run.get("joules_per_token")]
    throughput, mean_e2el = result["output_throughput"], metrics["e2el"]["mean"]
    in_flight = (result["request_throughput"] or 0.0) * (mean_e2el or 0.0) / 1000
    users = result["max_concurrency"] or in_flight
    gpus = num_gpus(cell.serve.params)
    return {
        **{key: result.get(key) for key in FIGURES if key in result},
        **{
            f"{statistic}_{metric}_ms": metrics[metric][statistic]
            for metric in ("ttft", "tpot", "e2el")
            for statistic in ("median", "p99")
        },
        "slo_share": (ours.get("slo") or {}).get("share"),
        "users": users,
        "gpus": gpus,
        "tokens_per_user": throughput / users if throughput and users else None,
        "tokens_per_gpu": throughput / gpus if throughput else None,
        "joules_per_token": sum(joules) / len(joules) if joules else None,
        "kv_cache_usage_max": (gauges.get("kv_cache_usage") or {}).get("max"),
        "num_requests_waiting_mean": (gauges.get("num_requests_waiting") or {}).get("mean"),
        "preemptions": ours["preemptions"],
        "prefix_cache_hit_rate": ours["prefix_cache_hit_rate"],
        "throughput_cv": (ours["spread"].get("output_throughput") or {}).get("run_cv"),
        "seconds_to_ready": started.get("seconds_to_ready"),
    }


def num_gpus(params: Mapping[str, Any]) -> int:
    """How many GPUs a server's parallel sizes make; 1 without any."""
    sizes = {key.replace("-", "_"): value for key, value in params.items()}
    return math.prod(int(sizes.get(name, 1)) for name in GPU_PARAMS)


def parse_axes(text: str | None) -> tuple[str, str]:
    """`X,Y` of `--pareto`.

    Raises:
        BadInput: not two different figures of a cell.
    """
    if text is None:
        return DEFAULT_AXES
    names = [word.strip() for word in text.split(",")]
    if len(names) != 2 or len(set(names)) != 2 or not all(name in FIGURES for name in names):
        raise BadInput(f"--pareto {text!r}: write X,Y with two of {', '.join(FIGURES)}")
    return names[0], names[1]


def prefers_less(key: str) -> bool:
    """Whether a smaller value of the figure is better."""
    return key.endswith("_ms") or key in LOWER_IS_BETTER


def pareto_front(rows: Sequence[Row], axes: tuple[str, str]) -> list[str]:
    """Keys of the cells that no other cell beats on both axes, sorted along the first."""
    signs = [-1 if prefers_less(axis) else 1 for axis in axes]
    points = {
        row["cell"]: tuple(sign * row[axis] for sign, axis in zip(signs, axes, strict=True))
        for row in rows
        if all(row[axis] is not None for axis in axes)
    }
    best = [
        key
        for key, point in points.items()
        if not any(
            other != point and all(a >= b for a, b in zip(other, point, strict=True))
            for other in points.values()
        )
    ]
    return sorted(best, key=lambda key: points[key])


def write_parquet(rows: Sequence[Row], path: Path) -> None:
    """The rows as a Parquet file; a parameter whose values are of several types becomes text."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    names = list(dict.fromkeys(name for row in rows for name in row))
    columns = {name: _one_type([row.get(name) for row in rows]) for name in names}
    partial = path.with_name(f".{path.name}.partial")
    pq.write_table(pa.table(columns), partial)
    partial.replace(path)


def _one_type(values: Sequence[Any]) -> list[Any]:
    kinds = {type(value) for value in values if value is not None}
    if kinds <= {int, float} or (len(kinds) == 1 and not kinds & {dict, list}):
        return [
            float(value) if kinds == {int, float} and value is not None else value
            for value in values
        ]
    return [None if value is None else flat(value) for value in values]
