"""Measurement: workloads, load generation, metrics, quality, reports and comparison.

`run_bench` and its options are the public Python API; they load on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..base.exports import exporter

if TYPE_CHECKING:
    from .best.finalists import find_best
    from .best.target import BestRequest
    from .gate.compare import compare
    from .options.options import BenchOptions
    from .record.result import BenchRun, RunData
    from .session.run_sessions import run_bench, write_run

__all__ = [
    "BenchOptions",
    "BenchRun",
    "BestRequest",
    "RunData",
    "compare",
    "find_best",
    "run_bench",
    "write_run",
]

__getattr__ = exporter(
    __name__,
    {
        "BenchOptions": ".options.options",
        "BenchRun": ".record.result",
        "BestRequest": ".best.target",
        "RunData": ".record.result",
        "compare": ".gate.compare",
        "find_best": ".best.finalists",
        "run_bench": ".session.run_sessions",
        "write_run": ".session.run_sessions",
    },
)
