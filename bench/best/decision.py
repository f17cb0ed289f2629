"""The decision: points that stay, finalists that keep the promises, and the recommendation.

Pure functions of plain values: the question, the search, and the finalists' measurements. Equal values give
an equal decision, to the byte.

A promise is broken if the whole interval is beyond it, kept if the whole interval is within it, else it is
unsure. Planned speeds have the planner's band; expected KL has the finalists' ratios of measured to expected.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from ...engine.base.units import format_gib

Record = Mapping[str, Any]
FOUND, NOTHING, UNSURE = 0, 1, 3
"""Exit codes."""
_LEAST_RATIOS = 3  # finalists with an expected KL that make a band
_FAR = (
    1.5  # times the limit: the ratios of a lane's finalists differ by less (docs/measured/best.md)
)
FULL = "full"
"""Key of the tokens per second with all places taken."""
_LEAST = 1e-9  # nats, for the logarithm of no loss


def slo_breaks(
    slo: Mapping[str, float], speed: Record | None
) -> list[tuple[bool | None, str, float]]:
    """(kept, sentence, excess as a share) of each limit on a latency; None is unsure."""
    breaks = []
    for metric, limit in slo.items():
        name = metric.upper()
        value = None if speed is None else speed[f"{metric}_ms"]
        if speed is None or value is None:
            breaks.append((None, f"{name} is not known: the limit is {limit:g} ms", 0.0))
            continue
        low, high, note = value, value, ""
        if band := speed["ttft_band"] if metric == "ttft" else speed["band"]:
            low, high = (edge * value / speed[_BANDED[metric]] for edge in band)
            note = f" ({low:.3g} to {high:.3g})"
        text = f"{name} {value:.3g} ms{note} > {limit:g} ms"
        breaks.append((_kept(low, high, limit), text, value / limit - 1))
    return breaks


_BANDED = {"ttft": "ttft_ms", "tpot": "tpot_ms", "e2el": "tpot_ms"}
"""The time whose band a metric takes."""
TIMES = ("tpot_ms", "ttft_ms", "e2el_ms")


def _kept(low: float, high: float, limit: float) -> bool | None:
    """True if an interval keeps an upper limit; None is unsure."""
    return True if high <= limit else False if low > limit else None


def mean_speed(parts: Sequence[tuple[float, Mapping[str, Any]]]) -> dict[str, Any]:
    """Times of a mixture from the shares and the times of its kinds; without a band if a kind has none."""

    def mean(values: Sequence[float]) -> float:
        return sum(share * value for (share, _), value in zip(parts, values, strict=True))

    speeds = [speed for _, speed in parts]
    means: dict[str, Any] = {name: mean([speed[name] for speed in speeds]) for name in TIMES}
    for name in ("band", "ttft_band"):
        bands = [speed[name] for speed in speeds]
        means[name] = None
        if None not in bands:
            means[name] = [mean(edges) for edges in zip(*bands, strict=True)]
    means["tokens_per_s"] = 1 / mean([1 / speed["tokens_per_s"] for speed in speeds])
    return {**speeds[0], **means}


def keeps(parts: Sequence[bool | None]) -> bool | None:
    """True if all are kept: a broken promise decides, then an unsure one."""
    return False if False in parts else None if None in parts else True


def check_point(request: Record, point: Record, band: tuple[float, float] | None) -> dict[str, Any]:
    """A point of the front with `kl_band`, `keeps` and `breaks`, by prediction; `band` are factors on the
    expected KL."""
    broken = []
    if point["unfit"] is not None:
        broken.append((False, point["unfit"], float("inf")))
    size = request["size_bytes"]
    if size is not None and point["bytes"] > size:
        text = f"{format_gib(point['bytes'])} > {format_gib(size)}"
        broken.append((False, text, point["bytes"] / size - 1))
    broken += slo_breaks(request["slo"] or {}, point["speed"])
    expected = point["expected_kl"]
    kl_band = None if band is None or expected is None else [factor * expected for factor in band]
    for promise in request["promises"]:
        if promise["metric"] != "kl" or expected is None:
            broken.append((None, "", 0.0))
            continue
        kept = None
        if kl_band is not None:
            low, high = kl_band
            kept = _kept(low, high, promise["limit"])
        text = f"expected KL {expected:.3g} > {promise['limit']:g}"
        excess = (expected - promise["limit"]) / (promise["limit"] or 1.0)
        broken.append((kept, text, excess if kl_band else max(0.0, excess)))
    shown = {name: value for name, value in point.items() if name not in ("quantize", "unfit")}
    breaks = [text for kept, text, _ in broken if kept is False]
    return {
        **shown,
        "kl_band": kl_band,
        "keeps": keeps([kept for kept, _, _ in broken]),
        "breaks": breaks,
        "excess": max((excess for kept, _, excess in broken if kept is not True), default=0.0),
    }


def choose(request: Record, searched: Record, count: int) -> list[str]:
    """Choose the finalists: points of the front around the expected answer, by bytes or, under a load, by
    cost; then fewer usual quantizations that may keep the promises, the nearest or cheapest first."""

    def may_keep(point: Record) -> bool:
        return check_point(request, point, None)["keeps"] is not False

    undominated: list[Record] = []  # by any point in both cost and expected KL
    front = (point for point in searched["front"] if may_keep(point))
    for point in sorted(front, key=lambda p: (_cost(request, p), p["expected_kl"])):
        if not undominated or point["expected_kl"] < undominated[-1]["expected_kl"]:
            undominated.append(point)
    points = undominated
    most = next((p["limit"] for p in request["promises"] if p["metric"] == "kl"), None)
    at = len(points) - 1
    if most is not None and not request["is_bounded"]:
        at = next((n for n, point in enumerate(points) if point["expected_kl"] <= most), at)
    # The smaller neighbour first: the answer has to be defended against it.
    near = sorted(range(len(points)), key=lambda n: (abs(n - at), n))
    usual = [point for point in searched["usual"] if point["refused"] is None and may_keep(point)]
    if points:
        usual.sort(
            key=lambda point: (
                _cost(request, point)
                if request["is_loaded"]
                else abs(point["bytes"] - points[at]["bytes"])
            )
        )
        usual = usual[: max((count - 1) // 2, count - len(points))]
    chosen = sorted(near[: max(1, count - len(usual))])
    return [*(points[n]["id"] for n in chosen), *(point["id"] for point in usual[:count])]


def points_of(searched: Record) -> dict[str, Record]:
    return {point["id"]: point for point in (*searched["front"], *searched["usual"])}


def next_finalist(
    request: Record, searched: Record, measured: Sequence[Record], chosen: Sequence[str]
) -> tuple[str | None, float]:
    """The chosen point to make next, and the share of the bytes (of the KL divergence with a size) that the
    points that are left may save at most.

    The next one is the point whose expected KL is nearest to its limit, by the ratio of measured to expected
    KL of the finalists so far. Left are points that may keep the promises and beat the best so far. Expected
    KL ranks the mixtures of a lane as measured KL does (docs/commands/best.md), so that a point which is
    expected to lose more than a finalist that lost too much is not left.
    """
    points = points_of(searched)
    finalists = [check_finalist(request, point) for point in measured]
    best, band = _best(request, finalists), kl_band(points, finalists)
    most = next((p["limit"] for p in request["promises"] if p["metric"] == "kl"), None)
    lost = [
        points[finalist["id"]]
        for finalist, record in zip(finalists, measured, strict=True)
        if any(verdict["outcome"] == "regression" for verdict in record["verdicts"])
        or (request["is_bounded"] and finalist["keeps"] is True)
    ]
    ratios = _ratios(points, finalists)
    ratio = math.exp(sum(map(math.log, ratios)) / len(ratios)) if ratios else 1.0
    made, left = {finalist["id"] for finalist in finalists}, list[tuple[Record, float]]()
    for point in (points[name] for name in chosen if name not in made):
        rounded = None if point.get("is_solved", True) else point["first_kl"]
        too_much = rounded is not None and most is not None and rounded["low"] > most
        keeps_none = check_point(request, point, band)["keeps"] is False
        if (
            too_much
            or keeps_none
            or _is_beaten(point, lost)
            or _is_far(point, most, points, finalists)
        ):
            continue
        if request["is_bounded"]:
            expected = None if best is None else point["expected_kl"]
            least = (
                0.0
                if expected is None
                else expected * (band[0] if band else min(ratios, default=0.0))
            )
            saved = 1 - least / best["kl"]["value"] if best and best["kl"]["value"] else 1.0
        else:
            saved = 1.0 if best is None else 1 - _cost(request, point) / _cost(request, best)
        if saved > 0:
            left.append((point, saved))
    if not left:
        return None, 0.0
    left.sort(key=lambda pair: rank(request, pair[0]))
    front = [point for point, _ in left if point["expected_kl"] is not None]
    if not front:
        following = left[0][0]
    elif request["is_bounded"]:
        following = min(front, key=lambda point: (point["expected_kl"], point["bytes"]))
    elif most is None:  # promises that nothing predicts: halve what is left
        following = front[len(front) // 2]
    else:
        limit = math.log(most or _LEAST)
        distances = [abs(math.log(ratio * p["expected_kl"] or _LEAST) - limit) for p in front]
        following = front[distances.index(min(distances))]
    return following["id"], max(saved for _, saved in left)


def _cost(request: Record, point: Record) -> float:
    """Seconds of the hardware for a token with many clients, milliseconds of a request at an arrival rate;
    without such a load, or a known speed, the bytes."""
    if not request["is_loaded"] or point["speed"] is None:
        return point["bytes"]
    speed = point["speed"]
    return speed["e2el_ms"] if request["request_rate"] else 1 / speed["tokens_per_s"]


def rank(request: Record, point: Record) -> tuple[float, int, str]:
    return _cost(request, point), point["bytes"], point["id"]


def _is_beaten(point: Record, lost: Sequence[Record]) -> bool:
    """True if a point is expected to lose no less than one of its lane that lost."""
    expected = point["expected_kl"]
    return expected is not None and any(
        other["lane"] == point["lane"]
        and other["expected_kl"] is not None
        and other["expected_kl"] <= expected
        for other in lost
    )


def _is_far(
    point: Record, most: float | None, points: Mapping[str, Record], finalists: Sequence[Record]
) -> bool:
    """True if a point surely loses too much by the ratio of measured to expected KL of its lane's finalists,
    where that is near one."""
    expected = point["expected_kl"]
    ratios = _ratios(points, [f for f in finalists if points[f["id"]]["lane"] == point["lane"]])
    if most is None or expected is None or not ratios:
        return False
    return min(ratios) >= 0.5 and max(ratios) <= 2 and min(ratios) * expected > _FAR * most


def check_first(request: Record, point: Record) -> dict[str, Any]:
    """A usual quantization checked by its KL divergence after rounding to nearest."""
    kl = point["first_kl"]
    value = kl["value"] or _LEAST
    band = kl["low"] / value, kl["high"] / value
    return check_point(request, {**point, "expected_kl": value}, band)


def gap_words(front: Sequence[Record]) -> str:
    """Say how far the solved points of a front are from the optimum at most."""
    gaps = [point["gap"] for point in front if point.get("gap") is not None]
    if not gaps:
        return "no mixture was solved for"
    return f"each of the {len(gaps)} mixtures is within {max(gaps):.2%} of the least expected KL for its size"


def check_finalist(request: Record, finalist: Record) -> dict[str, Any]:
    """A finalist with `keeps`, `breaks` and the excess over its worst promise."""
    outcome = {"pass": True, "regression": False}
    parts = [(outcome.get(v["outcome"]), v["reason"], v["excess"]) for v in finalist["verdicts"]]
    parts += slo_breaks(request["slo"] or {}, finalist["speed"])
    size, num_bytes = request["size_bytes"], finalist["bytes"]
    if size is not None and num_bytes > size:
        parts.append((False, f"{num_bytes:,} bytes > {size:,}", num_bytes / size - 1))
    if not finalist["sound"]:
        why = "its files are not what was computed: verification failed"
        parts.append((False, why, float("inf")))
    kept = keeps([part for part, _, _ in parts])
    shown = {key: value for key, value in finalist.items() if key not in ("verdicts", "sound")}
    return {
        **shown,
        "keeps": kept,
        "breaks": [text for part, text, _ in parts if part is not True],
        "excess": max((excess for part, _, excess in parts if part is not True), default=0.0),
    }


def decide(request: Record, searched: Record, measured: Sequence[Record]) -> dict[str, Any]:
    """The decision of a question, but for its head: see docs/commands/best.md for every key. `measured` are
    the finalists' `finalists.results`."""
    points = points_of(searched)
    finalists: list[Record] = [check_finalist(request, point) for point in measured]
    by_bytes = sorted(
        finalists, key=lambda point: (point["bytes"], point["kl"]["value"], point["id"])
    )
    band = kl_band(points, finalists)
    best = _best(request, by_bytes)
    made = {point["id"] for point in finalists}
    listed = [*searched["front"], *(point for point in searched["usual"] if point["id"] in made)]
    front: list[Record] = [
        check_point(request, point, band) | {"finalist": point["id"] in made} for point in listed
    ]
    rest = sorted(front, key=lambda point: (point["bytes"], point["id"]))
    near: Record | None = best or min(
        by_bytes or rest, key=lambda point: (point["keeps"] is False, point["excess"]), default=None
    )
    closest = near["id"] if near and not best else None
    unmade = None if best else _unmade(front)
    is_unsure = unmade is not None or any(point["keeps"] is None for point in finalists)
    code = FOUND if best else UNSURE if is_unsure else NOTHING
    # The next smaller finalist, and the next larger one that is nearer to the original.
    smaller = better = None
    if near is not None and near in by_bytes:
        at, size, kl = by_bytes.index(near), near["bytes"], near["kl"]["value"]
        less = (point["id"] for point in reversed(by_bytes[:at]) if point["bytes"] < size)
        nearer = (point["id"] for point in by_bytes[at + 1 :] if point["kl"]["value"] < kl)
        smaller, better = next(less, None), next(nearer, None)
    return {
        "lanes": searched["lanes"],
        "front": _without_excess(rest),
        "finalists": _without_excess(by_bytes),
        "usual": [_why_not(point, by_bytes, best, request) for point in searched["usual"]],
        "by_load": _by_load(request, searched, finalists),
        "recommended": best and best["id"],
        "next_smaller": smaller,
        "next_better": better,
        "closest": closest,
        "exit_code": code,
        "sentence": _sentence(request, points, near, unmade, code),
    }


def _best(request: Record, finalists: Sequence[Record]) -> Record | None:
    """The finalist of least cost, or with a size of least KL, that surely keeps the promises."""
    sure = [point for point in finalists if point["keeps"] is True]
    if request["is_bounded"]:
        return min(sure, key=lambda p: (p["kl"]["value"], p["bytes"], p["id"]), default=None)
    return min(sure, key=lambda p: (_cost(request, p), p["kl"]["value"], p["id"]), default=None)


def _by_load(
    request: Record, searched: Record, finalists: Sequence[Record]
) -> list[dict[str, Any]]:
    """The fastest points by number of clients, from the fewest on, where it changes: finalists that keep the
    promises, usual quantizations that were not made and are expected to, and the original."""
    made = {finalist["id"]: finalist["keeps"] for finalist in finalists}
    speeds = {}
    for point in (*searched["front"], *searched["usual"]):
        keeps_them = made.get(point["id"], False)
        if point["id"] not in made and point.get("first_kl"):
            keeps_them = check_first(request, point)["keeps"]
        if keeps_them and point.get("throughput"):
            speeds[point["id"]] = point["throughput"]
    original = searched.get("original") or {}  # not in folders of earlier versions
    # It keeps those of quality, but may take too many bytes or too long.
    no_promises = {**request, "promises": []}
    if original.get("throughput") and check_point(no_promises, original, None)["keeps"]:
        speeds[original["id"]] = original["throughput"]
    return fastest_by_load(speeds)


def fastest_by_load(speeds: Mapping[str, Mapping[str, float]]) -> list[dict[str, Any]]:
    """The fastest points by number of clients, from tokens per second by point and clients."""
    clients = sorted({int(n) for speed in speeds.values() for n in speed if n != FULL})
    fastest: list[dict[str, Any]] = []
    for load in [*map(str, clients), FULL]:
        # With more clients than places the others wait.
        speed, name = max(((s.get(load, s[FULL]), n) for n, s in speeds.items()), default=(0.0, ""))
        if name and (not fastest or fastest[-1]["id"] != name):
            fastest.append({"clients": load, "id": name, "tokens_per_s": speed})
    return fastest


def load_words(fastest: Sequence[Record]) -> str:
    """Say which point is the fastest at which load."""
    if not fastest:
        return "the speed is not known"
    first, *others = fastest
    where = "with one client" if others else "at every load, with one client"
    clauses = [f"{first['id']} is the fastest {where} ({first['tokens_per_s']:,.0f} tokens/s)"]
    for change in others:
        load = f"from {change['clients']} clients on"
        load = "with all places taken" if change["clients"] == FULL else load
        clauses.append(f"{load} {change['id']} ({change['tokens_per_s']:,.0f})")
    return "; ".join(clauses)


def _unmade(front: Sequence[Record]) -> Record | None:
    """The fewest bytes that were not made, may keep the promises and are expected to lose less than every
    finalist, or None: few finalists may all be too small."""
    known = [point for point in front if point["expected_kl"] is not None]
    least = min((point["expected_kl"] for point in known if point["finalist"]), default=0.0)
    left = (p for p in known if not p["finalist"] and p["keeps"] is not False)
    better = (point for point in left if point["expected_kl"] < least)
    return min(better, key=lambda point: point["bytes"], default=None)


def _without_excess(records: Sequence[Record]) -> list[dict[str, Any]]:
    return [{name: point[name] for name in point if name != "excess"} for point in records]


def kl_band(
    points: Mapping[str, Record], finalists: Sequence[Record]
) -> tuple[float, float] | None:
    """The least and the largest ratio of measured to expected KL."""
    ratios = _ratios(points, finalists)
    return (min(ratios), max(ratios)) if len(ratios) >= _LEAST_RATIOS else None


def _ratios(points: Mapping[str, Record], finalists: Sequence[Record]) -> list[float]:
    return [
        max(point["kl"]["value"], _LEAST) / expected
        for point in finalists
        if (expected := points[point["id"]]["expected_kl"])
    ]


def _why_not(
    usual: Record, finalists: Sequence[Record], best: Record | None, request: Record
) -> dict[str, Any]:
    """A usual quantization, and the promise that it breaks."""
    finalist = next((point for point in finalists if point["id"] == usual["id"]), None)
    if usual["refused"] is not None:
        breaks = [usual["refused"]]
    elif finalist is None:
        breaks = check_point(request, usual, None)["breaks"]
    else:
        breaks = list(finalist["breaks"])
    why = "; ".join(breaks)
    if finalist is None and not breaks:
        why = "no finalist yet"
        if best is not None:
            why = f"{usual['bytes'] / best['bytes'] - 1:+.1%} bytes, not a finalist"
        if kl := usual["first_kl"]:
            why += (
                f": KL {kl['value']:.3g} ({kl['low']:.3g} to {kl['high']:.3g}) rounded to nearest"
            )
    if finalist is not None and not breaks:
        assert best is not None
        larger = finalist["bytes"] / best["bytes"] - 1
        worse = finalist["kl"]["value"] / (best["kl"]["value"] or 1)
        why = f"keeps the promises, with {larger:+.1%} bytes and {worse:.2f} times the KL"
        why = "" if finalist is best else why
    return {
        "name": usual["name"],
        "id": usual["id"] if finalist else None,
        "breaks": breaks,
        "why": why,
    }


def _sentence(
    request: Record,
    points: Mapping[str, Record],
    near: Record | None,
    unmade: Record | None,
    code: int,
) -> str:
    if near is None:
        return "There is no point to choose."
    breaks, what = "; ".join(near["breaks"]), _named(near, points)
    if "kl" not in near:
        text = f"it breaks {breaks}" if breaks else "nothing was measured"
        return f"No finalist was made; {what} is expected to come closest: {text}."
    if code == FOUND:
        kl = near["kl"]
        interval = f"KL {kl['value']:.3g} ({kl['low']:.3g} to {kl['high']:.3g})"
        bounded = "the least KL within the size"
        least = "the fewest bytes that keep them"
        if request["is_loaded"]:
            least = f"the most tokens per second with {request['concurrency']} clients"
            if rate := request["request_rate"]:
                least = f"the shortest mean time of a request at {rate:g} requests per second"
        of = bounded if request["is_bounded"] else least
        return f"{what} keeps the promises: {interval}, {of} among the finalists."
    if code == UNSURE and near["keeps"] is False and unmade is not None:
        expected = f"expected KL {unmade['expected_kl']:.3g}"
        return (
            f"Unsure: {_named(unmade, points)} may keep the promises and is not made ({expected}): more "
            f"--finalists or --budget make it; {what} comes closest: {breaks}."
        )
    if code == UNSURE:
        return f"Unsure: {what} may keep the promises: {breaks}."
    return f"Nothing keeps the promises; {what} comes closest: {breaks}."


def _named(point: Record, points: Mapping[str, Record]) -> str:
    bits = points[point["id"]]["bits_per_weight"]
    return f"{point['id']} ({bits:.2f} bits per weight, {format_gib(point['bytes'])})"
