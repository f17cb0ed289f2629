"""Compares the answers of `check` with those of the loaders, and writes docs/measured/check.md."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from llmopt.base.errors import BadInput
from llmopt.quant.check.check import check
from llmopt.quant.check.engines import Target
from llmopt.quant.check.kernels import CPU

from tools.check_truth.cases import CASES
from tools.check_truth.load import LOADERS

DIFFERENT = 0.1
"""Loss of likeness from the best loader's at which a loader that runs computes something else."""
LENGTH = 160
"""Characters of a reason in a table."""
Table = Sequence[Sequence[Mapping[str, float]]]


@dataclass(frozen=True, slots=True)
class Row:
    """A checkpoint in a loader: what it did, and what `check` says of it.

    Attributes:
        refusal: the loader's reason; empty where it ran.
        likeness: correlation of its log-probabilities with those of the model before quantization.
        is_other: True if it ran, and with random weights, NaN or a likeness well below the best loader's.
    """

    checkpoint: str
    loader: str
    refusal: str
    likeness: float | None
    answer: str
    reason: str
    is_other: bool = False

    @property
    def loads(self) -> bool:
        return not self.refusal and not self.is_other

    @property
    def verdict(self) -> str:
        """`right`, `unknown`, or what is wrong."""
        if self.answer == "unknown":
            return "unknown"
        if (self.answer == "loads") == self.loads:
            return "right"
        return f'wrong "{self.answer}"'


def likeness(answer: Mapping[str, Any], plain: Table) -> float | None:
    """Mean correlation of the log-probabilities at each position; None: no table, NaN: NaN in it."""
    values = [
        float(np.corrcoef([ours[t] for t in shared], [theirs[t] for t in shared])[0, 1])
        for prompt, other in zip(answer.get("logprobs", ()), plain, strict=False)
        for ours, theirs in zip(prompt, other, strict=False)
        if len(shared := sorted(ours.keys() & theirs.keys())) > 2
    ]
    return sum(values) / len(values) if values else None


def checked(folder: Path) -> dict[str, tuple[str, str]]:
    """Answer and reason of `check` on this processor, by loader."""
    path = next(folder.glob("*.gguf"), folder)
    try:
        report = check(path, tuple(LOADERS), Target(None, "cpu", CPU, 1))
    except BadInput as error:
        return dict.fromkeys(LOADERS, ("does not", str(error)))
    broken = [finding.message for finding in report.findings if finding.severity == "broken"]
    return {
        engine.engine: ("does not", broken[0]) if broken else (engine.answer, engine.reason)
        for engine in report.engines
    }


def compared(truth: Path) -> list[Row]:
    """A row for each checkpoint and each loader that tried it."""
    answers = {
        loader: json.loads(path.read_text())
        for loader in LOADERS
        if (path := truth / f"{loader}.json").is_file()
    }
    plain = json.loads((truth / "plain.json").read_text())
    rows: list[Row] = []
    for case in CASES:
        tried = {loader: known.get(case.folder) for loader, known in answers.items()}
        if not any(tried.values()):
            continue
        verdicts = checked(truth / case.folder)
        for loader, result in tried.items():
            if result is not None:
                near = likeness(result, plain[case.family]["logprobs"])
                refusal = short(result.get("error", ""))
                # What is initialised at random or gives NaN computes something else, whoever is best.
                is_other = bool(result.get("missing")) or (near is not None and math.isnan(near))
                near = None if near is None or math.isnan(near) else round(near, 3)
                answer, reason = verdicts[loader]
                row = Row(case.folder, loader, refusal, near, answer, short(reason), is_other)
                rows.append(row)
    best: dict[str, float] = {}
    for row in rows:
        best[row.checkpoint] = max(best.get(row.checkpoint, 0.0), row.likeness or 0.0)
    return [
        replace(row, is_other=True)
        if row.likeness is not None and row.likeness < best[row.checkpoint] - DIFFERENT
        else row
        for row in rows
    ]


def record_of(rows: Sequence[Row], truth: Path) -> dict[str, Any]:
    """The record: rows, the loaders that ran, and the checkpoints that their tools refused to write."""
    ran: dict[str, str] = {}
    for loader in LOADERS:
        known = json.loads((truth / f"{loader}.json").read_text())
        ran[loader] = next(answer["loader"] for answer in known.values() if "loader" in answer)
    refused = {
        case.folder: short(path.read_text())
        for case in CASES
        if (path := truth / f"{case.folder}.refused").is_file()
    }
    return {"loaders": ran, "refused": refused, "rows": [asdict(row) for row in rows]}


def short(text: str) -> str:
    """The start of a message, in one line that a table takes."""
    line = " ".join(text.replace("|", "/").replace("`", "'").split())
    line = re.sub(r"/\S*/truth/", "", line)
    return line if len(line) <= LENGTH else f"{line[:LENGTH]} …"


def rows_of(record: Mapping[str, Any]) -> list[Row]:
    return [Row(**fields) for fields in record["rows"]]


def summary(rows: Sequence[Row]) -> Iterator[str]:
    yield '| loader | tried | load | right | wrong "loads" | wrong "does not" | unknown |'
    yield "|---|--:|--:|--:|--:|--:|--:|"
    for loader in LOADERS:
        own = [row for row in rows if row.loader == loader]
        counts = Counter(row.verdict for row in own)
        kinds = ("right", 'wrong "loads"', 'wrong "does not"', "unknown")
        cells = [loader, len(own), sum(row.loads for row in own), *(counts[k] for k in kinds)]
        yield f"| {' | '.join(map(str, cells))} |"


def answers_table(rows: Sequence[Row]) -> Iterator[str]:
    """A line for each checkpoint: what each loader did, with the verdict on `check` where it is not right."""
    yield f"| checkpoint | {' | '.join(LOADERS)} |"
    yield f"|---|{'---|' * len(LOADERS)}"
    for checkpoint in dict.fromkeys(row.checkpoint for row in rows):
        own = {row.loader: row for row in rows if row.checkpoint == checkpoint}
        yield f"| {checkpoint} | {' | '.join(_cell(own.get(loader)) for loader in LOADERS)} |"


def _cell(row: Row | None) -> str:
    if row is None:
        return "not tried"
    result = "runs" if row.loads else "refuses" if row.refusal else "other values"
    likeness = "" if row.likeness is None else f" {row.likeness:.2f}"
    return result + likeness + ("" if row.verdict == "right" else f", check: {row.verdict}")


def reasons(rows: Sequence[Row]) -> Iterator[str]:
    """The reasons of loaders, each with the checkpoints that it is given for."""
    groups: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        if not row.loads:
            reason = short(row.refusal) or "it runs, and computes something else"
            groups.setdefault((row.loader, reason), []).append(row.checkpoint)
    yield "| loader | checkpoints | its reason |"
    yield "|---|---|---|"
    for (loader, reason), names in groups.items():
        yield f"| {loader} | {', '.join(names)} | {reason} |"


def parts(record: Mapping[str, Any]) -> dict[str, str]:
    """The generated parts of the page by name."""
    rows = rows_of(record)
    ran = [f"* {loader}: {text}" for loader, text in record["loaders"].items()]
    refused = [f"* {name}: {reason}" for name, reason in record["refused"].items()]
    lines = {
        "summary": [*summary(rows), "", *ran],
        "answers": answers_table(rows),
        "reasons": reasons(rows),
        "refused": refused,
    }
    return {name: "\n".join(text) for name, text in lines.items()}
