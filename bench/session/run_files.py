"""The run folder: record, tables and report, written atomically."""

from __future__ import annotations

from pathlib import Path

from ...quant.base.atomic_io import interrupts_held
from ..metrics.step_trace import STEPS_NAME, write_steps
from ..record.requests_table import (
    REQUESTS_CSV_NAME,
    REQUESTS_NAME,
    write_requests,
    write_requests_csv,
)
from ..record.result import RESULT_NAME, BenchRun, to_json
from ..record.run_folder import atomic_folder
from ..report.report import write_report

ENVIRONMENT_NAME = "environment.json"


def write_run(
    run: BenchRun, target: Path, *, with_csv: bool = False, with_report: bool = True
) -> Path:
    """Write the run folder `target` atomically; returns it."""
    with interrupts_held():
        environment = to_json(run.result["llmopt"]["environment"])
        with atomic_folder(target) as folder:
            (folder / RESULT_NAME).write_text(to_json(run.result), encoding="utf-8")
            (folder / ENVIRONMENT_NAME).write_text(environment, encoding="utf-8")
            write_requests(folder / REQUESTS_NAME, run.passes)
            write_steps(folder / STEPS_NAME, run.passes)
            if run.series is not None:
                run.series.copy_to(folder)
            if run.items is not None:
                run.items.write(folder)
            if with_csv:
                write_requests_csv(folder / REQUESTS_CSV_NAME, run.passes)
            if with_report:
                write_report(run.result, run.passes, folder)
        return target
