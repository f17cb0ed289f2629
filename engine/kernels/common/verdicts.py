"""Kernel verdicts: a candidate earns its place on a device, once per (GPU, driver, torch, Triton, kernels).

When an operation is first selected for a query on a CUDA device, each candidate is compared with the last
one, the reference, and timed against those after it. One that is wrong, fails or is slower is dropped with a
warning line; verdicts are stored in the user's cache folder. One process at a time tries candidates. A trial
that ends the process leaves a note, by which a later process drops the candidate.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import re
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import torch

from ....base.atomic_io import write_atomically
from ....base.build import cache_folder
from ....base.errors import BadInput, Failure, first_line

_log = logging.getLogger(__name__)
Implementation = TypeVar("Implementation")
KernelQuery = TypeVar("KernelQuery")

VARIABLE = "LLMOPT_KERNEL_TRIALS"
"""`off`: no candidate is tried and no stored verdict is read; the order of the candidates decides."""
MARGIN = 1.05
"""A candidate stays unless a later one is faster by more than this: timings of two runs differ so much."""
LONGEST_REASON = 200
"""Characters of the error of a compiler or driver."""
MOST_ATTEMPTS = 2
"""Trials of a candidate that may end their process: a first one may have been killed from outside."""


@dataclass(frozen=True, slots=True)
class Trial(Generic[Implementation]):
    """Inputs and calls by which the candidates for a kernel query are compared and timed.

    Attributes:
        compute: runs an implementation on small inputs, the same for each; returns its outputs.
        tolerance: bound on |output - reference| / |reference| of the worst output.
        calls: calls of an implementation to time, one for each batch size that matters; the geometric mean of
            the ratios compares them. None: the order of the candidates decides.
    """

    compute: Callable[[Implementation], Sequence[torch.Tensor]]
    tolerance: float
    calls: Callable[[Implementation], Sequence[Callable[[], object]]] | None = None


class Quartiles(NamedTuple):
    """Seconds of a call on the device: quartiles of its rounds."""

    low: float
    median: float
    high: float


@dataclass(frozen=True, slots=True)
class Verdict:
    """Outcome of a trial.

    Attributes:
        error: error against the reference, in units of `Trial.tolerance`; None: it failed, or is the
            reference.
        dropped: reason why the candidate is not chosen; None: it earned its place.
    """

    error: float | None = None
    seconds: tuple[Quartiles, ...] = ()
    dropped: str | None = None


@dataclass(frozen=True, slots=True)
class Candidate(Generic[KernelQuery, Implementation]):
    """Implementation; `refuses` returns the reason why it does not support a kernel query, or None."""

    name: str
    refuses: Callable[[KernelQuery], str | None]
    run: Implementation


Clock = Callable[[Callable[[], object]], Quartiles]


class VerdictTable:
    """Verdicts of one device by `case_name` and candidate, and crossovers; a damaged file is written anew."""

    def __init__(self, path: Path, clock: Clock) -> None:
        self.path, self._clock = path, clock
        self.verdicts: dict[str, dict[str, Verdict]] = {}
        self.crossovers: dict[str, int] = {}
        self._trying: dict[str, tuple[str, int]] = {}
        self._untried: set[str] = set()
        self._is_alone = self._is_locked = False
        self._read()

    def dropped(self, operation: str, query: str) -> dict[str, str]:
        known = self.verdicts.get(case_name(operation, query), {})
        return {name: kept.dropped for name, kept in known.items() if kept.dropped is not None}

    def judge(
        self,
        operation: str,
        query: str,
        contenders: Sequence[Candidate[Any, Implementation]],
        make: Callable[[], Trial[Implementation] | None],
    ) -> dict[str, str]:
        """`dropped`, after a trial of all; the last is the reference. Failure: the device is unusable."""
        name, wanted = case_name(operation, query), {contender.name for contender in contenders}
        if name not in self._untried and set(self.verdicts.get(name, {})) != wanted:
            with self._alone():
                if set(self.verdicts.get(name, {})) == wanted:  # by a process before
                    return self.dropped(operation, query)
                try:
                    with torch.inference_mode():
                        verdicts = self._tried(name, contenders, make)
                except torch.OutOfMemoryError:
                    return {}  # no fault of a kernel: another start tries again
                if verdicts is None:
                    self._untried.add(name)
                    return {}
                self.verdicts[name] = verdicts
                self._write()
            for candidate, verdict in verdicts.items():
                if verdict.dropped is not None:
                    _log.warning(
                        "%s for %s: %s is dropped: %s", operation, query, candidate, verdict.dropped
                    )
        return self.dropped(operation, query)

    def crossover(self, name: str, measure: Callable[[], int]) -> int:
        if name not in self.crossovers:
            with self._alone():
                if name not in self.crossovers:
                    self.crossovers[name] = measure()
                    self._write()
        return self.crossovers[name]

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Have other processes wait until nothing is timed here; first take over what they have stored."""
        with ExitStack() as stack:
            if not self._is_alone:  # a trial may select kernels itself
                self._is_locked = False
                # Nothing can be stored there, or its file system has no locks.
                with suppress(OSError):
                    self.path.parent.mkdir(parents=True, exist_ok=True)
                    file = stack.enter_context(self.path.with_suffix(".lock").open("w"))
                    fcntl.flock(file, fcntl.LOCK_EX)
                    self._is_locked = True
                self._read()
                self._is_alone = True
                stack.callback(setattr, self, "_is_alone", False)
            yield

    def clear(self) -> None:
        self.verdicts, self.crossovers, self._trying = {}, {}, {}
        self.path.unlink(missing_ok=True)

    def _tried(
        self,
        name: str,
        contenders: Sequence[Candidate[Any, Implementation]],
        make: Callable[[], Trial[Implementation] | None],
    ) -> dict[str, Verdict] | None:
        """Verdict on each; None: there is no trial, or the reference itself fails in it."""
        *candidates, reference = contenders
        try:
            trial = make()
            if trial is None:
                return None
            expected = trial.compute(reference.run)
        except torch.OutOfMemoryError:
            raise
        except Exception as problem:
            self._check_device(reference.name, problem)
            _log.warning("%s cannot be tried: %s", name, _reason(problem))
            return None
        verdicts = {
            candidate.name: self._try(name, candidate, trial, expected) for candidate in candidates
        }
        verdicts[reference.name] = Verdict(seconds=self._seconds(reference, trial))
        return _without_slower(verdicts)

    def _try(
        self,
        name: str,
        contender: Candidate[Any, Implementation],
        trial: Trial[Implementation],
        expected: Sequence[torch.Tensor],
    ) -> Verdict:
        # An attempt that is stored while no other process tries has ended its process.
        candidate, times = self._trying.get(name, ("", 0))
        times *= candidate == contender.name
        if times >= MOST_ATTEMPTS:
            return Verdict(dropped=f"it ended the process that tried it, {times} times")
        self._trying[name] = contender.name, times + 1
        if self._is_locked:
            self._write()
        try:
            error = relative_error(trial.compute(contender.run), expected)
            if not error <= trial.tolerance:  # NaN is not
                return Verdict(error, dropped=f"its error is {error:.1e}, of {trial.tolerance:.0e}")
            return Verdict(error, self._seconds(contender, trial))
        except torch.OutOfMemoryError:
            raise
        except Exception as problem:
            # Any exception of a compiler or driver: the candidate cannot serve here.
            self._check_device(contender.name, problem)
            return Verdict(dropped=f"it failed: {_reason(problem)}")
        except KeyboardInterrupt:
            self._trying.pop(name)
            self._write()
            raise
        finally:
            self._trying.pop(name, None)

    def _check_device(self, candidate: str, problem: Exception) -> None:
        if not torch.cuda.is_available():
            return
        try:
            torch.cuda.synchronize()
        except Exception as still:
            raise Failure(
                f"the kernel {candidate} left the GPU unusable ({first_line(problem)}): start again; "
                f"after {MOST_ATTEMPTS} such trials it is dropped"
            ) from still

    def _seconds(
        self, contender: Candidate[Any, Implementation], trial: Trial[Implementation]
    ) -> tuple[Quartiles, ...]:
        if trial.calls is None:
            return ()
        return tuple(self._clock(call) for call in trial.calls(contender.run))

    def _read(self) -> None:
        try:
            stored = json.loads(self.path.read_text())
            self.verdicts |= {
                name: {
                    candidate: Verdict(
                        kept["error"],
                        tuple(Quartiles(*rounds) for rounds in kept["seconds"]),
                        kept["dropped"],
                    )
                    for candidate, kept in candidates.items()
                }
                for name, candidates in stored["verdicts"].items()
            }
            self.crossovers |= {name: int(count) for name, count in stored["crossovers"].items()}
            self._trying = {name: (who, times) for name, (who, times) in stored["trying"].items()}
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            return

    def _write(self) -> None:
        stored = {
            "verdicts": {
                name: {candidate: asdict(verdict) for candidate, verdict in candidates.items()}
                for name, candidates in self.verdicts.items()
            },
            "crossovers": self.crossovers,
            "trying": self._trying,
        }
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(self.path, json.dumps(stored, indent=1, sort_keys=True).encode())
        except (OSError, BadInput):
            pass  # the next process measures again


class RandomInputs:
    """Random numbers on a device, the same for every candidate of a trial."""

    def __init__(self, device: torch.device | str, dtype: torch.dtype) -> None:
        self.device, self.dtype = torch.device(device), dtype
        self.generator = torch.Generator().manual_seed(0)

    def __call__(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator).to(self.device, self.dtype)


TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 2e-2}
TOLERANCE_QUANTIZED = 4e-2
"""Tolerance for activations or a KV cache in 8 bits: a value between two codes may round either way."""


def tolerance(dtype: torch.dtype, *, quantizes_inputs: bool = False) -> float:
    """The most that a kernel may differ from its reference, as `relative_error`."""
    return TOLERANCE_QUANTIZED if quantizes_inputs else TOLERANCES[dtype]


def case_name(operation: str, query: str) -> str:
    return f"{operation}: {query}"


def relative_error(got: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> float:
    errors = [
        (tensor.float() - reference.float()).norm() / reference.float().norm()
        for tensor, reference in zip(got, expected, strict=True)
    ]
    return float(torch.stack(errors).max())


def _reason(problem: Exception) -> str:
    return f"{type(problem).__name__}: {first_line(problem)}"[:LONGEST_REASON]


def _without_slower(verdicts: Mapping[str, Verdict]) -> dict[str, Verdict]:
    """Drop candidates that are slower than a later one, beyond doubt: quartiles that overlap keep both."""
    judged: dict[str, Verdict] = {}
    fastest: Verdict | None = None
    faster = ""
    for name, verdict in reversed([*verdicts.items()]):
        if verdict.dropped is None and verdict.seconds:
            pairs = zip(
                verdict.seconds, fastest.seconds if fastest else verdict.seconds, strict=True
            )
            ratios = [(own.low / other.high, other.median / own.median) for own, other in pairs]
            least, share = map(statistics.geometric_mean, zip(*ratios, strict=True))
            if least > MARGIN:
                reason = f"{faster} takes {100 * share:.0f} % of its time"
                verdict = Verdict(verdict.error, verdict.seconds, reason)
            else:
                faster, fastest = name, verdict
        judged[name] = verdict
    return dict(reversed([*judged.items()]))


KERNELS = Path(__file__).parent.parent
BACKENDS = ("flashinfer-python", "kernels", "deep-gemm")
"""Optional packages whose kernels are candidates: another release is measured anew."""
FLUSH_BYTES = 256 << 20
"""Written before each timed call, so that it begins with a cold L2 cache."""
ROUNDS = 15


def current_verdicts() -> VerdictTable | None:
    """The table of the current CUDA device; None: nothing is tried (`LLMOPT_KERNEL_TRIALS=off`, no CUDA)."""
    if os.environ.get(VARIABLE) == "off" or not torch.cuda.is_available():
        return None
    return _table(torch.cuda.current_device())


@cache
def _table(index: int) -> VerdictTable:
    name = torch.cuda.get_device_name(index)
    return VerdictTable(verdict_file(name, torch.cuda.get_device_capability(index)), seconds_of)


def verdict_file(device_name: str, capability: tuple[int, int]) -> Path:
    """The file of a device, for its driver, this torch and Triton, the backends, and the kernels' sources."""
    facts = [str(capability), torch.__version__, driver_version()]
    for name in ("triton", *BACKENDS):
        try:
            facts.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            facts.append(f"{name} none")
    digest = hashlib.sha256("\n".join(facts).encode())
    for source in sorted(KERNELS.rglob("*.py")):
        digest.update(source.read_bytes())
    device = re.sub(r"\W+", "-", device_name)
    return cache_folder().parent / "verdicts" / f"{device}-{digest.hexdigest()[:16]}.json"


def driver_version() -> str:
    try:
        lines = Path("/proc/driver/nvidia/version").read_text().splitlines()
    except OSError:
        return "unknown"
    return lines[0] if lines else "unknown"


def seconds_of(call: Callable[[], object]) -> Quartiles:
    """Seconds of a call from a cold L2 cache: replayed from a graph, as decode steps are."""
    run = _captured(call)
    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")
    times = []
    for _ in range(ROUNDS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        flush.zero_()
        begin.record()
        run()
        end.record()
        times.append((begin, end))
    torch.cuda.synchronize()
    rounds = [begin.elapsed_time(end) / 1000 for begin, end in times]
    return Quartiles(*statistics.quantiles(rounds, n=4, method="inclusive"))


def _captured(call: Callable[[], object]) -> Callable[[], object]:
    call()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            call()
    except torch.OutOfMemoryError:
        raise
    except Exception:
        torch.cuda.synchronize()
        return call
    return graph.replay
