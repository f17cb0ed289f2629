"""The cells of a grid: the product of server and benchmark parameters, checked before anything starts."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...quant.base.errors import BadInput
from ..options.options import BenchOptions, checked
from ..record.result import plain
from .params import Combination, bench_fields, read_combinations, server_words

NUM_RUNS = 3  # passes of a cell, as in vLLM's sweep
# Fields that a cell may not change: the grid itself sets them.
RESERVED = ("serve", "serve_args", "serve_program", "base_url", "model", "started_server")
SECRET = ("api_key", "header")
LONGEST_NAME = 80


@dataclass(frozen=True, slots=True)
class Cell:
    """One server configuration under one benchmark configuration.

    Attributes:
        key: its folder's name, unique in the grid.
        options: those of its benchmark, with the server's arguments in `serve_args`.
    """

    key: str
    serve: Combination
    bench: Combination
    options: BenchOptions


@dataclass(frozen=True, slots=True)
class Plan:
    """A grid: its cells, row by row, and what they were made from."""

    name: str
    cells: tuple[Cell, ...]
    spec: Mapping[str, Any]

    def rows(self) -> list[list[Cell]]:
        """The cells that share a server, in order."""
        rows: dict[str, list[Cell]] = {}
        for cell in self.cells:
            rows.setdefault(cell.serve.name, []).append(cell)
        return list(rows.values())


def plan_grid(
    given: Mapping[str, Any],
    serve_params: Path | None,
    bench_params: Path | None,
    link_vars: str | None = None,
) -> Plan:
    """The grid of the fields `given` and two parameter files.

    Raises:
        BadInput: server parameters without a server to start, an unreadable file, an invalid option in any
            cell, or links that leave no cell.
    """
    base = checked(BenchOptions, {"num_runs": NUM_RUNS, **given}, "option")
    if serve_params is not None and base.serve is None:
        raise BadInput("--serve-params needs --serve: they are flags of the server that it starts")
    serves = read_combinations(serve_params, "--serve-params")
    benches = read_combinations(bench_params, "--bench-params")
    links = parse_links(link_vars)
    cells: list[Cell] = []
    for serve in serves:
        for bench in benches:
            options = _options(given, base, serve, bench)
            if all(linked(serve, bench, *link) for link in links):
                key = f"{len(cells):03d}-{_slug(serve.name, bench.name)}"
                cells.append(Cell(key, serve, bench, options))
    if not cells:
        raise BadInput(f"--link-vars {link_vars}: no cell has equal values")
    spec = {
        "options": plain(base.model_dump(mode="json", exclude={*SECRET, "started_server"})),
        "serve_params": [{"name": each.name, "params": plain(each.params)} for each in serves],
        "bench_params": [{"name": each.name, "params": plain(each.params)} for each in benches],
        "link_vars": link_vars,
    }
    name = base.name or base.label or Path(base.model or base.serve or "bench").name
    return Plan(f"{name}-grid", tuple(cells), spec)


def _options(
    given: Mapping[str, Any], base: BenchOptions, serve: Combination, bench: Combination
) -> BenchOptions:
    fields = bench_fields(bench.params)
    if taken := [key for key in fields if key in RESERVED]:
        raise BadInput(f"--bench-params {bench.name}: {taken[0]} is set by the grid, not by a cell")
    options = checked(
        BenchOptions, {"num_runs": NUM_RUNS, **given, **fields}, f"--bench-params {bench.name}"
    )
    if not serve.params:
        return options
    words = " ".join(filter(None, [base.serve_args, shlex.join(server_words(serve.params))]))
    return options.model_copy(update={"serve_args": words})


def changed_fields(options: BenchOptions) -> dict[str, Any]:
    """The options of a cell that are not at their default, without what names its server or is secret."""
    return unusual(plain(options.model_dump(mode="json", exclude={*SECRET, *RESERVED})))


def unusual(written: Mapping[str, Any]) -> dict[str, Any]:
    """The written options that are not at their default."""
    usual = plain(BenchOptions().model_dump(mode="json"))
    return {name: value for name, value in written.items() if value != usual[name]}


def parse_links(text: str | None) -> list[tuple[str, str]]:
    """`max_num_seqs=max_concurrency,…` as (server parameter, benchmark parameter).

    Raises:
        BadInput: another form.
    """
    links = []
    for word in filter(None, (text or "").split(",")):
        serve, equals, bench = word.strip().partition("=")
        if not (serve and equals and bench):
            raise BadInput(f"--link-vars {text!r}: write SERVE_PARAM=BENCH_PARAM")
        links.append((serve, bench))
    return links


def linked(serve: Combination, bench: Combination, serve_key: str, bench_key: str) -> bool:
    """Whether both have the linked parameters, with equal values."""
    left, right = _underscored(serve.params), _underscored(bench.params)
    serve_key, bench_key = serve_key.replace("-", "_"), bench_key.replace("-", "_")
    return (
        serve_key in left and bench_key in right and str(left[serve_key]) == str(right[bench_key])
    )


def _underscored(params: Mapping[str, Any]) -> dict[str, Any]:
    return {key.replace("-", "_"): value for key, value in params.items()}


def _slug(*names: str) -> str:
    words = [re.sub(r"[^\w.=-]+", "_", name).strip("_.") for name in names if name]
    return "--".join(words)[:LONGEST_NAME] or "cell"


def spec_differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> Sequence[str]:
    """Names of what differs between two specs."""
    names = []
    for key in now:
        if before.get(key) == now[key]:
            continue
        if key == "options":
            old = before.get(key) or {}
            names += [
                f"--{name.replace('_', '-')}"
                for name in now[key]
                if old.get(name) != now[key][name]
            ]
        else:
            names.append(f"--{key.replace('_', '-')}")
    return names
