"""Measuring the cells of a grid, and their table: a row per cell with parameters, figures and Pareto front.

A server is started for the cells that share it. A finished cell is an ordinary run folder, so that a killed
grid continues where it was. A failed cell is recorded with its reason, and tried again on continuing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from ...quant.base.atomic_io import write_atomically
from ...quant.base.errors import BadInput
from ...quant.base.progress import Progress, Silent
from ...quant.model.checkpoint import read_json
from ..load.started_server import is_ready, served
from ..metrics.metrics import FORMULAS as METRIC_FORMULAS
from ..options.options import BenchOptions
from ..record.result import RESULT_NAME, RunData, atomic_file, is_taken, to_json
from ..session.run_sessions import run_bench, write_run
from .grid_plan import Cell, GridPlan, flat, spec_differences
from .jobs import Job, do_on_ray

GRID_NAME = "grid.json"
CELLS = "cells"

AfterCell = Callable[[Mapping[str, Any], Path], None]
"""Takes the result of a cell and its folder."""


def cell_folder(folder: Path, cell: Cell) -> Path:
    """The run folder of a cell."""
    return folder / CELLS / cell.key


def failure_file(folder: Path, cell: Cell) -> Path:
    """Where the reason of a failed cell stands."""
    return folder / CELLS / f"{cell.key}.failed.json"


def is_finished(folder: Path, cell: Cell) -> bool:
    return (cell_folder(folder, cell) / RESULT_NAME).is_file()


def open_grid(plan: GridPlan, folder: Path) -> None:
    """Make the folder of a grid, or check that the one there is of the same grid.

    Raises:
        BadInput: the folder is something else, or of a grid with other parameters.
    """
    path = folder / GRID_NAME
    if is_taken(folder) and not path.is_file():
        raise BadInput(f"{folder} exists and is no grid: name another folder, or remove it")
    if path.is_file():
        if different := spec_differences(read_json(path).get("spec") or {}, plan.spec):
            raise BadInput(
                f"{folder} is a grid with other parameters ({', '.join(different)}): give the same ones to "
                "continue it, or name another folder"
            )
        return
    try:
        (folder / CELLS).mkdir(parents=True)
    except OSError as error:
        raise BadInput(f"cannot make {folder}: {error.strerror}") from error
    write_atomically(path, to_json({"spec": plan.spec}))


def run_grid(
    plan: GridPlan,
    folder: Path,
    progress: Progress,
    *,
    after_cell: AfterCell | None = None,
    refresh: Callable[[], object] = lambda: None,
) -> bool:
    """Measure every cell that is not finished; False after an interrupt.

    `refresh` is called whenever a cell has ended, so that the report is there after a kill.
    """
    try:
        for row in plan.rows():
            left = [cell for cell in row if not is_finished(folder, cell)]
            if done := len(row) - len(left):
                progress.note(
                    f"{row[0].serve.name or 'grid'}: {done} of {len(row)} cells are there"
                )
            while left:
                left = _measure_row(left, folder, progress, after_cell, refresh)
    except KeyboardInterrupt:
        return False
    return True


def run_grid_on_ray(
    plan: GridPlan, folder: Path, progress: Progress, after_cell: AfterCell
) -> bool:
    """Measure the cells that are not finished as tasks of Ray: those of one started server in one, and each
    that needs none; False after an interrupt.

    Raises:
        BadInput: the cells are of a running server.
    """
    if plan.cells[0].options.base_url is not None:
        raise BadInput("--on ray: cells of one running server disturb each other: give --serve")
    left = tuple(cell for cell in plan.cells if not is_finished(folder, cell))
    has_servers = plan.cells[0].options.serve is not None
    tasks = replace(plan, cells=left).rows() if has_servers else [[cell] for cell in left]
    grids = {f"bench {task[0].key}": replace(plan, cells=tuple(task)) for task in tasks}
    try:
        do_on_ray(
            [Job("bench", task[0].key, device=task[0].options.device) for task in tasks],
            folder / GRID_NAME,
            partial(_measure_on_node, grids),
            lambda name: all(_has_ended(folder, cell) for cell in grids[name].cells),
            progress,
        )
    except KeyboardInterrupt:
        return False
    finally:
        for cell in left:
            if is_finished(folder, cell):
                target = cell_folder(folder, cell)
                after_cell(RunData.read(target).result, target)
    return True


def _measure_on_node(grids: Mapping[str, GridPlan], folder: Path, name: str) -> None:
    run_grid(grids[name], folder, Silent())


def _has_ended(folder: Path, cell: Cell) -> bool:
    return is_finished(folder, cell) or failure_file(folder, cell).is_file()


def _measure_row(
    cells: Sequence[Cell],
    folder: Path,
    progress: Progress,
    after_cell: AfterCell | None,
    refresh: Callable[[], object],
) -> list[Cell]:
    """Measure cells on one start of their server, up to the first that fails; returns those after it.

    A server that cannot start fails all of them.
    """
    unserved = list(cells)
    try:
        with served(cells[0].options, progress) as ready:
            while unserved:
                cell = unserved.pop(0)
                reason = _measure(cell, ready, folder, progress, after_cell)
                refresh()
                if reason is not None:
                    return unserved
    except BadInput as error:  # of the start alone: a cell's own errors are its reason
        for cell in unserved:
            _note_failure(folder, cell, str(error), progress)
        refresh()
    return []


def _measure(
    cell: Cell, ready: BenchOptions, folder: Path, progress: Progress, after_cell: AfterCell | None
) -> str | None:
    """Measure one cell on its running server and write its folder; the reason if it failed."""
    progress.note(f"cell {cell.key}")
    try:
        run = run_bench(_on_server(cell.options, ready), progress)
    except Exception as error:
        # Whatever stops one cell must not stop the others.
        return _note_failure(folder, cell, str(error) or type(error).__name__, progress)
    if run.interrupted:
        raise KeyboardInterrupt
    if run.result["completed"] == 0:
        errors = [trace.error for load in run.passes for trace in load.traces if trace.error]
        reason = f"no request succeeded: {errors[0] if errors else 'no answer'}"
        return _note_failure(folder, cell, reason, progress)
    if ready.started_server is not None and not is_ready(ready.base_url or ""):
        reason = (
            f"the server ended during the cell, in which {run.result['failed']} requests failed"
        )
        return _note_failure(folder, cell, reason, progress)
    target = write_run(run, cell_folder(folder, cell))
    failure_file(folder, cell).unlink(missing_ok=True)
    if after_cell is not None:
        after_cell(run.result, target)
    return None


def _on_server(options: BenchOptions, ready: BenchOptions) -> BenchOptions:
    """A cell's options, with what `served` found out about its server."""
    if ready.started_server is None:
        return options
    of_server = (
        "serve",
        "serve_args",
        "serve_program",
        "base_url",
        "backend",
        "model",
        "tokenizer",
        "started_server",
    )
    changes = {name: getattr(ready, name) for name in of_server}
    if "backend" in options.model_fields_set:
        changes["backend"] = options.backend
    limit = options.max_model_len or ready.max_model_len
    name = options.name or options.label or ready.name
    return options.model_copy(update={**changes, "max_model_len": limit, "name": name})


def _note_failure(folder: Path, cell: Cell, reason: str, progress: Progress) -> str:
    progress.note(f"cell {cell.key} failed: {reason}")
    write_atomically(failure_file(folder, cell), to_json({"cell": cell.key, "error": reason}))
    return reason


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
FIGURE_FORMULAS = {
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


def grid_rows(plan: GridPlan, folder: Path) -> list[Row]:
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
    with atomic_file(path) as partial:
        pq.write_table(pa.table(columns), partial)


def _one_type(values: Sequence[Any]) -> list[Any]:
    kinds = {type(value) for value in values if value is not None}
    if kinds <= {int, float} or (len(kinds) == 1 and not kinds & {dict, list}):
        return [
            float(value) if kinds == {int, float} and value is not None else value
            for value in values
        ]
    return [None if value is None else flat(value) for value in values]
