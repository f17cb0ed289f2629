"""The two sides of a comparison by starts, and the command line of one start.

A build is a virtual environment, a command line, or the URL of a server that is already running. With
`--serve` among the options of the benchmark, the first two are the server's, and this installation is the
client of both.
"""

from __future__ import annotations

import shlex
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ...quant.base.errors import BadInput
from ..load.presets import preset

THIS_INSTALLATION = (sys.executable, "-m", "llmopt.cli.main")
# The runner names and judges the runs itself.
RESERVED = (
    *("--output", "-o", "--result-dir", "--name", "--json", "--baseline", "--against", "--gate"),
    *("--junit", "--benchmark-json", "--sweep-concurrency", "--sweep-rate", "--slo"),
    "--base-url",
)


@dataclass(frozen=True, slots=True)
class Build:
    """A named build.

    Attributes:
        spec: as given: a folder with `bin/`, a command line, or a URL.
    """

    name: str
    spec: str

    @property
    def is_url(self) -> bool:
        return self.spec.startswith(("http://", "https://"))

    @property
    def is_environment(self) -> bool:
        return (Path(self.spec).expanduser() / "bin").is_dir()

    def program(self, name: str) -> str:
        """The path of a program of the virtual environment.

        Raises:
            BadInput: it has none of that name.
        """
        path = Path(self.spec).expanduser().absolute() / "bin" / name
        if not path.is_file():
            raise BadInput(f"--run {self.name}={self.spec}: there is no bin/{name} in it")
        return str(path)

    def words(self) -> list[str]:
        """The words of the command line.

        Raises:
            BadInput: they cannot be split, or the program does not exist.
        """
        try:
            words = shlex.split(self.spec)
        except ValueError as error:
            raise BadInput(f"--run {self.name}={self.spec}: {error}") from error
        if not words or shutil.which(words[0]) is None:
            raise BadInput(
                f"--run {self.name}={self.spec}: it is no virtual environment, no program and no URL"
            )
        return words

    def command(self, options: Sequence[str]) -> list[str]:
        """The command line of `llmopt bench` for this build with `options`."""
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
    """The base and the new build of two `NAME=SPEC`.

    Raises:
        BadInput: not two of them, no name, the same name twice, or a URL beside something that is none.
    """
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
    return base, new


def check_options(builds: Sequence[Build], options: Sequence[str]) -> None:
    """Refuse what no start could run with.

    Raises:
        BadInput: an option that the runner sets itself, an unknown server, or a build that is nothing.
    """
    for word in options:
        if word.partition("=")[0] in RESERVED:
            option = word.partition("=")[0]
            raise BadInput(f"{option} does not go behind `--`: each start is named and judged here")
    for build in builds:
        build.command(options)


def value_of(options: Sequence[str], name: str) -> str | None:
    """The last value of an option in a command line; None without one."""
    value = None
    for place, word in enumerate(options):
        if word == name:
            value = options[place + 1] if place + 1 < len(options) else None
        elif word.startswith(f"{name}="):
            value = word.partition("=")[2]
    return value
