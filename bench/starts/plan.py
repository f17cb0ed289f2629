"""The plan of a comparison by starts, `starts.json`: what is compared, how, and within which budget."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from ...quant.base.atomic_io import write_atomically
from ...quant.base.errors import BadInput
from ..gate.compare import QualityGate, parse_share
from ..gate.gate import Limit, parse_gate, speed_limits
from ..gate.scored import Scored
from ..gate.task_scored import TaskScored
from ..record.result import to_json
from .builds import Build, value_of

PLAN_NAME = "starts.json"
# Short passes of a single thread: many starts say more than long ones. What is given behind `--` comes later
# on the command line and wins.
SHORT_PASSES = ("--num-prompts", "24", "--num-runs", "10", "--output-len", "16")
ONE_THREAD = ("--num-threads", "1")


@dataclass(frozen=True, slots=True)
class Budget:
    """When a comparison ends at the latest.

    Attributes:
        max_starts: of both builds together.
        max_minutes: of one invocation; a start that is running then is stopped.
    """

    max_starts: int = 80
    max_minutes: float = 10.0

    def __post_init__(self) -> None:
        if self.max_starts < 2:
            raise BadInput(f"--max-starts is {self.max_starts}: a pair of starts is the least")
        if not self.max_minutes > 0:
            raise BadInput(f"--max-minutes is {self.max_minutes:g}: it must be above 0")

    @property
    def max_pairs(self) -> int:
        return self.max_starts // 2


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything that a resumed comparison needs.

    Attributes:
        options: of `llmopt bench`, the same for both builds.
        limits: the limits as given on the command line, by field of `LimitOptions`.
        pin_cpus: `auto`, `none`, or CPUs.
        interleave: whether the starts of a pair are alive together and take turns pass by pass.
        num_pairs: the pairs that fit the budget, by the time of the second one; None before it. The
            sequential test spends its errors over them, so a resumed comparison keeps them.
    """

    base: Build
    new: Build
    options: tuple[str, ...]
    limits: Mapping[str, Any] = field(default_factory=dict)
    budget: Budget = field(default_factory=Budget)
    pin_cpus: str = "auto"
    interleave: bool = True
    num_pairs: int | None = None

    def gate(self) -> tuple[Limit, ...]:
        """The limits that decide.

        Raises:
            BadInput: a malformed limit.
        """
        if (gate := self.limits.get("gate")) is not None:
            return parse_gate(gate)
        return speed_limits(parse_share(self.limits.get("threshold") or "5%"))

    def quality(self) -> QualityGate:
        """The limits on quality; raises `BadInput` for a malformed one."""
        shares = {
            "max_perplexity_increase": self.limits.get("max_ppl_increase"),
            "min_top1": self.limits.get("min_top1"),
        }
        parsed = {key: parse_share(text) for key, text in shares.items() if text is not None}
        return QualityGate(**parsed, max_kl=self.limits.get("max_kl"))

    def scores_quality(self) -> bool:
        """Whether the first start of each build scores quality: if a limit or a reference asks for it."""
        limited = any(isinstance(limit.quantity, Scored | TaskScored) for limit in self.gate())
        asked = any(value is not None for value in asdict(self.quality()).values())
        return limited or asked or value_of(self.options, "--reference") is not None

    def command(self, build: Build, number: int, folder: Path, *, is_current: bool) -> list[str]:
        """The command line of a build's start `number`, from 1, which writes the run folder `folder`.

        Only the first start takes the time for a report, if both builds are current enough to leave it.
        """
        has_quality = number == 1 and self.scores_quality()
        leaves_report = number > 1 and is_current
        options = [
            *self.all_options,
            *(() if has_quality else ("--no-quality",)),
            *(("--no-report",) if leaves_report else ()),
            *("--name", build.name, "--output", str(folder)),
        ]
        return build.command(options)

    @property
    def max_pairs(self) -> int:
        """The planned number of pairs."""
        return self.num_pairs or self.budget.max_pairs

    def paced(self, pair_seconds: float, seconds_left: float, done: int) -> Plan:
        """The plan with the number of pairs that fit: `done` ones, and those of `pair_seconds` each."""
        fit = done + int(seconds_left / pair_seconds)
        # Whole blocks of ABBA.
        return replace(self, num_pairs=max(min(fit, self.budget.max_pairs) // 2 * 2, done))

    @property
    def all_options(self) -> tuple[str, ...]:
        """The options of the benchmark with their defaults."""
        return (*SHORT_PASSES, *(() if self.has_server else ONE_THREAD), *self.options)

    @property
    def has_server(self) -> bool:
        return self.base.is_url or value_of(self.options, "--serve") is not None

    def write(self, folder: Path) -> None:
        write_atomically(folder / PLAN_NAME, to_json(asdict(self)))

    @classmethod
    def read(cls, folder: Path) -> Plan:
        """The plan of an interrupted comparison.

        Raises:
            BadInput: the folder holds none, or a damaged one.
        """
        path = folder / PLAN_NAME
        if not path.is_file():
            raise BadInput(f"{folder} holds no comparison by starts: there is no {PLAN_NAME} in it")
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
            return cls(
                Build(**values["base"]),
                Build(**values["new"]),
                tuple(values["options"]),
                values["limits"],
                Budget(**values["budget"]),
                values["pin_cpus"],
                values["interleave"],
                values["num_pairs"],
            )
        except (ValueError, KeyError, TypeError) as error:
            raise BadInput(f"{path} is damaged: {error}") from error


def can_interleave(plan: Plan) -> bool:
    """Whether two starts can be alive together: not as two servers, nor as two engines on a GPU, of which
    each takes the memory that is free."""
    if plan.base.is_url:
        return True
    has_gpu = Path("/proc/driver/nvidia/version").exists()
    return not plan.has_server and (not has_gpu or value_of(plan.options, "--device") == "cpu")
