"""Mixed precision beside the mixes of other packages, in files of the same bytes.

    python tools/quality_table.py mixes --models build/real --environments build/quantizers --install \\
        --calibration c4.jsonl --text wiki.test.raw --output docs/measured/cpu/mixes.json \\
        --docs docs/measured/mixes.md

At 3.5, 4.25 and 5 bits per weight each package makes its own mix of the models of `quality_table.py real`,
from the same calibration tokens: auto-round's AutoScheme and llm-compressor's HIGGS of integers with zero
points in groups of 64, llama.cpp, with an importance matrix, of GGUF types. Then `--method auto` makes ours,
of no more bytes than the smaller file of integers, or than that of llama.cpp. Whole files count and are
scored, with the embeddings in GGUF files. Our mixes of integers stand beside one width for all layers, too,
made as they are and interpolated in the logarithm of KL. Rows are kept as there. Ends with 1 where a mix of
ours has the larger KL divergence, with 3 where none is beside another.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from tools.document_part import write_part
from tools.environments import install
from tools.quality.cells import GPTAQ, ITERS, Cell
from tools.quality.environments import PACKAGES
from tools.quality.real import fill, parse, prepare, record_of

MIXES = {3.5: "IQ3_S", 4.25: "IQ4_XS", 5.0: "Q4_K_M"}
"""Bits per weight, and the mix of llama.cpp that comes next to them from below."""
WIDTHS = (2, 3, 4, 5, 6, 8)
GPTQ_WIDTHS = (2, 3, 4, 8)
"""Bits per weight that the file formats of AutoScheme's and of gptq's integers have."""
OURS: Mapping[str, Mapping[str, Any]] = {
    "int": {
        "format": "compressed-tensors",
        "candidates": [*(f"int{b}" for b in WIDTHS), *(f"int{b}-asym" for b in GPTQ_WIDTHS[:3])],
        "asymmetric": None,
    },
    "gguf": {"format": "gguf", "tables": True, "asymmetric": None},
}
"""Kinds of files, with the options of our own, made as the command line makes them: with GPTAQ."""
UNIFORM, LEAN = (2, 3, 4, 5), 3
"""Our uniform widths, and that of them whose bytes one more mix has."""
NAMES = {
    "autoround": "auto-round's AutoScheme",
    "llmcompressor": "llm-compressor's HIGGS, gptq",
    "llamacpp": "llama.cpp with imatrix",
    "llmopt": "llmopt auto",
}


def peers(iters: int) -> Iterator[Cell]:
    """The mixes of the other packages.

    Args:
        iters: steps of auto-round for each layer.
    """
    for bits, mix in MIXES.items():
        gguf = {"gguf_type": mix, "imatrix": True, "tables": True}
        yield Cell("llamacpp", "quantize", mix, bits, gguf)
        target = {"symmetric": False, "target_bpw": bits}
        yield Cell("llmcompressor", "gptq", "int", bits, {**target, "widths": WIDTHS})
        tuned = {**target, "widths": GPTQ_WIDTHS, "iters": iters}
        yield Cell("autoround", "autoround", "int", bits, tuned)


def uniform() -> Iterator[Cell]:
    """One width for all layers, made as our mixes are."""
    for bits in UNIFORM:
        yield Cell("llmopt", "awq", f"int{bits}", bits, {"symmetric": False} | GPTAQ)


def ours(rows: Sequence[Mapping[str, Any]]) -> Iterator[Cell]:
    """Our mixes, of no more bytes than theirs, and one of those of uniform int3."""
    lean = [row for row in rows if (row["method"], row["bits"]) == ("awq", LEAN)]
    held = [*measured(rows), *(row for row in lean if "kl_nats" in row)]
    for bits in (*MIXES, LEAN):
        for kind, options in OURS.items():
            beside = (row for row in held if (row["bits"], kind_of(row)) == (bits, kind))
            if sizes := [row["file_bytes"] for row in beside]:
                yield Cell("llmopt", "auto", kind, bits, {**options, "target_bytes": min(sizes)})


def measured(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The mixes of other packages that were made."""
    return [row for row in rows if row["package"] != "llmopt" and "kl_nats" in row]


def kind_of(row: Mapping[str, Any]) -> str:
    """The kind of a row's file."""
    return "int" if row["grid"].startswith("int") else "gguf"


def beside(row: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """Our largest mix of no more bytes than another package's, else the smallest; None: none was made."""
    wanted, size = (row["bits"], kind_of(row)), row["file_bytes"]
    own = [one for one in rows if one["method"] == "auto" and "kl_nats" in one]
    own = [one for one in own if (one["bits"], kind_of(one)) == wanted]
    return min(
        own, default=None, key=lambda one: (one["file_bytes"] > size, abs(one["file_bytes"] - size))
    )


def beside_uniform(rows: Sequence[Mapping[str, Any]]) -> list[tuple[Mapping[str, Any], float]]:
    """Our mixes of integers, by bits, each with the KL divergence in nats of a uniform width of its bytes.

    Between two widths it is linear in its logarithm; mixes outside of them are left out.
    """
    own = sorted(
        (row["file_bytes"], math.log(row["kl_nats"]))
        for row in rows
        if (row["package"], row["method"]) == ("llmopt", "awq") and "kl_nats" in row
    )
    sizes, logs = [size for size, _ in own], [log for _, log in own]
    return [
        (row, math.exp(np.interp(row["file_bytes"], sizes, logs)))
        for row in sorted(rows, key=lambda row: row["bits"])
        if (row["method"], row["grid"]) == ("auto", "int") and "kl_nats" in row
        if sizes and sizes[0] <= row["file_bytes"] <= sizes[-1]
    ]


def markdown(record: Mapping[str, Any]) -> str:
    """The table for the documentation: each mix of a package, and ours of no more bytes."""
    shape = " x ".join(str(size) for size in record["calibration"]["shape"])
    lines = [
        f"{record['model']}, calibrated on {shape} tokens of {record['calibration']['source']}, scored on "
        f"{record['num_tokens']:,} tokens of {record['evaluation']}; minutes are of a busy "
        f"{record['processor']}.",
        "",
        "| bits | mix | bytes | KL, nats (95 %) | minutes "
        "| ours: bytes | KL, nats (95 %) | minutes | ratio |",
        "|---:|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    rows = record["rows"]
    for row in sorted(measured(rows), key=lambda row: (row["bits"], label(row))):
        mine = beside(row, rows)
        ratio = f"{mine['kl_nats'] / row['kl_nats']:.2f}" if mine else ""
        cells = [*_cells(row), *(_cells(mine) if mine else ("", "", "")), ratio]
        lines.append(f"| {row['bits']:g} | {label(row)} | {' | '.join(cells)} |")
    if held := beside_uniform(rows):
        lines += [
            "",
            "| bits | llmopt auto of int, KL | uniform, KL | ratio |",
            "|---:|---:|---:|---:|",
        ]
        lines += [
            f"| {row['bits']:g} | {row['kl_nats']:.3g} | {kl:.3g} | {row['kl_nats'] / kl:.2f} |"
            for row, kl in held
        ]
    for row in record["rows"]:
        if "error" in row:
            lines += ["", f"Not run: {label(row)} at {row['bits']:g} bits: {row['error']}"]
    return "\n".join(lines)


def label(row: Mapping[str, Any]) -> str:
    """The mix of a package."""
    name = NAMES[row["package"]]
    if iters := row["options"].get("iters"):
        return f"{name}, {iters} steps"
    return f"{name}, {row['grid']}" if row["package"] == "llamacpp" else name


def _cells(row: Mapping[str, Any]) -> tuple[str, str, str]:
    """Size, divergence and time of a row."""
    low, high = row["kl_interval"]
    divergence = f"{row['kl_nats']:.3g} ({low:.3g} to {high:.3g})"
    return f"{row['file_bytes']:,}", divergence, f"{row['seconds'] / 60:.1f}"


def main(words: Sequence[str]) -> int:
    if "--list" in words:
        print("\n".join(cell.name for cell in (*peers(ITERS), *uniform())))
        return 0
    given = parse(words)
    if given.install:
        for name in NAMES.keys() & PACKAGES.keys():
            install(given.environments / name, PACKAGES[name])
    session = prepare(given)
    fill(session, peers(given.iters))
    rows = fill(session, uniform())
    rows = fill(session, ours(rows))
    if given.docs:
        part = given.part or "quality_table.py mixes"
        write_part(given.docs, part, markdown(record_of(session, rows)))
    pairs = [(row, mine) for row in measured(rows) if (mine := beside(row, rows))]
    worse = any(mine["kl_nats"] > row["kl_nats"] for row, mine in pairs)
    worse |= any(mine["kl_nats"] > kl for mine, kl in beside_uniform(rows))
    return int(worse) if pairs else 3
