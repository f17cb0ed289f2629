"""Plan of a comparison by starts, `starts.json`: its two builds, their command lines, limits and budget.

A build is a virtual environment, a command line, or a running server's URL. `--serve` makes the first two the
server's, with this client. `{output}` or `{folder}`: another tool's whole benchmark.
"""

from __future__ import annotations

import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

from pydantic import TypeAdapter

from ...base.atomic_io import expanded, write_atomically
from ...base.errors import BadInput, first_line
from ..gate.gate_options import LimitOptions
from ..gate.limits import Limit, Scored, TaskScored, default_limits, speed_limits
from ..load.started_server import preset
from ..record.result import to_json

THIS_INSTALLATION = (sys.executable, "-m", "llmopt.cli.main")
# The runner names and judges the runs itself.
RESERVED = (
    *("--output", "-o", "--result-dir", "--name", "--json", "--baseline", "--against", "--gate"),
    *("--junit", "--benchmark-json", "--sweep-concurrency", "--sweep-rate", "--slo"),
    "--base-url",
)


@dataclass(frozen=True, slots=True)
class Build:
    """A named build; `spec` is a folder with `bin/`, a command line, or a URL."""

    OUTPUT: ClassVar = "{output}"
    FOLDER: ClassVar = "{folder}"

    name: str
    spec: str

    @property
    def is_url(self) -> bool:
        return self.spec.startswith(("http://", "https://"))

    @property
    def is_other_tool(self) -> bool:
        return self.OUTPUT in self.spec or self.FOLDER in self.spec

    @property
    def is_environment(self) -> bool:
        return (expanded(self.spec) / "bin").is_dir()

    def program(self, name: str) -> str:
        """The path of a program of the virtual environment. Raises BadInput: it has none of that name."""
        path = expanded(self.spec).absolute() / "bin" / name
        if not path.is_file():
            raise BadInput(f"--run {self.name}={self.spec}: there is no bin/{name} in it")
        return str(path)

    def words(self) -> list[str]:
        """Words of the command line. BadInput: they cannot be split, or there is no such program."""
        try:
            arguments = shlex.split(self.spec)
        except ValueError as error:
            raise BadInput(f"--run {self.name}={self.spec}: {error}") from error
        if not arguments or shutil.which(arguments[0]) is None:
            raise BadInput(
                f"--run {self.name}={self.spec}: it is no virtual environment, no program and no URL"
            )
        return arguments

    def command(self, options: Sequence[str]) -> list[str]:
        if self.is_other_tool:
            return self.words()
        if self.is_url:
            return [*THIS_INSTALLATION, "bench", *options, "--base-url", self.spec]
        if (server := value_of(options, "--serve")) is not None:
            return [*THIS_INSTALLATION, "bench", *self._served(server, options)]
        if self.is_environment:
            return [self.program("llmopt"), "bench", *options]
        return [*self.words(), "bench", *options]

    def _served(self, server: str, options: Sequence[str]) -> list[str]:
        """`options` that start this build's server: its program, and for a command line its arguments."""
        if self.is_environment:
            return [*options, "--serve-program", self.program(preset(server).program or "python")]
        program, *arguments = self.words()
        given = value_of(options, "--serve-args")
        every = shlex.join([*shlex.split(given or ""), *arguments])
        return [*options, "--serve-program", program, *([f"--serve-args={every}"] if every else [])]


def parse_builds(given: Sequence[str]) -> tuple[Build, Build]:
    """Base and new build of two `NAME=SPEC`. BadInput: not two, no or equal names, or a URL beside none."""
    if len(given) != 2:
        raise BadInput(f"--run was given {len(given)} times: give --run base=SPEC --run new=SPEC")
    builds = []
    for text in given:
        name, equals, spec = text.partition("=")
        if not equals or not name or not spec or not name.replace("-", "").isalnum():
            raise BadInput(f"--run {text!r}: write NAME=SPEC, with a name of letters and digits")
        builds.append(Build(name, spec))
    base, new = builds
    if base.name == new.name:
        raise BadInput(f"--run: both builds are called {base.name!r}: give two names")
    if base.is_url != new.is_url:
        raise BadInput("--run: one build is a URL and the other is not: transport would differ")
    if base.is_other_tool != new.is_other_tool:
        raise BadInput("--run: one build is a benchmark with {output} and the other is not")
    return base, new


def check_options(builds: Sequence[Build], options: Sequence[str]) -> None:
    """Raise BadInput for an option that the runner sets, an unknown server, or an empty build."""
    if options and builds[0].is_other_tool:
        raise BadInput(
            "options behind `--` are of llmopt bench: put yours into the command of --run"
        )
    for word in options:
        if word.partition("=")[0] in RESERVED:
            option = word.partition("=")[0]
            raise BadInput(f"{option} does not go behind `--`: each start is named and judged here")
    for build in builds:
        build.command(options)


def value_of(options: Sequence[str], name: str) -> str | None:
    value = None
    for position, word in enumerate(options):
        if word == name:
            value = options[position + 1] if position + 1 < len(options) else None
        elif word.startswith(f"{name}="):
            value = word.partition("=")[2]
    return value


PLAN_NAME = "starts.json"
OUTPUT_NAME = "output.json"
# Short passes of a single thread: many starts say more than long ones. Options after `--` come later
# on the command line and win.
SHORT_PASSES = ("--num-prompts", "24", "--num-runs", "10", "--output-len", "16")
ONE_THREAD = ("--num-threads", "1")


@dataclass(frozen=True, slots=True)
class Budget:
    """Latest end of a comparison: starts of both builds, and minutes until a running start is stopped."""

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
class StartsPlan:
    """Everything that a resumed comparison needs.

    Attributes:
        options: options of `llmopt bench`, the same for both builds.
        interleave: True if the starts of a pair are alive together and take turns pass by pass.
        num_pairs: the pairs that fit the budget, by the time of the second one; None before it. The
            sequential test spends its errors over them, so a resumed comparison keeps them.
    """

    base: Build
    new: Build
    options: tuple[str, ...]
    limits: LimitOptions = field(default_factory=LimitOptions)
    budget: Budget = field(default_factory=Budget)
    pin_cpus: str = "auto"
    interleave: bool = True
    num_pairs: int | None = None

    def gate(self, *sides: Mapping[str, Any]) -> tuple[Limit, ...]:
        """Limits that decide; default: of metrics of both `sides`. BadInput: a malformed limit."""
        if self.limits.gate is not None:
            return self.limits.limits
        share = self.limits.share
        return default_limits(share, *sides) if sides else speed_limits(share)

    def scores_quality(self) -> bool:
        """True if the first start of each build scores quality: a limit or a reference asks for it."""
        limited = any(isinstance(limit.quantity, Scored | TaskScored) for limit in self.gate())
        return (
            limited
            or bool(self.limits.quality)
            or value_of(self.options, "--reference") is not None
        )

    def command(self, build: Build, number: int, folder: Path, *, is_current: bool) -> list[str]:
        """The command line of a build's start `number`, from 1, which writes the run folder `folder`. Only
        the first start takes the time for a report, if both builds are current enough to leave it."""
        if build.is_other_tool:
            output = str(folder / OUTPUT_NAME)
            marked = [word.replace(build.OUTPUT, output) for word in build.words()]
            return [word.replace(build.FOLDER, str(folder)) for word in marked]
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
        return self.num_pairs or self.budget.max_pairs

    def paced(self, pair_seconds: float, seconds_left: float, done: int) -> StartsPlan:
        """The plan with the number of pairs that fit: `done` ones, and those of `pair_seconds` each."""
        fit = done + int(seconds_left / pair_seconds)
        # Whole blocks of ABBA.
        return replace(self, num_pairs=max(min(fit, self.budget.max_pairs) // 2 * 2, done))

    @property
    def all_options(self) -> tuple[str, ...]:
        return (*SHORT_PASSES, *(() if self.has_server else ONE_THREAD), *self.options)

    @property
    def has_server(self) -> bool:
        is_served = value_of(self.options, "--serve") is not None
        return self.base.is_url or self.base.is_other_tool or is_served

    def write(self, folder: Path) -> None:
        write_atomically(folder / PLAN_NAME, to_json(asdict(self)))

    @classmethod
    def read(cls, folder: Path) -> StartsPlan:
        """The plan of an interrupted comparison. Raises BadInput: the folder holds none, or a damaged one."""
        path = folder / PLAN_NAME
        if not path.is_file():
            raise BadInput(f"{folder} holds no comparison by starts: there is no {PLAN_NAME} in it")
        try:
            return TypeAdapter(cls).validate_json(path.read_bytes())
        except ValueError as error:
            raise BadInput(f"{path} is damaged: {first_line(error)}") from error


def can_interleave(plan: StartsPlan) -> bool:
    """True if two starts can be alive together: not two servers, nor two engines on a GPU."""
    if plan.base.is_url or plan.base.is_other_tool:
        return plan.base.is_url
    has_gpu = Path("/proc/driver/nvidia/version").exists()
    return not plan.has_server and (not has_gpu or value_of(plan.options, "--device") == "cpu")
