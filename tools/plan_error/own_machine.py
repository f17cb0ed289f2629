"""Error and coverage of plans that rows of the same deployment correct, on the held-out half."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from math import exp, log
from typing import Any, NamedTuple

import numpy as np
from llmopt.engine.planner.error_bands import MEASURES, error_band, narrowed_band, unlike_band
from llmopt.engine.planner.step_parameters import OwnRows, level

from .report import Judged, Stretches, bands
from .rows import Row

COUNTS = (0, 1, 2, 4)
LEAST_ROWS = 6
"""Rows of a deployment that is judged: at least two more than correct it."""


class Corrected(NamedTuple):
    """A row's prediction after a correction: its relative error, whether the band held it, its span."""

    measure: str
    error: float
    within: bool
    span: float


def corrected(
    judged: Sequence[Judged], count: int, stretches: Stretches | None = None
) -> list[Corrected]:
    """Rows of each deployment of enough rows, corrected by `count` others of it, drawn by their hash."""
    return [
        one
        for (group, *_), members in _deployments(judged).items()
        if len(members) >= LEAST_ROWS
        for one in _judged(
            members, count, bands([entry for entry in judged if entry[0].group != group], stretches)
        )
    ]


def _deployments(judged: Sequence[Judged]) -> dict[tuple[str, ...], list[Judged]]:
    found = defaultdict(list)
    for entry in sorted(judged, key=lambda entry: _hash(entry[0])):
        row = entry[0]
        found[row.group, row.model, row.engine, row.weights].append(entry)
    return found


def _judged(members: list[Judged], count: int, known: Mapping[str, Any]) -> Iterator[Corrected]:
    own, rest = own_rows(members[:count]), members[max(COUNTS) :]
    shifts = {"tpot": level(own.tpot), "ttft": level(own.ttft)}
    for row, like, ratios in rest:
        band = narrowed_band(own, error_band(like, known) or unlike_band())
        left: dict[str, float] = dict(zip(MEASURES, ratios, strict=True))
        left |= {name: left[name] / exp(shift) for name, shift in shifts.items()}
        left["throughput"] = exp(throughput_log(row, ratios, shifts))
        for measure, ratio in left.items():
            low, high = getattr(band, measure)
            yield Corrected(measure, 1 / ratio - 1, low <= ratio <= high, high / low)


def own_rows(members: Sequence[Judged]) -> OwnRows:
    """Judged rows as rows of one's own machine."""
    tpot, ttft = (
        tuple(log(ratios[MEASURES.index(name)]) for _, _, ratios in members)
        for name in ("tpot", "ttft")
    )
    shifts = {"tpot": level(tpot), "ttft": level(ttft)}
    throughput = tuple(throughput_log(row, ratios, shifts) for row, _, ratios in members)
    return OwnRows("", "", tpot, ttft, throughput, of_model=True)


def throughput_log(row: Row, ratios: Sequence[float], shifts: Mapping[str, float]) -> float:
    """Logarithm of the measured throughput in parts of what the shifted TTFT and TPOT give."""
    found = dict(zip(MEASURES, ratios, strict=True))
    ttft = row.ttft_seconds / found["ttft"] * exp(shifts["ttft"])
    tpot = row.tpot_seconds / found["tpot"] * exp(shifts["tpot"])
    measured = row.ttft_seconds + (row.output - 1) * row.tpot_seconds
    return log((ttft + (row.output - 1) * tpot) / measured)


def lines(judged: Sequence[Judged], stretches: Stretches | None = None) -> Iterator[str]:
    """The table: for each number of own rows the same rows."""
    yield "rows of the same deployment that correct it: error in %, coverage, and how wide the band is"
    for count in COUNTS:
        found = corrected(judged, count, stretches)
        cells = [f"  own rows {count}, of {len(found) // len(MEASURES)}"]
        for measure in MEASURES:
            mine = [one for one in found if one.measure == measure]
            size = [100 * abs(one.error) for one in mine]
            held, span = (
                np.mean([one.within for one in mine]),
                np.median([one.span for one in mine]),
            )
            cells.append(
                f"{measure}: median {np.median(size):.1f}, mean {np.mean(size):.1f}, held "
                f"{100 * held:.1f} %, x{span:.2f}"
            )
        yield "   ".join(cells)


def _hash(row: Row) -> str:
    return hashlib.sha256(row.names["id"].encode()).hexdigest()
