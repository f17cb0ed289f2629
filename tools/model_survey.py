"""Survey of model types: `python tools/model_survey.py [TYPE...] [--columns NAME] [--docs] [--output FILE]`.

A tiny random checkpoint of every decoder-only causal and image-text type of the installed transformers
(`tests/support/survey/types.json`, where each exclusion has its reason) goes through each column. A type that
transformers itself cannot build counts as missed. `--docs` writes the table of docs/measured/model-survey.md.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import transformers
from llmopt.base.atomic_io import write_atomically

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.support.survey.case import Case, Column, Verdict, surveyed_types, unlisted_types
from tools.document_part import ROOT, write_part
from tools.survey.engine_column import EngineColumn
from tools.survey.plan_column import PlanColumn
from tools.survey.stream_column import StreamColumn
from tools.survey.written_columns import AwqColumn, QuantizedColumn, ReloadColumn, VerifyColumn

DOCUMENT = ROOT / "docs" / "measured" / "model-survey.md"
COLUMNS: tuple[Column, ...] = (
    PlanColumn(),
    EngineColumn(),
    StreamColumn(),
    QuantizedColumn("rtn"),
    QuantizedColumn("gptq"),
    VerifyColumn(),
    ReloadColumn(),
    AwqColumn(),
)
Results = dict[str, dict[str, Verdict]]


def main() -> int:
    """Survey, print, and write the table where asked; 1 if a type is unlisted or a column is wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("types", nargs="*", help="only these types")
    parser.add_argument(
        "--output", type=Path, help="JSON of the verdicts: those of other types stay"
    )
    parser.add_argument(
        "--columns",
        nargs="+",
        choices=[column.name for column in COLUMNS],
        metavar="NAME",
        help="only these columns: the verdicts of the others stay those of --output",
    )
    parser.add_argument("--docs", action="store_true", help=f"write the table into {DOCUMENT.name}")
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    warnings.simplefilter("ignore")
    listed = surveyed_types()
    columns = [c for c in COLUMNS if c.name in (options.columns or [c.name])]
    partly = bool(options.types or options.columns) and options.output
    results = read_results(options.output) if partly else {}
    for model_type in options.types or listed:
        before = results.get(model_type, {}) if options.columns else {}
        wanted = columns if before else COLUMNS
        results[model_type] = before | survey(model_type, listed.get(model_type, {}), wanted)
        says = ", ".join(f"{k} {v.outcome} {v.detail}" for k, v in results[model_type].items())
        print(f"{model_type}: {says}", flush=True)
        if options.output:
            write_results(options.output, results)
    results = dict(sorted(results.items()))
    unlisted = list(unlisted_types())
    print("\n".join([*summary(results), f"unlisted types: {', '.join(unlisted) or 'none'}"]))
    if options.docs:
        write_part(DOCUMENT, "model_survey.py", table(results))
    outcomes = {verdict.outcome for row in results.values() for verdict in row.values()}
    return 1 if unlisted or outcomes & {"wrong", "traceback"} else 0


def read_results(path: Path) -> Results:
    """The verdicts of an earlier survey; none without its file."""
    if not path.is_file():
        return {}
    rows = json.loads(path.read_text(encoding="utf-8"))
    return {t: {c: Verdict(*says) for c, says in row.items()} for t, row in rows.items()}


def write_results(path: Path, results: Results) -> None:
    """Write the verdicts, in the order of the types."""
    rows = {
        t: {c: [v.outcome, v.detail] for c, v in row.items()} for t, row in sorted(results.items())
    }
    write_atomically(path, (json.dumps(rows, indent=1) + "\n").encode())


def survey(
    model_type: str, changes: dict[str, object], columns: Sequence[Column] = COLUMNS
) -> dict[str, Verdict]:
    """The verdict of each of the columns for one type."""
    with tempfile.TemporaryDirectory() as folder:
        case = Case(model_type, changes, Path(folder))
        try:
            _ = case.raw, case.model
        except Exception as error:  # transformers may fail to build in any way
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            return {column.name: Verdict("missed", reason[:160]) for column in columns}
        return {column.name: _verdict(column, case) for column in columns}


def _verdict(column: Column, case: Case) -> Verdict:
    try:
        verdict = column.verdict(case)
    except Exception as error:  # a traceback is a verdict, and the survey goes on
        line = (str(error).strip().splitlines() or [""])[0]
        verdict = Verdict("traceback", f"{type(error).__name__}: {line}"[:160])
    detail = verdict.detail.replace(f"{case.folder}/", "")
    # Columns write into temporary folders of their own, which a committed record must not name.
    detail = re.sub(rf"{re.escape(tempfile.gettempdir())}/[^\s:]+:? ?", "", detail)
    return Verdict(verdict.outcome, detail)


def summary(results: Results) -> list[str]:
    """One line a column: how many types of each outcome."""
    lines = []
    for column in COLUMNS:
        counts = Counter(row[column.name].outcome for row in results.values())
        share = counts["exact"] / max(1, len(results))
        rest = ", ".join(
            f"{counts[name]} {name}" for name in ("wrong", "refused", "missed", "traceback")
        )
        lines.append(
            f"{column.name}: {counts['exact']} of {len(results)} exact ({share:.1%}), {rest}"
        )
    return lines


def table(results: Results) -> str:
    """The survey as a Markdown table: what is not exact with its reason."""
    names = [column.name for column in COLUMNS]
    lines = [f"transformers {transformers.__version__}, {len(results)} types.", ""]
    if left := sorted(set(surveyed_types()) - set(results)):
        lines += [f"Listed, and not run through the columns yet: {', '.join(left)}.", ""]
    lines += [
        *summary(results),
        "",
        f"| type | {' | '.join(names)} |",
        "| --- |" + " --- |" * len(names),
    ]
    lines += [row_line(model_type, row) for model_type, row in results.items()]
    return "\n".join(lines)


def row_line(model_type: str, row: Mapping[str, Verdict]) -> str:
    """A type's verdicts, those that are not exact with their reasons."""
    cells = [
        v.outcome if v.outcome == "exact" else f"{v.outcome}: {v.detail}".replace("|", "/")
        for v in (row[column.name] for column in COLUMNS)
    ]
    return f"| {model_type} | {' | '.join(cells)} |"


if __name__ == "__main__":
    sys.exit(main())
