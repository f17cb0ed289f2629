"""Print the quantizer table: processor seconds and peak memory of ours and of other packages, at their
errors.

    python -m tools.quantizer_times --models DIR --environments DIR --install \\
        --calibration c4_demo.jsonl --text wikitext2_wiki.test.raw --output FILE

Takes the options of `tools/quality_table.py real`, quantizes the cells below each in a process of its own,
one after another, and prints what they took, imports included, beside the KL of what they wrote. Processor
seconds (user and system, all threads) are those of a busy machine, too. A ratio is to the quickest peer of
the task; it is at equal error, or less, where our KL is no more than that peer's: ours have rows of fewer
samples for that. `--docs docs/measured/quantizers.md` writes the table there.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tools.document_part import write_part
from tools.environments import install
from tools.quality.cells import GPTAQ, ITERS, Cell
from tools.quality.environments import PACKAGES
from tools.quality.real import fill, label, parse, prepare

Row = Mapping[str, Any]
PART = "quantizer_times.py"
ASYMMETRIC = {"symmetric": False}
BY_STEPS = ASYMMETRIC | {"iters": ITERS}
MIX = {"gguf_type": "Q4_K_M", "imatrix": False, "tables": True}


@dataclass(frozen=True, slots=True)
class Task:
    """Name what several packages do, ours first.

    Attributes:
        at_most: the goal for the ratio of its processor seconds; without peers, for the seconds of a clock.
    """

    name: str
    at_most: float
    cells: tuple[Cell, ...]


TASKS = (
    Task(
        "Q4_K_M",
        1.5,
        (
            Cell("llmopt", "rtn", "Q4_K_M", 4, MIX | {"errors": False}),
            Cell("llamacpp", "quantize", "Q4_K_M", 4, MIX),
        ),
    ),
    *(
        Task(
            method,
            at_most,
            (
                Cell("llmopt", method, "int4", 4, options),
                *(Cell("llmopt", method, "int4", 4, options | {"samples": n}) for n in fewer),
                *(Cell(package, method, "int4", 4, options) for package in peers),
            ),
        )
        for method, at_most, options, fewer, peers in (
            ("gptq", 0.5, ASYMMETRIC, (16, 8), ("gptqmodel", "llmcompressor")),
            ("awq", 0.5, ASYMMETRIC, (16, 8), ("gptqmodel", "llmcompressor")),
            ("autoround", 1.0, BY_STEPS, (), ("autoround",)),
        )
    ),
    Task("trellis", 300, (Cell("llmopt", "trellis", "IQ2_XS", 2, GPTAQ),)),
)


def verdict(task: Task, row: Row, quickest: Row | None) -> str:
    """How a row of ours stands to the goal of its task."""
    if not any(cell.package != "llmopt" for cell in task.cells):
        found, unit = row["seconds"], " s of the clock"
    elif quickest is not None:
        found, unit = row["cpu_seconds"] / quickest["cpu_seconds"], ""
    else:
        return ""
    word = "met" if found <= task.at_most else "**missed**"
    if quickest is not None and row["kl_nats"] > quickest["kl_nats"]:
        word += " at more error"
    return f"{found:.{0 if unit else 2}f}{unit}, {task.at_most:g} asked: {word}"


def lines(rows: Sequence[Row]) -> Iterator[str]:
    """The table's lines; a package that is not installed, or failed, has none or its reason."""
    by_name = {row["name"]: row for row in rows}
    yield "| task | package, method | KL, nats | processor, s | peak, MiB | ours / quickest peer |"
    yield "|---|---|---:|---:|---:|---:|"
    for task in TASKS:
        found = [by_name[cell.name] for cell in task.cells if cell.name in by_name]
        measured = [row for row in found if "cpu_seconds" in row]
        peers = [row for row in measured if row["package"] != "llmopt"]
        quickest = min(peers, key=lambda row: row["cpu_seconds"], default=None)
        for row in found:
            begin = f"| {task.name} | {label(row)}"
            if row not in measured:
                yield f"{begin} | {row.get('error', 'no times')} | | | |"
                continue
            peak = f"{row['peak_bytes'] / 2**20:,.0f}" if row.get("peak_bytes") else ""
            end = verdict(task, row, quickest) if row["package"] == "llmopt" else ""
            yield f"{begin} | {row['kl_nats']:.3g} | {row['cpu_seconds']:.1f} | {peak} | {end} |"


def part_for(is_plain: bool) -> str:
    """The part of the document that has the table of SmolLM2, or of another model."""
    return f"{PART} --plain" if is_plain else PART


def main() -> None:
    given = parse(sys.argv[1:])
    torch.set_num_threads(given.threads)
    cells = [cell for task in TASKS for cell in task.cells]
    if given.install:
        for package in dict.fromkeys(cell.package for cell in cells if cell.package in PACKAGES):
            install(given.environments / package, PACKAGES[package])
    text = "\n".join(lines(fill(prepare(given), cells)))
    print(text)
    if given.docs:
        write_part(given.docs, part_for(given.plain is not None), text)


if __name__ == "__main__":
    main()
