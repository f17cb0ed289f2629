"""Gated benchmarks: a verdict against a recorded baseline, or against another model in paired runs."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path

from ...quant.base.atomic_io import write_atomically
from ...quant.base.errors import BadInput
from ...quant.base.progress import Progress
from ...recipes import DEFAULT_MODEL
from ..client.address import Address
from ..client.served_model import find_served
from ..gate.compare import Comparison, compare
from ..gate.outputs import write_benchmark_json, write_junit
from ..gate.verdict_wanted import VerdictWanted
from ..options.options import BenchOptions
from ..record.result import BenchRun, plain
from ..record.run_data import RunData
from .run_sessions import run_bench, run_interleaved


@dataclass(frozen=True, slots=True)
class Judged:
    """A finished benchmark; with a base, also the base run and the verdict."""

    run: BenchRun
    base: BenchRun | None = None
    comparison: Comparison | None = None


def run_judged(
    options: BenchOptions, wanted: VerdictWanted | None, progress: Progress | None = None
) -> Judged:
    """Run the benchmark and, if requested, the gate; the record holds the verdict under `llmopt.verdict`.

    An interrupted run has no verdict.

    Raises:
        BadInput: the model, the data set or an option is unusable.
    """
    base_run = None
    if wanted is not None and wanted.against is not None:
        runs = run_interleaved(paired_options(options, wanted.against), progress)
        if len(runs) < 2:
            return Judged(runs[0])
        base_run, run = runs
    else:
        run = run_bench(options, progress)
    base = RunData.of_run(base_run) if base_run else wanted.baseline if wanted else None
    if wanted is None or base is None or run.interrupted:
        return Judged(run, base_run)
    comparison = compare(base, RunData.of_run(run), limits=wanted.limits)
    run.result["llmopt"]["verdict"] = plain(comparison.as_dict())
    return Judged(run, base_run, comparison)


def paired_options(options: BenchOptions, against: str) -> list[BenchOptions]:
    """The paired runs, the base first. The base is also the quality reference unless one is set."""
    is_url = against.startswith(("http://", "https://"))
    if is_url != (options.base_url is not None):
        raise BadInput(
            "--against names a model where a model of this process is measured, and a URL beside "
            "--base-url or --serve: transport alone would be a difference"
        )
    if is_url:
        return paired_servers(options, against)
    reference = options.reference or (against if options.quality else None)
    name = options.name or options.label or Path(options.model or DEFAULT_MODEL).name
    base_name = Path(against).name
    base = {
        "model": against,
        "name": base_name if base_name != name else f"{base_name}-base",
        "reference": None,
        # Injected delay applies to the new run.
        "slowdown": 1.0,
    }
    return [
        options.model_copy(update=base),
        options.model_copy(update={"reference": reference, "name": name}),
    ]


def paired_servers(options: BenchOptions, against: str) -> list[BenchOptions]:
    """The server at `against` and the one of `options`, with the same prompts for both.

    The model name is resolved per server: served names of one model usually differ.
    """
    address = Address.parse(options.base_url or against)
    served = find_served(options, address)
    name = options.name or options.label or Path(served.model).name
    host = against.partition("://")[2].rstrip("/")
    base = {
        "base_url": against,
        "model": None,
        "name": f"{host.replace(':', '-').replace('/', '-')}-base",
        "started_server": None,
        "reference": None,
        # A started server may need its own request format; the base may be any server.
        "backend": "openai" if options.started_server else options.backend,
    }
    # The same tokenizer and maximum length give the same workload.
    limits = [served.max_model_len]
    with contextlib.suppress(BadInput):
        limits.append(
            Address.parse(against).model_card().get("max_model_len") or served.max_model_len
        )
    reference = options.reference or (against if options.quality else None)
    shared = {"tokenizer": served.tokenizer_name, "max_model_len": min(limits)}
    return [
        options.model_copy(update={**shared, **base}),
        options.model_copy(update={**shared, "name": name, "reference": reference}),
    ]


def write_verdict(judged: Judged, wanted: VerdictWanted, folder: Path) -> None:
    """`comparison.html` and `comparison.md` in the run's folder, and the requested output files."""
    from ..page.page import to_html, to_markdown
    from ..report.comparison_page import comparison_page

    new = RunData.of_run(judged.run)
    base = RunData.of_run(judged.base) if judged.base else wanted.baseline
    comparison = judged.comparison
    if comparison is not None and base is not None:
        write_atomically(
            folder / "comparison.html", to_html(comparison_page(base, new, comparison))
        )
        page = comparison_page(base, new, comparison, with_figures=False)
        write_atomically(folder / "comparison.md", to_markdown(page))
        if wanted.junit is not None:
            write_junit(wanted.junit, comparison)
    if wanted.benchmark_json is not None:
        write_benchmark_json(wanted.benchmark_json, new, comparison)
