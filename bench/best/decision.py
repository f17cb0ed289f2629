"""The decision: which points stay, which finalists keep the promises, and what is recommended.

Pure functions of plain values: the question, the search, and what was measured of the finalists. The same
values give the same decision, to the byte.

A promise is broken where the whole interval is beyond it, kept where the whole interval is within it, else it
is unsure; speeds that are planned have the planner's band, expected KL the ratios of measured to expected KL
that the finalists had.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ...engine.base.units import format_gib

Record = Mapping[str, Any]
FOUND, NOTHING, UNSURE = 0, 1, 3
"""Exit codes."""
_LEAST_RATIOS = 3
"""Finalists with an expected KL from which there is a band."""


def slo_breaks(
    slo: Mapping[str, float], speed: Record | None
) -> list[tuple[bool | None, str, float]]:
    """(kept, sentence, excess as a share) of each limit on a latency; None is unsure."""
    found = []
    for metric, limit in slo.items():
        name = metric.upper()
        value = None if speed is None else speed[f"{metric}_ms"]
        if speed is None or value is None:
            found.append((None, f"{name} is not known: the limit is {limit:g} ms", 0.0))
            continue
        band = speed["ttft_band"] if metric == "ttft" else speed["band"]
        low, high = (
            (edge * value / speed[_BANDED[metric]] for edge in band) if band else (value, value)
        )
        kept = True if high <= limit else False if low > limit else None
        words = f" ({low:.3g} to {high:.3g})" if band else ""
        found.append((kept, f"{name} {value:.3g} ms{words} > {limit:g} ms", value / limit - 1))
    return found


_BANDED = {"ttft": "ttft_ms", "tpot": "tpot_ms", "e2el": "tpot_ms"}
"""The time whose band a metric has."""


TIMES = ("tpot_ms", "ttft_ms", "e2el_ms")


def mean_speed(parts: Sequence[tuple[float, Mapping[str, Any]]]) -> dict[str, Any]:
    """Times of a mixture from the shares and the times of its kinds; without a band where one has none."""

    def mean(values: Sequence[float]) -> float:
        return sum(share * value for (share, _), value in zip(parts, values, strict=True))

    speeds = [speed for _, speed in parts]
    found: dict[str, Any] = {name: mean([speed[name] for speed in speeds]) for name in TIMES}
    for name in ("band", "ttft_band"):
        edges = [speed[name] for speed in speeds]
        found[name] = None if None in edges else [mean(one) for one in zip(*edges, strict=True)]
    found["tokens_per_s"] = 1 / mean([1 / speed["tokens_per_s"] for speed in speeds])
    return {**speeds[0], **found}


def keeps(parts: Sequence[bool | None]) -> bool | None:
    """Whether all are kept: one that is broken decides, then one that is unsure."""
    return False if False in parts else None if None in parts else True


def check_point(asked: Record, point: Record, band: tuple[float, float] | None) -> dict[str, Any]:
    """A point of the front with `kl_band`, `keeps` and `breaks`, by what is predicted.

    Args:
        band: factors on the expected KL.
    """
    broken = []
    if point["unfit"] is not None:
        broken.append((False, f"memory: {point['unfit']}", float("inf")))
    size = asked["size_bytes"]
    if size is not None and point["bytes"] > size:
        said = f"{format_gib(point['bytes'])} > {format_gib(size)}"
        broken.append((False, said, point["bytes"] / size - 1))
    broken += slo_breaks(asked["slo"] or {}, point["speed"])
    expected = point["expected_kl"]
    kl_band = None if band is None or expected is None else [factor * expected for factor in band]
    for promise in asked["promises"]:
        if promise["metric"] != "kl" or kl_band is None:
            broken.append((None, "", 0.0))
            continue
        low, high = kl_band
        kept = True if high <= promise["limit"] else False if low > promise["limit"] else None
        said = f"expected KL {expected:.3g} > {promise['limit']:g}"
        broken.append((kept, said, (expected - promise["limit"]) / (promise["limit"] or 1.0)))
    shown = {name: value for name, value in point.items() if name not in ("quantize", "unfit")}
    breaks = [said for kept, said, _ in broken if kept is False]
    return {
        **shown,
        "kl_band": kl_band,
        "keeps": keeps([kept for kept, _, _ in broken]),
        "breaks": breaks,
        "excess": max((excess for kept, _, excess in broken if kept is False), default=0.0),
    }


def choose(asked: Record, searched: Record, count: int) -> list[str]:
    """Choose the finalists: points of the front around the one that is expected to be the answer, by bytes,
    then fewer usual quantizations that may keep the promises, the nearest in bytes first."""
    points = [one for one in undominated(searched["front"]) if _may(asked, one)]
    most = next((one["limit"] for one in asked["promises"] if one["metric"] == "kl"), None)
    at = len(points) - 1
    if most is not None and not asked["is_bounded"]:
        at = next((n for n, one in enumerate(points) if one["expected_kl"] <= most), at)
    # The smaller neighbour first: it is what the answer has to be defended against.
    near = sorted(range(len(points)), key=lambda n: (abs(n - at), n))
    usual = [one for one in searched["usual"] if one["refused"] is None and _may(asked, one)]
    if points:
        usual.sort(key=lambda one: abs(one["bytes"] - points[at]["bytes"]))
        usual = usual[: max((count - 1) // 2, count - len(points))]
    chosen = sorted(near[: max(1, count - len(usual))])
    return [*(points[n]["id"] for n in chosen), *(one["id"] for one in usual[:count])]


def gap_words(front: Sequence[Record]) -> str:
    """Say how far the solved points of a front are from the optimum at most."""
    gaps = [one["gap"] for one in front if one.get("gap") is not None]
    if not gaps:
        return "no mixture was solved for"
    return f"expected KL of each of {len(gaps)} mixtures at most {max(gaps):.2%} above the least in its bytes"


def _may(asked: Record, point: Record) -> bool:
    """Whether a point may keep the promises, as far as is predicted."""
    return check_point(asked, point, None)["keeps"] is not False


def undominated(points: Sequence[Record]) -> list[Record]:
    """The points that no other beats in both bytes and expected KL, by bytes."""
    kept: list[Record] = []
    for one in sorted(points, key=lambda one: (one["bytes"], one["expected_kl"])):
        if not kept or one["expected_kl"] < kept[-1]["expected_kl"]:
            kept.append(one)
    return kept


def check_finalist(asked: Record, one: Record) -> dict[str, Any]:
    """A finalist with `keeps`, `breaks` and how far it is beyond its worst promise."""
    outcome = {"pass": True, "regression": False}
    parts = [(outcome.get(v["outcome"]), v["reason"], v["excess"]) for v in one["verdicts"]]
    parts += slo_breaks(asked["slo"] or {}, one["speed"])
    size = asked["size_bytes"]
    if size is not None and one["bytes"] > size:
        parts.append((False, f"{one['bytes']:,} bytes > {size:,}", one["bytes"] / size - 1))
    if not one["sound"]:
        parts.append(
            (False, "its files are not what was computed: verification failed", float("inf"))
        )
    kept = keeps([part for part, _, _ in parts])
    shown = {name: value for name, value in one.items() if name not in ("verdicts", "sound")}
    return {
        **shown,
        "keeps": kept,
        "breaks": [said for part, said, _ in parts if part is not True],
        "excess": max((excess for part, _, excess in parts if part is not True), default=0.0),
    }


def decide(asked: Record, searched: Record, measured: Sequence[Record]) -> dict[str, Any]:
    """The decision of a question, but for its head: see docs/commands/best.md for every key.

    Args:
        measured: of the finalists, see `finalists.results`.
    """
    points = {one["id"]: one for one in (*searched["front"], *searched["usual"])}
    finalists = [check_finalist(asked, one) for one in measured]
    by_bytes = sorted(finalists, key=lambda one: (one["bytes"], one["kl"]["value"], one["id"]))
    band = kl_band(points, finalists)
    sure = [one for one in by_bytes if one["keeps"] is True]
    best = _best(asked, sure)
    recommended = best and best["id"]
    made = {one["id"] for one in finalists}
    listed = [*searched["front"], *(one for one in searched["usual"] if one["id"] in made)]
    front = [check_point(asked, one, band) | {"finalist": one["id"] in made} for one in listed]
    rest = sorted(front, key=lambda one: (one["bytes"], one["id"]))
    near = best or min(
        by_bytes or rest, key=lambda one: (one["keeps"] is False, one["excess"]), default=None
    )
    closest = near["id"] if near and not best else None
    unmade = None if best else _unmade(front)
    is_unsure = unmade is not None or any(one["keeps"] is None for one in finalists)
    code = FOUND if best else UNSURE if is_unsure else NOTHING
    smaller, better = _neighbours(by_bytes, near)
    return {
        "lanes": searched["lanes"],
        "front": _without_excess(rest),
        "finalists": _without_excess(by_bytes),
        "usual": [_why_not(one, by_bytes, best, asked) for one in searched["usual"]],
        "recommended": recommended,
        "next_smaller": smaller,
        "next_better": better,
        "closest": closest,
        "exit_code": code,
        "sentence": _sentence(asked, points, near, unmade, code),
    }


def _unmade(front: Sequence[Record]) -> Record | None:
    """The fewest bytes that were not made, may keep the promises and are expected to lose less than every
    finalist, or None: few finalists may all be too small."""
    made = [
        one["expected_kl"] for one in front if one["finalist"] and one["expected_kl"] is not None
    ]
    least = min(made, default=0.0)
    left = (one for one in front if not one["finalist"] and one["keeps"] is not False)
    return min(
        (one for one in left if one["expected_kl"] is not None and one["expected_kl"] < least),
        key=lambda one: one["bytes"],
        default=None,
    )


def _without_excess(records: Sequence[Record]) -> list[dict[str, Any]]:
    return [{name: one[name] for name in one if name != "excess"} for one in records]


def kl_band(
    points: Mapping[str, Record], finalists: Sequence[Record]
) -> tuple[float, float] | None:
    """The least and the largest ratio of measured to expected KL."""
    ratios = [
        one["kl"]["value"] / expected
        for one in finalists
        if (expected := points[one["id"]]["expected_kl"])
    ]
    return (min(ratios), max(ratios)) if len(ratios) >= _LEAST_RATIOS else None


def _best(asked: Record, sure: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """The least KL divergence where bytes are bounded, else the fewest bytes."""
    if asked["is_bounded"]:
        return min(sure, key=lambda one: (one["kl"]["value"], one["bytes"]), default=None)
    return next(iter(sure), None)


def _neighbours(by_bytes: Sequence[Record], near: Record | None) -> tuple[str | None, str | None]:
    """The next smaller finalist, and the next larger one that is nearer to the original."""
    if near is None or near not in by_bytes:
        return None, None
    at = by_bytes.index(near)
    smaller = next(
        (one["id"] for one in reversed(by_bytes[:at]) if one["bytes"] < near["bytes"]), None
    )
    better = (one["id"] for one in by_bytes[at + 1 :] if one["kl"]["value"] < near["kl"]["value"])
    return smaller, next(better, None)


def _why_not(
    usual: Record, finalists: Sequence[Record], best: Record | None, asked: Record
) -> dict[str, Any]:
    """A usual quantization, and the promise that it breaks."""
    found = next((one for one in finalists if one["id"] == usual["id"]), None)
    if usual["refused"] is not None:
        breaks = [usual["refused"]]
    elif found is None:
        breaks = check_point(asked, usual, None)["breaks"]
        breaks = breaks or ["--finalists or --budget left no room to make it"]
    else:
        breaks = list(found["breaks"])
    why = "; ".join(breaks)
    if found is not None and not breaks:
        why = "it is what is recommended" if found is best else _beaten(found, best)
    return {
        "name": usual["name"],
        "id": usual["id"] if found else None,
        "breaks": breaks,
        "why": why,
    }


def _beaten(found: Record, best: Record | None) -> str:
    """How a checkpoint that keeps the promises compares with the recommended one."""
    assert best is not None
    larger, worse = (
        found["bytes"] / best["bytes"] - 1,
        found["kl"]["value"] / (best["kl"]["value"] or 1),
    )
    return f"keeps the promises, with {larger:+.1%} bytes and {worse:.2f} times the KL"


def _sentence(
    asked: Record,
    points: Mapping[str, Record],
    near: Record | None,
    unmade: Record | None,
    code: int,
) -> str:
    if near is None:
        return "There is no point to choose."
    breaks, what = "; ".join(near["breaks"]), _named(near, points)
    if "kl" not in near:
        said = f"it breaks {breaks}" if breaks else "nothing was measured"
        return f"No finalist was made; {what} is expected to come closest: {said}."
    kl = near["kl"]
    held = f"KL {kl['value']:.3g} ({kl['low']:.3g} to {kl['high']:.3g})"
    if code == FOUND:
        of = (
            "the least KL within the size"
            if asked["is_bounded"]
            else "the fewest bytes that keep them"
        )
        return f"{what} keeps the promises: {held}, {of} among the finalists."
    if code == UNSURE and near["keeps"] is False and unmade is not None:
        expected = f"expected KL {unmade['expected_kl']:.3g}"
        return (
            f"Unsure: {_named(unmade, points)} may keep the promises and was not made ({expected}): give "
            f"more --finalists; {what} comes closest: {breaks}."
        )
    if code == UNSURE:
        return f"Unsure: {what} may keep the promises: {breaks}."
    return f"Nothing keeps the promises; {what} comes closest: {breaks}."


def _named(one: Record, points: Mapping[str, Record]) -> str:
    """A point with its bits and bytes."""
    bits = points[one["id"]]["bits_per_weight"]
    return f"{one['id']} ({bits:.2f} bits per weight, {format_gib(one['bytes'])})"
