"""Gate options of a benchmark, and verdicts as JUnit XML and github-action-benchmark JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from ...base.atomic_io import write_atomically
from ...base.errors import BadInput
from ..record.result import RunData, to_json
from .compare import Comparison
from .limits import MEASURED, GateOutcome, Limit, parse_gate


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
        Limits on values need no base: the run is judged by itself. Raises BadInput: two bases, limits on
        changes without one, a JUnit file without limits, or a gate or a baseline that cannot be read."""
        if baseline is not None and against is not None:
            raise BadInput("--baseline and --against were given: a run has one base, give one")
        limits = parse_gate(gate) if gate is not None else ()
        if baseline is None and against is None:
            if changes := [limit for limit in limits if limit.relative]:
                limit, value = changes[0], "kl<=0.02"
                if limit.quantity.unit == "share" and 0 < limit.bound <= 1:
                    value = f"{limit.quantity.key}{'<=' if limit.at_most else '>='}{limit.bound:g}"
                raise BadInput(
                    f"--gate {limit.quantity.label} {limit.text}: a change needs a base: give --baseline or "
                    f"--against, or a limit on the value, without a percent sign, such as {value}"
                )
            if junit is not None and not limits:
                raise BadInput(
                    "--junit needs something to judge by: --baseline, --against or --gate"
                )
            if not limits and benchmark_json is None:
                return None
        recorded = RunData.read(baseline) if baseline is not None else None
        return cls(recorded, against, limits, junit, benchmark_json)


# Characters that XML 1.0 cannot hold, even escaped.
FORBIDDEN = {code: None for code in range(32) if code not in (9, 10, 13)}
DASHBOARD = {
    "smaller": ("median_ttft_ms", "p99_ttft_ms", "median_tpot_ms", "p99_tpot_ms", "median_e2el_ms"),
    "bigger": ("output_throughput", "request_throughput"),
}


def junit(comparison: Comparison) -> str:
    """JUnit XML: a test case per limit, and one for the verdict. A regression is a failure, no verdict an
    error; what a pass leaves undecided is skipped."""
    kinds = {GateOutcome.REGRESSION: "failure", GateOutcome.NO_VERDICT: "error"}
    if comparison.outcome is GateOutcome.PASS:
        kinds = dict.fromkeys(kinds, "skipped")
    cases = [(f"{v.label} {v.limit}", v.outcome, v.reason) for v in comparison.verdicts]
    cases.append(("verdict", comparison.outcome, comparison.sentence))
    suite = ElementTree.Element(
        "testsuite",
        name=clean(f"llmopt compare: {comparison.title}"),
        tests=str(len(cases)),
        failures=str(sum(kinds.get(outcome) == "failure" for _, outcome, _ in cases)),
        errors=str(sum(kinds.get(outcome) == "error" for _, outcome, _ in cases)),
        skipped=str(sum(kinds.get(outcome) == "skipped" for _, outcome, _ in cases)),
    )
    for name, outcome, reason in cases:
        case = ElementTree.SubElement(
            suite, "testcase", classname="llmopt.compare", name=clean(name), time="0"
        )
        if outcome is GateOutcome.PASS:
            ElementTree.SubElement(case, "system-out").text = clean(reason)
        else:
            text = clean(reason)
            element = ElementTree.SubElement(case, kinds[outcome], message=text, type=outcome.value)
            element.text = text
    suites = ElementTree.Element("testsuites")
    suites.append(suite)
    ElementTree.indent(suites)
    return '<?xml version="1.0" encoding="utf-8"?>\n' + ElementTree.tostring(
        suites, encoding="unicode"
    )


def clean(text: str) -> str:
    return text.translate(FORBIDDEN)


def benchmark_entries(
    data: RunData, comparison: Comparison | None = None
) -> dict[str, list[dict[str, Any]]]:
    """{`smaller` or `bigger`: entries} in the list form of github-action-benchmark's customSmallerIsBetter
    and customBiggerIsBetter; `value` is that of the run's own table, `range` the spread over the passes."""
    extra = f"{comparison.outcome.value}: {comparison.sentence}" if comparison else ""
    entries: dict[str, list[dict[str, Any]]] = {"smaller": [], "bigger": []}

    def add(kind: str, label: str, unit: str, value: float | None, **more: str) -> None:
        if value is not None:
            entry = {"name": f"{data.name}: {label}", "unit": unit, "value": value}
            entries[kind].append({**entry, **more, "extra": extra})

    for kind, keys in DASHBOARD.items():
        for key in keys:
            if values := data.values(key):
                half = (max(values) - min(values)) / 2
                what = MEASURED[key]
                value = data.result.get(key) or sum(values) / len(values)
                add(kind, what.label, what.unit, value, range=f"± {half:.4g}")
    ours = data.result["llmopt"]
    memory, quality = ours["memory"], ours["quality"] or {}
    add("smaller", "Weights held", "bytes", memory["weight_bytes"])
    add("smaller", "Peak resident", "bytes", memory["peak_resident_bytes"])
    add("smaller", "Perplexity", "per token", quality.get("perplexity"))
    add("smaller", "KL from the reference", "nats", quality.get("kl_nats"))
    return entries


def write_outputs(
    data: RunData | None,
    comparison: Comparison | None,
    junit_path: Path | None,
    benchmark_json: Path | None,
) -> None:
    """The verdict as JUnit XML and the run for a dashboard, where they were asked for: smaller-is-better
    entries in `benchmark_json`, bigger-is-better ones next to it, as its format has one direction a file."""
    if junit_path is not None and comparison is not None:
        write_atomically(junit_path, junit(comparison))
    if (path := benchmark_json) is not None and data is not None:
        entries = benchmark_entries(data, comparison)
        write_atomically(path, to_json(entries["smaller"]))
        bigger = path.with_name(f"{path.stem}.bigger{path.suffix}")
        write_atomically(bigger, to_json(entries["bigger"]))
