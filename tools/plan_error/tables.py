"""Print the held-out error of plans that take operator times from aiconfigurator-core's tables.

    python -m tools.plan_error.tables [--data silicon_sample.csv] [--fit]

The package has to be installed. The deployments are those whose linear layers its tables hold; what they
leave to the fit (launches, the host's time, the load, other operators) is fitted again beside them, on the
fitting half, and the plain fit is that of the same rows. With `--fit` the planner's parameters and bands of
such plans are written. Its makers may have seen these rows, but the tables are of operators alone.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
from llmopt.engine.planner.expected import BY_TABLES, LoopTimes
from llmopt.engine.planner.operator_tables import tables_for
from llmopt.engine.planner.step_model import operator_seconds
from llmopt.engine.planner.step_parameters import BESIDE_TABLES

from .columns import Column, Columns, kv_bytes, row_loop, row_works
from .cross import left_out
from .fit import SOURCE, Fit, as_json, fit
from .report import HEADER, LEGEND, Judged, bands, by, coverage, errors, judged_rows, line
from .rows import Row, packaged_csv, read_rows

OPERATORS = ("linear layers", "experts", "all-reduce", "decode attention", "prefill attention")


@dataclass(frozen=True)
class TabledColumns(Columns):
    """Rows with the seconds that the tables hold of their steps: by row, step and operator, else NaN."""

    held: Column

    @classmethod
    def of(cls, rows: Sequence[Row]) -> TabledColumns:
        """The columns of those rows whose linear layers the tables hold."""
        plain = Columns.of(rows)
        held = np.array([_held(row) for row in rows])
        columns = cls(
            **{field.name: getattr(plain, field.name) for field in fields(plain)}, held=held
        )
        return columns.take(np.isfinite(held[:, :, 0].sum(axis=1)))

    def take(self, mask: Column) -> TabledColumns:
        """The rows that a mask keeps."""
        kept = Columns(**{f.name: getattr(self, f.name) for f in fields(Columns)}).take(mask)
        parts = {field.name: getattr(kept, field.name) for field in fields(kept)}
        return TabledColumns(**parts, held=self.held[np.flatnonzero(mask)])

    @property
    def plain(self) -> Columns:
        """The same rows without the tables."""
        return Columns(**{field.name: getattr(self, field.name) for field in fields(Columns)})

    def step_seconds(self, p: dict[str, Any]) -> LoopTimes:
        """Times of each row's steps, those of the operators that the tables hold by the tables."""
        steps = []
        for step, loads in enumerate(self.loads):
            parts = operator_seconds(loads, self.roofs, p)
            for operator, name in enumerate(OPERATORS):
                held = self.held[:, step, operator]
                parts[name] = np.where(np.isnan(held), parts[name], held)
            steps.append(sum(parts.values()))
        return LoopTimes(steps[0], steps[1], steps[2] / self.prompts)


def _held(row: Row) -> list[list[float]]:
    shape, element = row.planned.shape, kv_bytes(row)
    tables = tables_for(shape, row.recipe, row.device, row.engine, row.parallel, element)
    found = [tables.seconds(work) if tables else {} for work in row_works(row, row_loop(row))[:3]]
    return [[step.get(name, np.nan) for name in OPERATORS] for step in found]


def by_tables(judged: Sequence[Judged]) -> list[Judged]:
    """Judged rows under the name that bands of such plans have."""
    return [(row, replace(like, engine=like.engine + BY_TABLES), r) for row, like, r in judged]


def main() -> None:
    """Fit, judge and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--fit", action="store_true", help="write the planner's JSON files")
    arguments = parser.parse_args()
    columns = TabledColumns.of(read_rows(arguments.data or packaged_csv()))
    fitted = np.array([row.fitted for row in columns.rows])
    held, found = columns.take(~fitted), fit(columns.take(fitted))
    print(
        f"{fitted.sum()} configurations fitted, {len(held.rows)} held out\n",
        HEADER,
        LEGEND,
        sep="\n",
    )
    plain = errors(fit(columns.plain.take(fitted)).predict(held.plain), held.measured)
    predicted = found.predict(held)
    tabled = errors(predicted, held.measured)
    unseen = left_out(columns, lambda row: row.model, ~fitted)
    without = left_out(columns.plain, lambda row: row.model, ~fitted)
    print(line("fitted", plain), line("by tables", tabled), sep="\n")
    print(line("fitted, model left out", errors(without, held.measured)))
    print(line("by tables, model left out", errors(unseen, held.measured)))
    for label, part in (("fitted", plain), ("by tables", tabled)):
        print(by(f"{label}, by engine", lambda row: row.engine, held, part))
        print(by(f"{label}, by model", lambda row: row.model, held, part))
    judged = judged_rows(held, predicted, found.corrections["tpot"])
    judged = by_tables(judged + judged_rows(held, unseen, ()))
    print("\nwithin the 90 % band of the other deployments' rows")
    for name, (share, count) in coverage(judged).items():
        print(f"  {name:12}{100 * share:6.1f} % of {count}")
    if arguments.fit:
        _write(found, judged)


def _write(found: Fit, judged: list[Judged]) -> None:
    from .__main__ import write_planner_file

    source = SOURCE.replace("plan_error --fit", "plan_error.tables --fit")
    write_planner_file(BESIDE_TABLES, as_json(found) | {"source": source})
    write_planner_file("table_bands.json", {"source": source, "bands": bands(judged)})


if __name__ == "__main__":
    main()
