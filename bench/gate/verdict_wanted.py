"""The comparison that a benchmark is asked for: base, limits and output files, read before it runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ...quant.base.errors import BadInput
from ..record.run_data import RunData
from .gate import Limit, parse_gate


@dataclass(frozen=True, slots=True)
class VerdictWanted:
    """The gate options of the command line: base, limits, output files."""

    baseline: RunData | None
    against: str | None
    limits: Sequence[Limit]
    junit: Path | None
    benchmark_json: Path | None

    @classmethod
    def checked(
        cls,
        baseline: Path | None,
        against: str | None,
        gate: str | None,
        junit: Path | None,
        benchmark_json: Path | None,
    ) -> VerdictWanted | None:
        """Validate the options; None if no verdict is requested. All inputs are read before the benchmark.

        Raises:
            BadInput: two bases, limits or a JUnit file without a base, a gate or a baseline that cannot
                be read.
        """
        if baseline is not None and against is not None:
            raise BadInput("--baseline and --against were given: a run has one base, give one")
        if baseline is None and against is None:
            for option, value in (("--gate", gate), ("--junit", junit)):
                if value is not None:
                    raise BadInput(f"{option} needs something to judge by: --baseline or --against")
            if benchmark_json is None:
                return None
        limits = parse_gate(gate) if gate is not None else ()
        recorded = RunData.read(baseline) if baseline is not None else None
        return cls(recorded, against, limits, junit, benchmark_json)
