"""Find which packages of the field resolve in one environment with llmopt, by metadata alone.

For each of `NEIGHBOURS` uv takes the newest version that goes with llmopt's core dependencies on one machine,
Linux on x86-64 with Python 3.12. Where no version does, the newest one is asked for by its number, and uv's
reason is shortened to the requirement that both sides cannot share.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import Requirement
from uv import find_uv_bin

NEIGHBOURS = (
    "vllm",
    "sglang",
    "llmcompressor",
    "gptqmodel",
    "auto-round",
    "lm-eval",
    "guidellm",
)
FROM_SOURCE = (
    *("gptqmodel", "defuser", "device-smi", "logbar", "pypcre", "tokenicer"),
    *("rouge-score", "sqlitedict", "word2number"),
)
"""Packages of the neighbours that are published as source alone."""
PYTHON = "3.12"
PLATFORM = "x86_64-manylinux_2_34"
"""uv's name; sglang's wheels are for glibc 2.34."""
UV = find_uv_bin()
_WANTED = re.compile(r"depends? on ([\w.-]+)(?:\{[^}]*\})?([<>=!~][^\s]*)")
"""A requirement in uv's messages, with its marker in braces."""


@dataclass(frozen=True, slots=True)
class Neighbour:
    """The newest version of a package that resolves with llmopt.

    Attributes:
        versions: versions of the environment by package name; empty where there is none.
        reason: why there is none.
    """

    name: str
    versions: Mapping[str, str]
    reason: str = ""


def neighbours(project: Path, environment: Mapping[str, str]) -> list[Neighbour]:
    """Resolve every neighbour with the core dependencies of `project`, in the environment of uv."""
    core = tomllib.loads(project.read_text())["project"]["dependencies"]
    with ThreadPoolExecutor(4) as pool:
        return list(pool.map(lambda name: _neighbour(name, core, environment), NEIGHBOURS))


def _neighbour(name: str, core: Sequence[str], environment: Mapping[str, str]) -> Neighbour:
    # uv decides requirements in their order, so that the first one gets its newest version.
    versions, _ = _resolve([name, *core], environment)
    if versions:
        return Neighbour(name, versions)
    newest, fault = _resolve([name], environment)
    if newest:
        _, fault = _resolve([f"{name}=={newest[name]}", *core], environment)
    return Neighbour(name, {}, f"{name} {newest.get(name, '')}: {short_reason(fault, core)}")


def _resolve(
    requirements: Sequence[str], environment: Mapping[str, str]
) -> tuple[dict[str, str], str]:
    """Versions by package name, or none and uv's message."""
    command = [UV, "pip", "compile", "-", "--quiet", "--no-header", "--no-annotate"]
    command += ["--no-python-downloads", "--python", sys.executable, "--python-version", PYTHON]
    command += ["--python-platform", PLATFORM, "--only-binary", ":all:"]
    command += [word for package in FROM_SOURCE for word in ("--no-binary", package)]
    run = subprocess.run(
        command, input="\n".join(requirements), env=environment, capture_output=True, text=True
    )
    pins = re.findall(r"^(\S+)==(\S+)$", run.stdout, re.MULTILINE)
    return dict(pins), " ".join(run.stderr.split())


def short_reason(fault: str, core: Sequence[str]) -> str:
    """The requirement that both sides cannot share, else uv's message."""
    ours = {requirement.name: str(requirement) for requirement in map(Requirement, core)}
    for package, versions in _WANTED.findall(fault):
        if package in ours:
            return f"needs {package}{versions}, llmopt needs {ours[package]}"
    return fault


def table(rows: Sequence[Neighbour]) -> str:
    """The Markdown of docs/compatibility.md."""
    lines = ["| package | newest version with llmopt | torch | transformers |", "|---|---|---|---|"]
    for row in rows:
        if row.reason:
            lines.append(f"| {row.name} | no: {row.reason} | | |")
            continue
        cells = (row.versions.get(name, "-") for name in (row.name, "torch", "transformers"))
        lines.append(f"| {row.name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)
