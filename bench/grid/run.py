"""Running a grid: start a server, wait until it is ready, measure its cells, stop it, next.

A finished cell is an ordinary run folder, so that a killed grid continues where it was. A failed cell is
recorded with its reason, and tried again when the grid is continued.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from ...quant.base.atomic_io import write_atomically
from ...quant.base.errors import BadInput
from ...quant.base.progress import Progress
from ...quant.model.checkpoint import read_json
from ..load.started_server import is_ready, served
from ..options.options import BenchOptions
from ..record.result import RESULT_NAME, BenchRun, to_json
from ..session.run_sessions import run_bench, write_run
from .plan import Cell, Plan, spec_differences

GRID_NAME = "grid.json"
CELLS = "cells"

AfterCell = Callable[[Cell, BenchRun, Path], None]


def cell_folder(folder: Path, cell: Cell) -> Path:
    """The run folder of a cell."""
    return folder / CELLS / cell.key


def failure_file(folder: Path, cell: Cell) -> Path:
    """Where the reason of a failed cell stands."""
    return folder / CELLS / f"{cell.key}.failed.json"


def is_finished(folder: Path, cell: Cell) -> bool:
    return (cell_folder(folder, cell) / RESULT_NAME).is_file()


def open_grid(plan: Plan, folder: Path) -> None:
    """Make the folder of a grid, or check that the one there is of the same grid.

    Raises:
        BadInput: the folder is something else, or of a grid with other parameters.
    """
    path = folder / GRID_NAME
    if folder.exists() and not path.is_file():
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
    plan: Plan,
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
        after_cell(cell, run, target)
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
