"""Record of a first contact with a GPU: its stages, what each found and what was expected, and its page."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...engine.planner.own_runs import CONTACT_SCHEMA, check_contact
from ...quant.model.checkpoint import read_json

WHOLE = "whole"
"""How a stage ended that looked at all that it has to."""
OURS, VLLM = "llmopt", "vLLM"
Record = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Stage:
    """A part of the contact, with a process of its own.

    Attributes:
        seconds: the most that it may take; what it leaves, later ones may.
        cards: that it needs; with fewer it is left out.
        package: that it needs.
        keeps: its checkpoints stay for the next stage.
    """

    name: str
    seconds: int
    cards: int = 0
    package: str = ""
    keeps: bool = False


STAGES = (
    Stage("machine", 40),
    Stage("kernels", 75),
    Stage("graphs", 35),
    Stage("llama-8b", 85, keeps=True),
    Stage("vllm", 70, package="vllm"),
    Stage("llama-8b-int4", 60),
    Stage("llama-8b-fp8", 50),
    Stage("experts", 40),
    Stage("hybrid", 40),
    Stage("quantizers", 45),
    Stage("two-cards", 40, cards=2),
)
"""Those of one card together take nine minutes."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        what: in words.
        expected, seen: short texts.
        met: whether the expectation holds; None: there is none, or it could not be told.
        numbers: a measurement for programs: model, weights, engine, phase, batch, context, seconds, share.
    """

    what: str
    expected: str = ""
    seen: str = ""
    met: bool | None = None
    numbers: Mapping[str, Any] = field(default_factory=dict)


def gpu_slug(name: str) -> str:
    """A GPU's name as a folder or file is called: `nvidia-h100-80gb-hbm3`."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def new_record(environment: Mapping[str, Any], date: str, *, small: bool) -> Record:
    """A record without stages."""
    head = {"schema": CONTACT_SCHEMA, "date": date, "small": small}
    return head | {"environment": dict(environment), "roofs": {}, "shares": {}, "stages": []}


def read_record(path: Path) -> Record:
    """Read a record.

    Raises:
        BadInput: there is none, or it is something else.
    """
    record = read_json(path)
    check_contact(path, record)
    return record


def summarize(record: Record) -> None:
    """Set what a plan takes of a record: the measured roofs, and the shares of them by weights."""
    found = [each["numbers"] for each in findings(record) if each["numbers"]]
    record["roofs"] = {one["phase"]: one["rate"] for one in found if "rate" in one}
    shares: dict[str, dict[str, float]] = {}
    for one in found:
        if one.get("share") and one["engine"] == OURS:
            # The first of a kind is that of the whole dense model, alone.
            shares.setdefault(one["weights"], {}).setdefault(one["phase"], one["share"])
    record["shares"] = shares


def findings(record: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Findings of all stages."""
    for stage in record["stages"]:
        yield from stage["findings"]


def failures(record: Mapping[str, Any]) -> list[str]:
    """Sentences for each expectation that failed and each stage that did not end."""
    told = [
        f"{stage['name']}: {each['what']}: expected {each['expected']}, seen {each['seen']}"
        for stage in record["stages"]
        for each in stage["findings"]
        if each["met"] is False
    ]
    return [f"{stage['name']}: {stage['ended']}" for stage in _broken(record)] + told


def _broken(record: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [stage for stage in record["stages"] if stage["ended"] != WHOLE]


def page(record: Mapping[str, Any]) -> str:
    """The record in Markdown, what failed first."""
    environment = record["environment"]
    held = [each["met"] for each in findings(record) if each["met"] is not None]
    lines = [f"# First contact: {environment.get('gpu', {}).get('name', 'CPU')}", ""]
    lines += [f"{record['date']}, {_versions(environment)}.", ""]
    if record["small"]:
        lines += ["Small shapes: whether it runs, and no times.", ""]
    lines += [f"{sum(held)} of {len(held)} expectations hold.", ""]
    if broken := _broken(record):
        lines += ["## Stages that did not end", ""]
        lines += [*(f"* {stage['name']}: {stage['ended']}" for stage in broken), ""]
    failed = [(s, each) for s in record["stages"] for each in s["findings"] if each["met"] is False]
    if failed:
        rows = ((stage["name"], *_cells(each)) for stage, each in failed)
        lines += ["## Expectations that failed", "", *_table(("stage", *_HEAD), rows)]
    if beside := [*_beside_vllm(record)]:
        head = ("what", VLLM, OURS, "speed")
        lines += [f"## {OURS} beside {VLLM}", "", *_table(head, beside)]
    for stage in record["stages"]:
        rest = [_cells(each) for each in stage["findings"] if each["met"] is not False]
        table = [*_table(_HEAD, rest)]
        if len(rest) > FOLDED_ROWS:
            table = [f"<details><summary>{len(rest)} rows</summary>", "", *table, "</details>", ""]
        if rest:
            lines += [f"## {stage['name']}, {stage['seconds']:.0f} s", "", *table]
    return "\n".join(lines)


FOLDED_ROWS = 20
_HEAD = ("what", "expected", "seen")


def _versions(environment: Mapping[str, Any]) -> str:
    libraries = environment.get("libraries", {})
    named = [f"{name} {libraries[name]}" for name in libraries if libraries[name]]
    return ", ".join([*named, f"commit {environment.get('commit') or 'unknown'}"])


def _cells(each: Mapping[str, Any]) -> tuple[str, ...]:
    has_verdict = each["met"] is not None or not each["expected"]
    seen = each["seen"] if has_verdict else f"{each['seen']} (no verdict)"
    return each["what"], each["expected"], seen


def _table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> Iterator[str]:
    names = [*head]
    yield f"| {' | '.join(names)} |"
    yield f"|{'---|' * len(names)}"
    for row in rows:
        yield f"| {' | '.join(cell.replace('|', '/') for cell in row)} |"
    yield ""


def _beside_vllm(record: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    """Our time of each case that vLLM was measured in."""
    keys = ("model", "weights", "phase", "batch", "context")
    times: dict[tuple[Any, ...], dict[str, float]] = {}
    for one in (each["numbers"] for each in findings(record)):
        if "seconds" in one:
            times.setdefault(tuple(one[key] for key in keys), {})[one["engine"]] = one["seconds"]
    for (model, weights, phase, batch, context), both in times.items():
        if {OURS, VLLM} <= both.keys():
            what = f"{model} in {weights}, {phase}, batch {batch} at {context} tokens"
            ms = [f"{1e3 * both[who]:.2f} ms" for who in (VLLM, OURS)]
            yield what, *ms, f"{both[VLLM] / both[OURS]:.2f} ×"
