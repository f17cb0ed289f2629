"""The machine-readable files of a verdict: JUnit XML and a dashboard's JSON."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ...bench.gate.compare import Comparison, RunData
    from ..options.measuring import VerdictFileOptions


def write_machine_readable(
    after: RunData | None, comparison: Comparison, files: VerdictFileOptions
) -> None:
    """JUnit XML, and the dashboard's JSON of the new run, where they were asked for."""
    from ...bench.gate.outputs import write_benchmark_json, write_junit

    if files.junit is not None:
        write_junit(files.junit, comparison)
    if files.benchmark_json is not None and after is not None:
        write_benchmark_json(files.benchmark_json, after, comparison)
