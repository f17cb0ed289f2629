"""Progress of a whole run: its stages in one bar, by the time that each is expected to take.

What a stage takes is the mean of those before it of its kind; before the first of a kind it is a guess, which
is corrected as soon as the stage counts its own units. The share that is shown never falls.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable

from ...quant.base.progress import SHARE, Progress, Silent
from ..options.options import BenchOptions

LOAD, WARM_UP, PASS, QUALITY, TASKS, REPORT = (
    "load",
    "warm-up",
    "pass",
    "quality",
    "tasks",
    "report",
)
# Seconds where nothing is known, such that the first pass counts most.
_GUESSES = {LOAD: 5.0, WARM_UP: 2.0, PASS: 30.0, QUALITY: 15.0, TASKS: 60.0, REPORT: 10.0}
_PARTS = 1000


class RunProgress:
    """A `Progress` for each stage's own units, shown as one for the run.

    Args:
        progress: where the run's share is shown.
        stages: how many there are of each kind.
        clock: in seconds.
    """

    def __init__(
        self,
        progress: Progress,
        description: str,
        stages: Counter[str],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._progress, self._clock = progress, clock
        self._left = Counter(stages)
        self._expected = dict(_GUESSES)
        self._measured: Counter[str] = Counter()
        self._stage: str | None = None
        self._total = self._done = self._shown = 0
        self._unit = self._what = ""
        self._began = self._stage_began = clock()
        progress.start(description, _PARTS, SHARE)

    @classmethod
    def of(cls, progress: Progress | None, options: BenchOptions, sessions: int = 1) -> RunProgress:
        """The progress itself where it is a run's already, else one for the stages of `options`."""
        if isinstance(progress, cls):
            return progress
        stages = Counter({LOAD: 1, WARM_UP: int(options.warmups > 0), PASS: options.num_runs})
        stages += Counter({QUALITY: int(options.quality), TASKS: int(bool(options.tasks))})
        stages += Counter({REPORT: int(options.report)})
        every = Counter({kind: count * sessions for kind, count in stages.items()})
        return cls(progress or Silent(), "bench", every)

    def begin(self, stage: str, what: str) -> None:
        """The next stage begins: `what` is done until it counts units of its own."""
        self.end()
        self._left[stage] = max(0, self._left[stage] - 1)
        self._stage, self._stage_began = stage, self._clock()
        self.start(what, 0, "")

    def end(self) -> None:
        """The stage is over; its time is what the others of its kind are expected to take."""
        if self._stage is None:
            return
        seconds, count = self._clock() - self._stage_began, self._measured[self._stage]
        known = self._expected[self._stage] * count
        self._expected[self._stage] = (known + seconds) / (count + 1)
        self._measured[self._stage] += 1
        self._stage = None
        self._total = self._done = 0
        self._show()

    def expect(self, stage: str, seconds: float) -> None:
        """Correct the guess of a stage that was not measured yet."""
        if not self._measured[stage]:
            self._expected[stage] = seconds

    @property
    def seconds_left(self) -> float:
        """The time that the stage and those after it are expected to take."""
        after = sum(count * self._expected[stage] for stage, count in self._left.items())
        if self._stage is None:
            return after
        passed = self._clock() - self._stage_began
        if self._done and self._total:
            return after + passed * (self._total - self._done) / self._done
        return after + max(0.0, self._expected[self._stage] - passed)

    def start(self, description: str, total: int, unit: str) -> None:
        self._what, self._total, self._unit, self._done = description, total, unit, 0
        self._show()

    def advance(self, count: int = 1) -> None:
        self._done += count
        if (
            self._stage is not None
            and self._done
            and self._total
            and not self._measured[self._stage]
        ):
            passed = self._clock() - self._stage_began
            self._expected[self._stage] = passed * self._total / self._done
        self._show()

    def status(self, text: str) -> None:
        self._progress.status(f"{self._what}, {text}")

    def note(self, message: str) -> None:
        self._progress.note(message)

    def finish(self) -> None:
        """No stage's end: what follows of it counts no units."""

    def _show(self) -> None:
        passed, left = self._clock() - self._began, self.seconds_left
        share = int(_PARTS * passed / max(passed + left, 1e-9))
        added = max(0, share - self._shown)
        self._shown += added
        counted = f", {self._done}/{self._total} {self._unit}" if self._total else ""
        self._progress.status(f"{self._what}{counted}")
        self._progress.advance(added)
