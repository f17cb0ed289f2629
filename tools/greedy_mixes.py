"""Mixed precision of the release before the solver beside ours, in files of no more bytes.

    python -m tools.greedy_mixes --models DIR --environments DIR --install --calibration c4.jsonl \\
        --text wiki.test.raw --mixes docs/measured/cpu/mixes-real.json --output mixes-greedy.json \\
        --docs docs/measured/mixes.md

That release spent bytes where rounding to nearest lost most output error per byte. It is installed from this
repository's history and run by its command line, with the calibration of `quality_table.py mixes`, at the
bytes of our mixes of integers in that record; the program of that table scores it. Rows are kept, and the
same command goes on where it was stopped. Ends with 1 where a mix of ours has the larger KL divergence,
with 3 where there is none beside it.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from llmopt.base.atomic_io import write_atomically
from llmopt.quant.plan.manifest import MANIFEST_NAME

from tools.document_part import ROOT, write_part
from tools.environments import install
from tools.quality.dequantized import dequantize_checkpoint
from tools.quality.mixes import LEAN, MIXES
from tools.quality.real import Session, parse, prepare, record_of

GREEDY = "c5ce62a3df33c4eb91dacd664f5285b4e153ea1f"
BITS = (LEAN, min(MIXES))
"""Our mixes that it is held against."""


def made(session: Session, mix: Mapping[str, Any], command: Path) -> dict[str, Any]:
    """The row of a mix of that release of no more bytes than ours."""
    given = session.given
    count, length = session.searched.token_ids.shape
    options = {
        "method": "auto",
        "format": "compressed-tensors",
        "target-size": f"{(mix['file_bytes'] + 0.5) / 1000}kB",  # it takes no plain numbers
        "calibration": given.calibration.resolve(),
        "num-samples": count,
        "seq-len": length,
        "held-out": len(session.searched.held_out),
        "seed": given.seed,
        "stats": given.models / "statistics-greedy",
    }
    words = [str(word) for name, value in options.items() for word in (f"--{name}", value)]
    with tempfile.TemporaryDirectory(dir=given.scratch) as parent:
        output, plain = Path(parent) / "quantized", Path(parent) / "plain"
        begun = time.perf_counter()
        run = [command, "quantize", session.continuous, *words, "--output", output]
        subprocess.run(run, check=True)
        seconds = time.perf_counter() - begun
        manifest = json.loads((output / MANIFEST_NAME).read_text(encoding="utf-8"))
        if manifest["calibration"]["sha256"] != session.searched.sha256:
            sys.exit("it calibrated on other tokens than ours")
        stored = dequantize_checkpoint(output, plain, session.continuous)
        scores = session.scorer(session.continuous).score(plain)
    return {
        "bits": mix["bits"],
        "target_bytes": mix["file_bytes"],
        "seconds": seconds,
        "bits_per_weight": stored.bits_per_weight,
        "file_bytes": stored.file_bytes,
        "kl_nats": scores.kl_nats,
        "kl_interval": scores.intervals["kl_nats"],
        "reference_perplexity": scores.reference_perplexity,
        "perplexity": scores.perplexity,
        "top1_agreement": scores.top1_agreement,
    }


def markdown(record: Mapping[str, Any], mixes: Mapping[str, Any]) -> str:
    """The table for the documentation: each mix of that release, and ours, of the record `mixes`."""
    lines = [
        "| bits | greedy: bytes | KL, nats (95 %) | ours: bytes | KL, nats (95 %) | ratio |",
        "|---:|---:|---:|---:|---:|---:|",
    ]
    for row, mine in pairs(record["rows"], mixes):
        cells = []
        for one in (row, mine):
            low, high = one["kl_interval"]
            cells += [f"{one['file_bytes']:,}", f"{one['kl_nats']:.3g} ({low:.3g} to {high:.3g})"]
        ratio = mine["kl_nats"] / row["kl_nats"]
        lines.append(f"| {mine['bits_per_weight']:.2f} | {' | '.join(cells)} | {ratio:.2f} |")
    return "\n".join(lines)


def pairs(
    rows: Sequence[Mapping[str, Any]], mixes: Mapping[str, Any]
) -> list[tuple[Mapping[str, Any], Mapping[str, Any]]]:
    """Mixes of that release, each with ours."""
    own = {mix["file_bytes"]: mix for mix in ours(mixes)}
    return [(row, own[row["target_bytes"]]) for row in rows if row["target_bytes"] in own]


def ours(mixes: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Our mixes of integers at `BITS`."""
    wanted = [("auto", "int", bits) for bits in BITS]
    return [row for row in mixes["rows"] if (row["method"], row["grid"], row["bits"]) in wanted]


def main() -> int:
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--mixes", type=Path, required=True)
    known, words = parser.parse_known_args()
    mixes, given = json.loads(known.mixes.read_text(encoding="utf-8")), parse(words)
    folder = given.environments / "greedy"
    if given.install:
        install(folder, [f"git+file://{ROOT}@{GREEDY}"])
    session = prepare(given)
    record = record_of(session, [])
    if record["calibration"]["sha256"] != mixes["calibration"]["sha256"]:
        sys.exit("--mixes is of another calibration")
    path = given.output
    rows = json.loads(path.read_text(encoding="utf-8"))["rows"] if path.exists() else []
    for mix in ours(mixes):
        if mix["file_bytes"] not in {row["target_bytes"] for row in rows}:
            rows.append(made(session, mix, folder / "bin" / "llmopt"))
            text = json.dumps(record_of(session, rows) | {"greedy": GREEDY}, indent=1)
            write_atomically(path, f"{text}\n".encode())
    if given.docs:
        part = "greedy_mixes.py"
        write_part(given.docs, part, markdown({"rows": rows}, mixes))
    held = pairs(rows, mixes)
    return int(any(mine["kl_nats"] > row["kl_nats"] for row, mine in held)) if held else 3


if __name__ == "__main__":
    sys.exit(main())
