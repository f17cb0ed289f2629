"""Goals of the real model's table: ours beside the best peer of each grid, and rtn's loss recovered."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from llmopt.quant.plan.request import QuantizeRequest

OURS = "llmopt"
RECOVERED = {4: 0.70, 3: 0.60}
"""Share of plain rounding's KL that the best method recovers, by width; same grid, same symmetry or not."""
MORE_BITS = 0.1
"""Bits per weight that our row may store beyond the peer's that it is held against."""

LATTICES = ("trellis", "quip")
APART = ("lookup", "e8p")
"""Grids, by their beginning, that no package of the table writes: rows to read, without a goal."""

DEFAULT_METHOD = str(next(f.default for f in fields(QuantizeRequest) if f.name == "method"))
DEFAULT_ROTATIONS = ["R2"]  # and GPTAQ, see `quant/plan/defaults.py`
DEFAULT_TIME = 3.0

Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Goal:
    """One line: `met` is None where a row is missing."""

    text: str
    met: bool | None

    @property
    def line(self) -> str:
        return (
            f"{self.text}: {'no verdict' if self.met is None else 'met' if self.met else 'missed'}"
        )


def goals(rows: Sequence[Row]) -> list[Goal]:
    """Every goal that the rows concern; rows with an error have no scores and are left out."""
    scored = [row for row in rows if "kl_nats" in row]
    ordered = sorted(scored, key=lambda row: -row["bits"])
    grids = dict.fromkeys(row["grid"] for row in ordered if not row["grid"].startswith(APART))
    return [
        *(_beside_peers(scored, grid) for grid in grids),
        *_recovered(scored),
        *_lattices(scored),
        _default(scored),
    ]


def exit_code(found: Sequence[Goal]) -> int:
    """0: all met; 1: one is missed; 3: none is missed, and not all have a verdict."""
    if any(goal.met is False for goal in found):
        return 1
    return 0 if found and all(goal.met for goal in found) else 3


def _best(rows: Sequence[Row]) -> Row | None:
    return min(rows, key=lambda row: row["kl_nats"], default=None)


def _beside_peers(rows: Sequence[Row], grid: str) -> Goal:
    mine = [row for row in rows if row["grid"] == grid]
    peer = _best([row for row in mine if row["package"] != OURS])
    if peer is None:
        return Goal(f"{grid}: no peer", None)
    most = peer["bits_per_weight"] + MORE_BITS
    ours = _best([r for r in mine if r["package"] == OURS and r["bits_per_weight"] <= most])
    text = f"{grid}: best peer {_words(peer)}"
    if ours is None:
        return Goal(f"{text}, ours not measured", None)
    return Goal(f"{text}, ours {_words(ours)}", ours["kl_nats"] <= peer["kl_nats"])


def _recovered(rows: Sequence[Row]) -> Iterator[Goal]:
    """Of the loss of plain rounding to the same kind of codes, so that the grid's share is not counted."""
    for bits, least in RECOVERED.items():
        mine = [row for row in rows if row["grid"] == f"int{bits}"]
        ours = _best([row for row in mine if row["package"] == OURS])
        text = f"int{bits}: share of rtn's loss recovered, {least:.0%} asked"
        if ours is None:
            yield Goal(text, None)
            continue
        symmetric = ours["options"].get("symmetric")
        rounded = [
            row
            for row in mine
            if row["method"] == "rtn"
            and row["package"] != OURS  # plain ranges: ours may be searched
            and row["options"].get("symmetric") == symmetric
        ]
        if not rounded:
            yield Goal(text, None)
            continue
        share = 1 - ours["kl_nats"] / rounded[0]["kl_nats"]
        yield Goal(f"{text}, {share:.1%} by {_words(ours)}", share >= least)


def _lattices(rows: Sequence[Row]) -> Iterator[Goal]:
    """Trellis or lattice codes of 2 and 3 bits beside auto-round's integers, at no more bits a weight."""
    for bits in (3, 2):
        mine = [row for row in rows if row["bits"] == bits]
        peer = _best([row for row in mine if row["package"] == "autoround"])
        codes = [row for row in mine if row["method"] in LATTICES]
        if not codes:
            continue
        text = f"{bits} bits: auto-round {_words(peer) if peer else 'not measured'}"
        most = peer["bits_per_weight"] if peer else 0.0
        ours = _best([row for row in codes if row["bits_per_weight"] <= most])
        if peer is None or ours is None:
            yield Goal(f"{text}, ours not measured at as many bits", None)
        else:
            yield Goal(f"{text}, ours {_words(ours)}", ours["kl_nats"] <= peer["kl_nats"])


def _default(rows: Sequence[Row]) -> Goal:
    """The default method is the one that wins at 4 bits within three times gptq's time."""
    mine = [row for row in rows if row["package"] == OURS and row["grid"] == "int4"]
    times = [row["seconds"] for row in mine if row["method"] == "gptq"]
    text = f"int4: the default, {DEFAULT_METHOD}, wins within {DEFAULT_TIME:g} times gptq's time"
    best = _best([row for row in mine if times and row["seconds"] <= DEFAULT_TIME * min(times)])
    if best is None:
        return Goal(text, None)
    chosen = best["options"]
    taken = [*chosen.get("rotations", ())] == DEFAULT_ROTATIONS and "asymmetric" in chosen
    return Goal(f"{text}; first is {_words(best)}", best["method"] == DEFAULT_METHOD and taken)


def _words(row: Row) -> str:
    return f"{label(row)} {row['kl_nats']:.3g} at {row['bits_per_weight']:.2f} bits"


def label(row: Row) -> str:
    """Package and method, and what sets a row apart within its grid."""
    options = row["options"]
    words = [row["package"], row["method"]]
    if "symmetric" in options:
        words.append("sym" if options["symmetric"] else "asym")
    if options.get("imatrix"):
        words.append("imatrix")
    words += options.get("rotations", ())
    if options.get("asymmetric"):
        words.append("GPTAQ")
    if "target_bpw" in options:
        words.append(f"{options['target_bpw']:g} bits")
    if "finetune_steps" in options:
        words.append("tuned")
    if "solver" in options:
        words.append(options["solver"])
    return " ".join(words)


def markdown(record: Mapping[str, Any]) -> str:
    """The table and the goals, for the documentation."""
    rows = sorted(
        (row for row in record["rows"] if "kl_nats" in row),
        key=lambda row: (-row["bits"], row["grid"], row["kl_nats"]),
    )
    shape = " x ".join(str(size) for size in record["calibration"]["shape"])
    lines = [
        f"Calibration {shape} tokens of {record['calibration']['source']}; {record['num_tokens']:,} tokens "
        f"of {record['evaluation']}, {record['protocol']}; the plain model's perplexity is "
        f"{record['original_perplexity']:.3f}.",
        "",
        "| grid | package, method | bits per weight | perplexity | KL, nats (95 %) | same top token |",
        "|---|---|---:|---:|---:|---:|",
    ]
    for row in rows:
        low, high = row["kl_interval"]
        lines.append(
            f"| {row['grid']} | {label(row)} | {row['bits_per_weight']:.2f} | {row['perplexity']:.3f} | "
            f"{row['kl_nats']:.3g} ({low:.3g} to {high:.3g}) | {100 * row['top1_agreement']:.1f} % |"
        )
    for row in record["rows"]:
        if "error" in row:
            lines += ["", f"Not run: {row['grid']} by {label(row)}: {row['error']}"]
    lines += ["", "Goals:", "", *(f"- {goal.line}" for goal in goals(record["rows"]))]
    return "\n".join(lines)
