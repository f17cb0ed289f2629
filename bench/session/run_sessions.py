"""Benchmarks from options to run folders: one session, paired sessions, passes in turns, verdicts.

In turns each process waits before every pass (docs/measuring.md): LLMOPT_PASS_TURNS holds `read,write,pair`,
two open file descriptors and the pair's id. The process writes a byte when it is ready for a pass, or for
scoring, and goes on when it has read one.
"""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path

from ...base.atomic_io import interrupts_held
from ...base.errors import BadInput
from ...base.progress import Progress, ProgressUpdate, as_progress
from ...recipes import DEFAULT_MODEL
from ..gate.compare import Comparison, compare
from ..gate.outputs import VerdictWanted, write_outputs
from ..load.address import Address, find_served
from ..metrics.trace import STEPS_NAME, write_steps
from ..options.options import BenchOptions
from ..record.result import (
    REQUESTS_CSV_NAME,
    REQUESTS_NAME,
    RESULT_NAME,
    BenchRun,
    RunData,
    atomic_run_folder,
    plain,
    to_json,
    write_requests,
    write_requests_csv,
)
from ..report.run_report import write_report
from .session import BenchSession, RunProgress
from .target_sessions import EngineSession, HttpSession

VARIABLE = "LLMOPT_PASS_TURNS"


@dataclass(frozen=True, slots=True)
class PassTurns:
    """The process's side of turns, with the shared id; without descriptors it never waits."""

    read: int | None = None
    write: int | None = None
    pair: str | None = None

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> PassTurns:
        """Read LLMOPT_PASS_TURNS. Raises BadInput: it is malformed."""
        text = environment.get(VARIABLE)
        if not text:
            return cls()
        try:
            read, write, pair = text.split(",")
            return cls(int(read), int(write), pair)
        except ValueError as error:
            raise BadInput(f"{VARIABLE}={text}: it is read,write,pair") from error

    def wait(self) -> None:
        """Say that this process is ready, and wait for its turn; go on alone if nobody gives turns."""
        if self.read is not None and self.write is not None:
            with contextlib.suppress(OSError):
                os.write(self.write, b"r")
                os.read(self.read, 1)


@dataclass(slots=True)
class TurnPipe:
    """The other side: starts a process with `environment` and `descriptors`, `started`, then gives turns."""

    pair: str
    _pipes: tuple[tuple[int, int], tuple[int, int]] = field(
        default_factory=lambda: (os.pipe(), os.pipe())
    )
    is_over: bool = False

    @property
    def descriptors(self) -> tuple[int, int]:
        (read, _), (_, write) = self._pipes
        return read, write

    @property
    def environment(self) -> dict[str, str]:
        read, write = self.descriptors
        return {VARIABLE: f"{read},{write},{self.pair}"}

    def started(self) -> None:
        for descriptor in self.descriptors:
            os.close(descriptor)

    def ready(self) -> bool:
        """Wait until the process is ready; False once it has ended, or if it takes no turns."""
        if not self.is_over and not os.read(self._pipes[1][0], 1):
            self.close()
        return not self.is_over

    def give(self) -> bool:
        """One turn, to its end; False once the process has ended."""
        if self.is_over:
            return False
        try:
            os.write(self._pipes[0][1], b"g")
        except BrokenPipeError:
            self.close()
            return False
        return self.ready()

    def close(self) -> None:
        if not self.is_over:
            os.close(self._pipes[0][1])
            os.close(self._pipes[1][0])
        self.is_over = True


def give_turns(turns: Sequence[TurnPipe]) -> None:
    """Give turns there and back (ABBA) until every process has ended. All are ready."""
    for turn in cycle([*turns, *reversed(turns)]):
        turn.give()
        if all(process.is_over for process in turns):
            return


ENVIRONMENT_NAME = "environment.json"


def run_bench(
    options: BenchOptions,
    progress: Progress | Callable[[ProgressUpdate], None] | None = None,
) -> BenchRun:
    """Measure one model, or the server at `base_url`, under one load. Nothing is written.

    An interrupt during the load ends it: the record holds the finished requests and is marked `interrupted`.
    Passes wait for their turn where another process alternates with this one (`PassTurns`).

    Args:
        progress: a sink, or a function that is called with each update.

    Raises:
        BadInput: the model, the data set or an option is invalid, the server names no model, or there is no
            tokenizer for it.
    """
    turns = PassTurns.from_environment()
    with open_session(options, as_progress(progress)) as session:
        session.say_model()
        session.say_notes()
        for _ in range(options.num_runs):
            turns.wait()
            if not session.run_pass():
                break
        turns.wait()
        run = session.finish()
    run.result["llmopt"]["arms"] = turns.pair
    return run


def run_interleaved(
    options: Sequence[BenchOptions], progress: Progress | None = None
) -> list[BenchRun]:
    """Measure several models or servers under the same load with interleaved passes; all are loaded at once.
    Each round begins with a different one, to balance order effects. An interrupt ends all; those with at
    least one pass are returned."""
    paired_runs = uuid.uuid4().hex
    shared = RunProgress.of(progress, options[0], len(options))
    with ExitStack() as stack:
        opened = [open_session(own, shared, paired_runs) for own in options]
        sessions = [stack.enter_context(session) for session in opened]
        for session in sessions:
            session.say_model()
        sessions[0].say_notes()
        for number in range(options[0].num_runs):
            turn = number % len(sessions)
            if not all(session.run_pass() for session in sessions[turn:] + sessions[:turn]):
                begun = [session for session in sessions if session.passes]
                return [session.finish(interrupted=True) for session in begun]
        return [session.finish() for session in sessions]


def open_session(
    options: BenchOptions,
    progress: Progress | None = None,
    paired_runs: str | None = None,
) -> BenchSession:
    import pyarrow  # noqa: F401 - the run folder's: told if missing, before anything is measured

    if options.base_url is None:
        return EngineSession(options, progress, paired_runs=paired_runs)
    return HttpSession(options, progress, paired_runs=paired_runs)


@dataclass(frozen=True, slots=True)
class Judged:
    """A finished benchmark; the base if it was measured too; and with a verdict what the run is judged by."""

    run: BenchRun
    base_run: BenchRun | None = None
    base: RunData | None = None
    comparison: Comparison | None = None


def run_judged(
    options: BenchOptions, wanted: VerdictWanted | None, progress: Progress | None = None
) -> Judged:
    """Benchmark, and gate if asked, with `llmopt.verdict`, none if interrupted. BadInput: unusable."""
    if wanted is None:
        return Judged(run_bench(options, progress))
    base, base_run = wanted.baseline, None
    if wanted.against is not None:
        runs = run_interleaved(paired_options(options, wanted.against), progress)
        if len(runs) < 2:
            return Judged(runs[0])
        base_run, run = runs
        base = RunData.of_run(base_run)
    else:
        run = run_bench(options, progress)
    new, is_alone = RunData.of_run(run), base is None
    if is_alone and wanted.limits:
        base = new  # limits on values alone
    if base is None or run.interrupted:
        return Judged(run, base_run)
    comparison = compare(base, new, limits=wanted.limits)
    if is_alone:
        comparison = comparison.without_base()
    run.result["llmopt"]["verdict"] = plain(comparison.as_dict())
    return Judged(run, base_run, base, comparison)


def paired_options(options: BenchOptions, against: str) -> list[BenchOptions]:
    """The paired runs, the base first; it is also the quality reference unless one is set."""
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
    base_name = Path(against).name + ("-base" if Path(against).name == name else "")
    # Injected delay applies to the new run.
    base = {"model": against, "name": base_name, "reference": None, "slowdown": 1.0}
    new = {"reference": reference, "name": name}
    return [options.model_copy(update=base), options.model_copy(update=new)]


def paired_servers(options: BenchOptions, against: str) -> list[BenchOptions]:
    """The server at `against` and that of `options`, each with its model name, on equal prompts."""
    address = Address.parse(options.base_url or against)
    served = find_served(options, address)
    name = options.name or options.label or Path(served.model).name
    host, base_address = against.partition("://")[2].rstrip("/"), Address.parse(against)
    base_model = base_address.listed(served.model)
    base = {
        "base_url": against,
        "model": base_model,
        "name": f"{host.replace(':', '-').replace('/', '-')}-base",
        "started_server": None,
        "reference": None,
        # A started server may need its own request format; the base may be any server.
        "backend": "openai" if options.started_server else options.backend,
    }
    # The same tokenizer and maximum length give the same workload.
    limits = [served.max_model_len]
    with contextlib.suppress(BadInput):
        card = base_address.model_card(base_model)
        limits.append(card.get("max_model_len") or served.max_model_len)
    reference = options.reference or (against if options.quality else None)
    shared = {"tokenizer": served.tokenizer_name, "max_model_len": min(limits)}
    return [
        options.model_copy(update={**shared, **base}),
        options.model_copy(update={**shared, "name": name, "reference": reference}),
    ]


def write_verdict(judged: Judged, wanted: VerdictWanted, folder: Path) -> None:
    """`comparison.html` and `comparison.md` in the run's folder, and the requested output files."""
    from ..report.comparison import comparison_page

    new, comparison = RunData.of_run(judged.run), judged.comparison
    if comparison is not None and judged.base is not None:
        page = comparison_page(judged.base, new, comparison)
        page.write(folder / "comparison.html", folder / "comparison.md")
    write_outputs(new, comparison, wanted.junit, wanted.benchmark_json)


def write_run(
    run: BenchRun, target: Path, *, with_csv: bool = False, with_report: bool = True
) -> Path:
    """Write the run folder `target` atomically; returns it."""
    with interrupts_held():
        environment = to_json(run.result["llmopt"]["environment"])
        with atomic_run_folder(target) as folder:
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
