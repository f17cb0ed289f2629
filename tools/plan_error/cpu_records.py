"""Print the error of CPU plans by this project's own records; with `--write`, write their band.

    python -m tools.plan_error.cpu_records [--write]

A plan for a CPU takes the shares of the roofs that a run of `llmopt bench` reached. Here each configuration
of ours in `docs/measured/cpu/cpu-peers-*.json` (a model in a weight format, all on one processor) is that
run: fitted are the bytes per second of one of its decode cases and the operations per second of its prefill,
and held out are the steps of every other model. They are few, and of one processor: the band is wide.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from llmopt.engine.planner import error_bands

from .report import held_quantiles

RECORDS = Path(__file__).parents[2] / "docs" / "measured" / "cpu"
KEY = "llmopt|cpu|model not measured"
PREFILL = "prefill 512"
HELD = (0.03, 0.97)
"""Quantiles of its steps, of few models."""
ANSWER = 128
"""Answer tokens of the request whose rate is the throughput: alone, after a prompt of 512."""


@dataclass(frozen=True, slots=True)
class Configuration:
    """A model in a weight format: bytes, operations and measured seconds of a step, by case."""

    model: str
    name: str
    steps: Mapping[str, tuple[float, float, float]]

    @property
    def decodes(self) -> list[str]:
        """Cases that decode."""
        return [case for case in self.steps if case != PREFILL]

    def predicted(self, case: str, decode: str, other: Configuration) -> float:
        """Seconds of this case by the shares that another one's decode case and prefill reached."""
        moved, computed, _ = self.steps[case]
        fitted, prefill = other.steps[decode], other.steps[PREFILL]
        return max(moved * fitted[2] / fitted[0], computed * prefill[2] / prefill[1])


def configurations(folder: Path = RECORDS) -> list[Configuration]:
    """Our rows of the records, with the median of their rounds."""
    found = []
    for path in sorted(folder.glob("cpu-peers-*.json")):
        record = json.loads(path.read_text(encoding="utf-8"))
        model = path.stem.removeprefix("cpu-peers-").split("-")[0]
        for row in record["rows"]:
            if row["name"].startswith("llmopt "):
                steps = dict(_steps(row, record))
                found.append(Configuration(model, row["name"], steps))
    return found


def _steps(row: Mapping[str, Any], record: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for case in record["cases"]:
        rounds = [
            f["rate"] for f in record["found"] if (f["row"], f["case"]) == (row["name"], case)
        ]
        work = row["work"][case]
        yield case, (work["bytes"], work["operations"], work["tokens"] / median(rounds))


Transfer = tuple[str, str, str, float]
"""The fitted and the held-out model, a measure, and measured / predicted."""


def transfers(known: Sequence[Configuration]) -> Iterator[Transfer]:
    """Each configuration with a prefill as the run, every other model's steps held out."""
    for run in known:
        for decode in run.decodes if PREFILL in run.steps else ():
            for other in known:
                if other.model != run.model:
                    for measure, ratio in _ratios(run, decode, other):
                        yield run.model, other.model, measure, ratio


def _ratios(run: Configuration, decode: str, other: Configuration) -> Iterator[tuple[str, float]]:
    ratios = {
        case: seconds / other.predicted(case, decode, run)
        for case, (_, _, seconds) in other.steps.items()
    }
    for case in other.decodes:
        yield "tpot", ratios[case]
    if PREFILL in ratios and "alone" in ratios:
        yield "ttft", ratios[PREFILL]
        parts = ((PREFILL, 1), ("alone", ANSWER - 1))
        took = sum(count * other.steps[case][2] for case, count in parts)
        yield "throughput", sum(n * other.steps[c][2] / ratios[c] for c, n in parts) / took


def band(found: Sequence[Transfer], configurations: int) -> dict[str, Any]:
    """Factors that held 90 % of the held-out steps."""
    entry: dict[str, Any] = {"rows": configurations}
    for measure in error_bands.MEASURES:
        ratios = [ratio for _, _, name, ratio in found if name == measure]
        entry[measure] = [float(f"{q:.3g}") for q in held_quantiles(ratios, HELD)]
    return entry


def coverage(found: Sequence[Transfer], measure: str) -> float:
    """Share of the steps of each model within the band of those that have nothing to do with it."""
    within = []
    for left in sorted({model for _, model, _, _ in found}):
        low, high = band([t for t in found if left not in t[:2]], 0)[measure]
        held = [t[3] for t in found if t[1] == left and t[2] == measure]
        within += [low <= ratio <= high for ratio in held]
    return float(np.mean(within))


def main() -> None:
    """Judge and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--write", action="store_true", help="write the planner's JSON file")
    known = configurations()
    found = list(transfers(known))
    entry = band(found, len(known))
    if parser.parse_args().write:
        source = (
            "python -m tools.plan_error.cpu_records --write, of docs/measured/cpu/cpu-peers-*.json"
        )
        text = json.dumps({"source": source, "bands": {KEY: entry}}, indent=1) + "\n"
        Path(error_bands.__file__).with_name("cpu_band.json").write_text(text, encoding="utf-8")
    models = sorted({one.model for one in known})
    print(f"{len(known)} configurations of {len(models)} models ({', '.join(models)})")
    for measure in error_bands.MEASURES:
        ratios = np.array([ratio for _, _, name, ratio in found if name == measure])
        size, (low, high) = np.abs(1 / ratios - 1), entry[measure]
        print(
            f"{measure:12}{len(ratios):5} held-out steps: {100 * np.median(size):5.1f} % off in the median, "
            f"{100 * size.mean():5.1f} % in the mean; band x{low:g} to x{high:g}, "
            f"{100 * coverage(found, measure):.1f} % of a left-out model within that of the others"
        )


if __name__ == "__main__":
    main()
