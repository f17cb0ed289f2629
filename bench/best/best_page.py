"""The page of a decision: quality against bytes and speed, finalists with intervals, bits of every layer."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import cycle
from typing import TYPE_CHECKING, Any

import numpy as np

from ...base.extras import is_installed
from ..page.page import (
    MISSING,
    Card,
    Figure,
    Page,
    ReportTable,
    ReportVerdict,
    Tone,
    drawn,
    number,
    page_of,
    percent,
    size,
)
from ..page.plot_style import (
    BAD,
    GOOD,
    INK,
    MUTED,
    SERIES,
    Span,
    canvas,
    label,
    log_scale,
    name_points,
    title,
    to_svg,
)
from ..quality.summary import FORMULAS
from .decision import gap_words, load_words

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Decision = Mapping[str, Any]
TONES: dict[int, Tone] = {0: "good", 1: "bad", 3: "unsure"}
LAYER = re.compile(r"(?:^|\.)(?:layers?|h|blk|blocks)\.(\d+)\.")
LEAST_KL = 1e-6
"""Lowest KL on a logarithmic axis; an interval may reach to 0 or below."""
MAX_NUMBERED = 40
"""Layers up to which the cells of the picture hold their bits as numbers."""
SHOWN_FORMULAS = ("KL", "top-1 agreement", "flips", "KL by domain", "quality interval")


def best_page(decision: Decision) -> Page:
    """The page of a `decision.json`."""
    points = {point["id"]: point for point in decision["front"]}
    finalists = {finalist["id"]: finalist for finalist in decision["finalists"]}
    chosen = [decision[key] for key in ("recommended", "closest") if decision[key]]
    pictures = [layers_figure(points[name]) for name in [*chosen[:1], *finalists]]
    fronts = [Figure("front-size", front_svg(decision, "size"), half=True)]
    if any(point["speed"] for point in decision["front"]):
        fronts.append(Figure("front-speed", front_svg(decision, "speed"), half=True))
    return page_of(
        "best/best.jinja",
        decision=decision,
        asked=asked_words(decision["asked"]),
        verdict=best_verdict(decision, points),
        cards=best_cards(decision, points, finalists),
        commands=finalists.get(chosen[0]) if chosen else None,
        neighbours=neighbours_table(decision, points, finalists),
        fronts=fronts,
        finalists=finalists_table(decision),
        domains=domains_table(decision),
        pictures=list({picture.name: picture for picture in pictures if picture}.values()),
        predicted=predicted_figure(decision, points),
        front=[(point, words(point)) for point in decision["front"]],
        gap=gap_words(decision["front"]),
        load=load_words(decision["by_load"]),
        formulas={name: FORMULAS[name] for name in SHOWN_FORMULAS if name in FORMULAS},
    )


def asked_words(request: Mapping[str, Any]) -> list[str]:
    """Hardware, load, loader and promises as clauses."""
    hardware = request["hardware"]
    count = f"{hardware['count']} × " if hardware["count"] > 1 else ""
    clauses = [f"{count}{hardware['name']}", f"{request['context']:,} tokens of context"]
    rate = request.get("request_rate")  # not in decisions of earlier versions
    load = f"{rate:g} requests per second" if rate else f"{request['concurrency']} at once"
    clauses += [load, f"loads in {request['loads_in']}"]
    if request["size_bytes"]:
        clauses.append(f"at most {size(request['size_bytes'])}")
    if bits := request.get("target_bpw"):
        clauses.append(f"at most {bits:g} bits a weight")
    clauses += [f"{name.upper()} ≤ {limit:g} ms" for name, limit in (request["slo"] or {}).items()]
    return clauses + [promise_words(promise) for promise in request["promises"]]


def promise_words(promise: Mapping[str, Any]) -> str:
    """`kl ≤ 0.02`, `perplexity ≤ +1 %`."""
    sign = {"<=": "≤", ">=": "≥"}[promise["op"]]
    limit = f"{promise['limit']:g}"
    if promise.get("relative"):
        limit = f"{100 * promise['limit']:+g} %"
    return f"{promise['metric']} {sign} {limit}"


def best_verdict(decision: Decision, points: Mapping[str, Any]) -> ReportVerdict:
    """The recommended checkpoint, or that there is none."""
    name, tone = decision["recommended"], TONES[decision["exit_code"]]
    headline = "Nothing keeps the promise." if tone == "bad" else "No decision."
    if name is not None:
        headline = f"{name}: {points[name]['label']}, {size(points[name]['bytes'])}"
    return ReportVerdict(tone, headline, decision["sentence"])


def best_cards(
    decision: Decision, points: Mapping[str, Any], finalists: Mapping[str, Any]
) -> list[Card]:
    """The key figures of the checkpoint that is recommended, or comes closest."""
    name = decision["recommended"] or decision["closest"]
    if name not in finalists:
        return []
    finalist, point = finalists[name], points[name]
    cards = [
        Card(
            "Size", size(finalist["bytes"]), "", f"{number(point['bits_per_weight'])} bits a weight"
        ),
        Card("KL", number(finalist["kl"]["value"], 4), "nats", interval_words(finalist["kl"], 4)),
        Card(
            "Top-1 agreement",
            percent(finalist["top1"]["value"]),
            "",
            interval_words(finalist["top1"]),
        ),
    ]
    if flips := finalist["flips"]:
        cards.append(Card("Flips", percent(flips["value"]), "", interval_words(flips)))
    if speed := finalist["speed"]:
        band, source = band_words(speed["band"]), speed["source"]
        note = f"{band} ms, {source}" if band else source
        cards.append(Card("TPOT", number(speed["tpot_ms"], 1), "ms", note))
        cards.append(Card("Throughput", number(speed["tokens_per_s"], 0), "tokens/s", source))
    return cards


def interval_words(value: Mapping[str, float], digits: int | None = None) -> str:
    """The interval of a share in percent, or of another value with `digits` decimals."""
    if digits is None:
        return f"{percent(value['low']).removesuffix(' %')} to {percent(value['high'])}"
    return f"{number(value['low'], digits)} to {number(value['high'], digits)}"


def band_words(band: Sequence[float] | None) -> str:
    return f"{band[0]:,.1f} to {band[1]:,.1f}" if band else ""


def measured_words(value: Mapping[str, Any] | None, digits: int | None = None) -> str:
    """A value, with its interval in parentheses if it has one."""
    if value is None:
        return MISSING
    text = percent(value["value"]) if digits is None else number(value["value"], digits)
    return text if value["low"] is None else f"{text} ({interval_words(value, digits)})"


def speed_words(speed: Mapping[str, Any] | None) -> str:
    """Milliseconds per token, as planned or measured."""
    if not speed or speed["tpot_ms"] is None:
        return MISSING
    band = band_words(speed["band"])
    return f"{number(speed['tpot_ms'], 1)}{f' ({band})' if band else ''}, {speed['source']}"


def words(point: Mapping[str, Any]) -> dict[str, str]:
    """The cells of a point in the table of the front."""
    band = point["kl_band"]
    kl = number(point["expected_kl"], 4)
    keeps = {True: "yes", False: "; ".join(point["breaks"]) or "no", None: "unsure"}
    return {
        "kl": f"{kl} ({number(band[0], 4)} to {number(band[1], 4)})" if band else kl,
        "speed": speed_words(point["speed"]),
        "keeps": keeps[point["keeps"]],
        "tone": "good" if point["keeps"] else "",
    }


def neighbours_table(
    decision: Decision, points: Mapping[str, Any], finalists: Mapping[str, Any]
) -> ReportTable | None:
    """The recommended checkpoint, and the cost of the next smaller and the next better."""
    keys = ("recommended", "next_smaller", "next_better")
    shown = {key.replace("_", " "): decision[key] for key in keys if decision[key]}
    if "recommended" not in shown:
        shown = {"closest": decision["closest"]} if decision["closest"] else {}
    rows = []
    base = points[next(iter(shown.values()))] if shown else {}
    for text, name in shown.items():
        point, finalist = points[name], finalists.get(name)
        kl = (
            measured_words(finalist["kl"], 4)
            if finalist
            else f"{number(point['expected_kl'], 4)}, predicted"
        )
        change = point["bytes"] / base["bytes"] - 1
        more = "" if point is base else f" ({percent(change, 1, signed=True)})"
        speed = speed_words((finalist or point)["speed"])
        rows.append([text, name, point["label"], f"{size(point['bytes'])}{more}", kl, speed])
    header = ["", "checkpoint", "bits", "size", "KL, nats", "TPOT, ms"]
    return ReportTable(header, rows, is_prose=True) if rows else None


def finalists_table(decision: Decision) -> ReportTable:
    """The measurements of each finalist, and whether it keeps the promises."""
    rows, tones = [], {}
    for row, finalist in enumerate(decision["finalists"]):
        kept = {True: "yes", False: "no", None: "unsure"}[finalist["keeps"]]
        mark = "\u00a0*" if finalist["id"] == decision["recommended"] else ""
        tones[row] = {True: "good" if mark else "", False: "bad", None: "unsure"}[finalist["keeps"]]
        measured = [
            measured_words(finalist["kl"], 4),
            *map(measured_words, (finalist["top1"], finalist["flips"])),
        ]
        figures = [size(finalist["bytes"]), *measured, speed_words(finalist["speed"])]
        rows.append([finalist["id"] + mark, kept, *figures, "; ".join(finalist["breaks"])])
    header = ["checkpoint", "keeps", "size", "KL, nats", "top-1", "flips", "TPOT, ms", "breaks"]
    return ReportTable(header, rows, "In parentheses: intervals. * is recommended.", tones)


def domains_table(decision: Decision) -> ReportTable | None:
    """KL by domain, one column each."""
    finalists = decision["finalists"]
    names = list(
        dict.fromkeys(name for finalist in finalists for name in finalist["kl_by_domain"] or {})
    )
    rows = [
        [
            finalist["id"],
            *(measured_words((finalist["kl_by_domain"] or {}).get(name), 4) for name in names),
        ]
        for finalist in finalists
    ]
    return ReportTable(["KL by domain, nats", *names], rows) if names else None


@drawn
def front_svg(decision: Decision, against: str) -> str:
    """KL on a logarithmic axis against MiB or milliseconds a token; down and left is better."""

    def across(point: Mapping[str, Any]) -> float | None:
        if against == "size":
            return point["bytes"] / 2**20
        return (point["speed"] or {}).get("tpot_ms")

    figure, (axis,) = canvas(width=5.4, height=4.2)
    log_scale(axis, "y")
    shown = [point for point in decision["front"] if across(point) is not None]
    lane_of = {point["id"]: point["lane"] for point in shown}
    lanes = dict.fromkeys([*(lane["name"] for lane in decision["lanes"]), *lane_of.values()])
    colours = dict(zip(lanes, cycle(SERIES), strict=False))
    for lane in dict.fromkeys(lane_of.values()):
        # Usual quantizations have no predicted KL, so that the line leaves them out.
        mine = sorted(
            (across(point) or 0.0, max(point["expected_kl"], LEAST_KL))
            for point in shown
            if point["lane"] == lane and point["expected_kl"]
        )
        style = {"color": colours[lane], "markersize": 3.5, "linewidth": 0.9, "label": lane}
        style |= {"markerfacecolor": "none", "alpha": 0.7}
        axis.plot([x for x, _ in mine], [y for _, y in mine], "o--", **style)
    positions: dict[str, tuple[float, float]] = {}
    spans: list[Span] = []
    for finalist in decision["finalists"]:
        if (x := across(finalist)) is not None and finalist["id"] in lane_of:
            positions[finalist["id"]] = (x, max(finalist["kl"]["value"], LEAST_KL))
            colour = colours[lane_of[finalist["id"]]]
            is_recommended = finalist["id"] == decision["recommended"]
            spans.append(_measured(axis, finalist, x, colour, is_recommended=is_recommended))
    axis.margins(0.08)
    spans += _limits(axis, decision["asked"], against)
    axis.set_xlabel(f"{'MiB' if against == 'size' else 'ms a token (TPOT)'}, left is better")
    axis.set_ylabel("KL (nats), down is better")
    title(axis, f"Quality against {against}")
    figure.legend(loc="outside lower center", ncols=2, fontsize=8.5, frameon=False)
    first = [decision[key] for key in ("recommended", "next_smaller", "next_better")]
    order = sorted(positions, key=lambda name: first.index(name) if name in first else len(first))
    name_points(axis, [(name, positions[name]) for name in order], spans, color=INK)
    return to_svg(figure, f"Quality against {against} of {len(shown)} points")


def _measured(
    axis: Axes, finalist: Mapping[str, Any], x: float, colour: str, *, is_recommended: bool = False
) -> Span:
    """Draw a finalist with its interval, which is returned; a cross if it breaks a promise, a ring if it is
    recommended."""
    low, y, high = (max(finalist["kl"][side], LEAST_KL) for side in ("low", "value", "high"))
    axis.plot([x, x], [low, high], color=colour, linewidth=3, alpha=0.45)
    axis.plot(x, y, "X" if finalist["keeps"] is False else "o", color=colour, markersize=8)
    if is_recommended:
        style = {"color": GOOD, "markersize": 14, "markeredgewidth": 2, "markerfacecolor": "none"}
        axis.plot(x, y, "o", linestyle="none", label="recommended", **style)
    return (x, low), (x, high)


def _limits(axis: Axes, request: Mapping[str, Any], against: str) -> list[Span]:
    """Draw dashed lines at the promises that these axes can show; return the lines."""
    style = {"color": BAD, "linewidth": 1, "linestyle": "--"}
    limit = (request["slo"] or {}).get("tpot") if against == "speed" else request["size_bytes"]
    bounds = [limit if against == "speed" else limit / 2**20] if limit else []
    promised = (promise["limit"] for promise in request["promises"] if promise["metric"] == "kl")
    most = [kl for kl in promised if kl > 0]
    for kl in most:
        axis.axhline(kl, **style)
    for bound in bounds:
        axis.axvline(bound, **style)
    (left, right), (low, high) = axis.get_xlim(), axis.get_ylim()
    across = [((left, kl), (right, kl)) for kl in most]
    return [*across, *(((bound, low), (bound, high)) for bound in bounds)]


def predicted_figure(decision: Decision, points: Mapping[str, Any]) -> Figure | None:
    """Measured KL of the finalists against the predicted one, with the rank correlation."""
    pairs = [
        (finalist, point)
        for finalist in decision["finalists"]
        if (point := points.get(finalist["id"])) and point["expected_kl"]
    ]
    if len(pairs) < 2 or not is_installed("matplotlib"):
        return None
    from scipy.stats import rankdata

    expected = [max(point["expected_kl"], LEAST_KL) for _, point in pairs]
    measured = [max(finalist["kl"]["value"], LEAST_KL) for finalist, _ in pairs]
    figure, (axis,) = canvas(width=5.4, height=4.2)
    log_scale(axis, "x", "y")
    ends = [min(expected + measured) / 1.3, max(expected + measured) * 1.3]
    axis.plot(ends, ends, color=MUTED, linewidth=1, linestyle="--")
    spans: list[Span] = []
    for (finalist, point), x, y in zip(pairs, expected, measured, strict=True):
        spans.append(_measured(axis, finalist, x, SERIES[0]))
        if band := point["kl_band"]:
            low, high = (max(side, LEAST_KL) for side in band)
            axis.plot([low, high], [y, y], color=SERIES[0], linewidth=1)
            spans.append(((low, y), (high, y)))
    axis.set_xlabel("predicted KL (nats)")
    axis.set_ylabel("measured KL (nats)")
    title(axis, "Predicted against measured")
    names = [finalist["id"] for finalist, _ in pairs]
    positions = list(zip(names, zip(expected, measured, strict=True), strict=True))
    name_points(axis, positions, spans, color=INK)
    caption = "Bars are intervals of the measurement and bands of the prediction, equal on the dashed line."
    if len(pairs) > 2:
        rank = float(np.corrcoef(rankdata(expected), rankdata(measured))[0, 1])
        caption += f" Rank correlation over {len(pairs)} finalists: {rank:.2f}."
    return Figure("predicted", to_svg(figure, "Predicted against measured KL"), caption, half=True)


def bits_of(kind: str) -> float:
    """The bits in the name of a kind: 4 of `int4 g64`, `nvfp4` and `Q4_K`, 3.5 of `exl3 3.5`."""
    match = re.search(r"\d+(?:\.\d+)?", kind.removeprefix("exl3"))
    return float(match[0]) if match else 0.0


def layers_figure(point: Mapping[str, Any]) -> Figure | None:
    """The kind of every linear as a picture: layers across, linears of a layer down."""
    cells: dict[str, dict[int, str]] = {}
    others = []
    for module, kind in point["layers"].items():
        if match := LAYER.search(module):
            # The experts of a layer share a row: fused, they have one kind.
            role = re.sub(r"\.\d+\.", ".*.", module[match.end() :])
            cells.setdefault(role, {})[int(match[1])] = kind
        else:
            others.append(f"{module} {kind}")
    if not cells:
        return None
    caption = f"Outside the layers: {', '.join(others)}." if others else ""
    return Figure(f"layers-{point['id']}", layers_svg(cells, point), caption)


@drawn
def layers_svg(cells: Mapping[str, Mapping[int, str]], point: Mapping[str, Any]) -> str:
    """Cells with the colour of their kind's family, the stronger the more bits it has."""
    all_kinds = {kind for row in cells.values() for kind in row.values()}
    kinds = sorted(all_kinds, key=lambda kind: (bits_of(kind), kind))
    families = list(dict.fromkeys(re.split(r"\d", kind)[0] for kind in kinds))
    layers = sorted({layer for row in cells.values() for layer in row})
    figure, (axis,) = canvas(width=11, height=1.5 + 0.26 * len(cells))
    for rank, kind in enumerate(kinds):
        positions = [
            (layer, row)
            for row, role in enumerate(cells.values())
            for layer in role
            if role[layer] == kind
        ]
        colour = SERIES[families.index(re.split(r"\d", kind)[0]) % len(SERIES)]
        strength = 0.12 + 0.5 * rank / max(len(kinds) - 1, 1)
        across, down = zip(*positions, strict=True)
        bottoms = [row - 0.46 for row in down]
        axis.bar(across, 0.92, 0.92, bottom=bottoms, color=colour, alpha=strength, label=kind)
        if len(layers) <= MAX_NUMBERED:
            style = {"ha": "center", "va": "center", "fontsize": 8, "color": INK}
            for layer, row in positions:
                label(axis, f"{bits_of(kind):g}", (layer, row), (0, 0), **style)
    axis.set_yticks(range(len(cells)), list(cells))
    axis.set_ylim(len(cells) - 0.5, -0.5)
    axis.set_xlim(layers[0] - 0.6, layers[-1] + 0.6)
    axis.set_xticks(layers[:: max(1, -(-len(layers) // MAX_NUMBERED))])
    axis.set_xlabel("layer")
    axis.grid(visible=False)
    for spine in axis.spines.values():
        spine.set_visible(False)
    figure.legend(loc="outside lower center", ncols=min(len(kinds), 6), fontsize=9, frameon=False)
    title(axis, ": ".join(dict.fromkeys((point["id"], point["label"]))))
    return to_svg(figure, f"Bits of every layer of {point['id']}")
