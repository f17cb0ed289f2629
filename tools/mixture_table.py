"""Mixed precision of a real model: its KL beside uniform widths of as many bits, and its prediction.

    python tools/mixture_table.py --models build/real --output docs/measured/cpu/mixtures.json \\
        --docs docs/quantization.md

SmolLM2-135M-Instruct made continuous (tools/continuous_model.py) is searched once; mixtures, uniform kinds
and random mixtures of one size are measured on two halves of the bundled evaluation text, by gptq's codes.
A uniform width between two kinds is interpolated in the logarithm of KL. `--folder` keeps what was measured.
Ends with 1 where a mixture is worse than the uniform width.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from llmopt.quant.base.atomic_io import write_atomically
from llmopt.quant.base.progress import Silent
from llmopt.quant.load_processor import load_tokenizer
from llmopt.quant.pipeline.divergence import divergences
from llmopt.quant.pipeline.mixed_precision import Allocation, Lane
from llmopt.quant.pipeline.prepare import BUNDLED_EVALUATION, search_fronts
from llmopt.quant.plan.request import QuantizeRequest
from llmopt.quant.stream.calibration import load_calibration
from scipy.stats import rankdata

sys.path.insert(0, str(Path(__file__).parents[1]))
from tools.continuous_model import make
from tools.document_part import write_part

KINDS = ("int2", "int3", "int4", "int8")
BITS = (2.75, 3.0, 3.25, 3.5, 4.0, 4.25)
RANDOM_BITS, RANDOM_MIXTURES, WITHIN = 4.0, 20, 0.01
SEQ_LEN = 256


def bits_of(lane: Lane, chosen: Sequence[int]) -> float:
    taken = sum(choice.bytes[at] for choice, at in zip(lane.choices, chosen, strict=True))
    return taken * 8 / lane.search.num_weights


def cost_of(lane: Lane, chosen: Sequence[int]) -> float:
    return sum(choice.costs[at] for choice, at in zip(lane.choices, chosen, strict=True))


def random_mixtures(lane: Lane) -> list[tuple[int, ...]]:
    """Mixtures of one size: drawn towards small candidates by any share, those of other sizes dropped."""
    draw, found = random.Random(0), []
    while len(found) < RANDOM_MIXTURES:
        tilt = draw.uniform(0, 1)
        mixture = tuple(
            draw.choices(c.efficient, [math.exp(-tilt * n) for n in range(len(c.efficient))])[0]
            for c in lane.choices
        )
        if abs(bits_of(lane, mixture) - RANDOM_BITS) < WITHIN:
            found.append(mixture)
    return found


def interpolated(uniform: Sequence[Mapping[str, Any]], bits: float) -> float:
    """KL of a uniform width, linear in its logarithm between the kinds that no other beats."""
    kept: list[Mapping[str, Any]] = []
    for one in sorted(uniform, key=lambda one: one["bits"]):
        if not kept or one["kl"] < kept[-1]["kl"]:
            kept.append(one)
    places, logs = zip(*((one["bits"], math.log(one["kl"])) for one in kept), strict=True)
    return math.exp(np.interp(bits, places, logs))


def measure(given: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """The record: every mixture with its bits, expected and measured KL."""
    model = given.plain or make(given.models, 0)[0]
    asked = QuantizeRequest.of(
        model, folder / "none", method="auto", format="compressed-tensors", candidates=KINDS,
        num_samples=given.num_samples, seq_len=SEQ_LEN, held_out=given.num_samples,
        stats=folder / "statistics",
    )  # fmt: skip
    (lane,) = search_fronts([asked], Silent())
    text = load_calibration(
        BUNDLED_EVALUATION, load_tokenizer(model), num_samples=given.tokens // SEQ_LEN,
        seq_len=SEQ_LEN, seed=0,
    ).token_ids  # fmt: skip
    kinds = [
        n
        for n, schemes in enumerate(lane.search.schemes)
        if len(schemes) == len(lane.search.sizes[0])
    ]
    solved = [lane.allocate(int(bits * lane.search.num_weights / 8)).chosen for bits in BITS]
    others = random_mixtures(lane)
    every = [*((n,) * len(lane.choices) for n in kinds), *solved, *others]
    schemes = [lane.schemes_of(Allocation(chosen, 0, 0.0, 0.0, 0)) for chosen in every]
    halves = [
        divergences(lane.search.plan, lane.stream, ids, schemes, Silent(), (), lane.folder)
        for ids in text.chunk(2)
    ]
    rows = [
        {
            "bits": bits_of(lane, chosen),
            "expected": cost_of(lane, chosen),
            "halves": pair,
            "kl": sum(pair) / 2,
        }
        for chosen, pair in zip(every, zip(*halves, strict=True), strict=True)
    ]
    uniform = [row | {"kind": lane.search.label(n)} for row, n in zip(rows, kinds, strict=False)]
    first = len(kinds) + len(BITS)
    mixed = [
        row | {"uniform": interpolated(uniform, row["bits"])} for row in rows[len(kinds) : first]
    ]
    return {
        "model": model.name,
        "calibration_tokens": given.num_samples * SEQ_LEN,
        "scored_tokens": text.numel(),
        "torch": torch.__version__,
        "uniform": uniform,
        "mixed": mixed,
        "random": rows[first:],
        "ranks": ranks(rows[first:]),
    }


def ranks(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Rank correlations over mixtures: of expected with measured KL, of the KL of one half of the text with
    that of the other, and of expected KL with KL on text without end (both halves together repeat by Spearman
    and Brown's formula)."""
    one, other = zip(*(row["halves"] for row in rows), strict=True)
    measured = [row["kl"] for row in rows]
    found = _rank_correlation([row["expected"] for row in rows], measured)
    halves = _rank_correlation(one, other)
    whole = 2 * halves / (1 + halves)
    return {"expected": found, "halves": halves, "corrected": min(1.0, found / math.sqrt(whole))}


def _rank_correlation(some: Sequence[float], others: Sequence[float]) -> float:
    return float(np.corrcoef(rankdata(some), rankdata(others))[0, 1])


def markdown(record: Mapping[str, Any]) -> str:
    """The table for the documentation."""
    kinds = ", ".join(f"{one['kind']} {one['kl']:.3g}" for one in record["uniform"])
    lines = [
        f"{record['model']}, {record['calibration_tokens']:,} tokens of calibration, KL on "
        f"{record['scored_tokens']:,} tokens of the evaluation text; uniform kinds are {kinds}.",
        "",
        "| bits per weight | KL, mixed | KL, uniform width | ratio |",
        "|---:|---:|---:|---:|",
    ]
    for one in record["mixed"]:
        ratio = one["kl"] / one["uniform"]
        lines.append(
            f"| {one['bits']:.3f} | {one['kl']:.3g} | {one['uniform']:.3g} | {ratio:.2f} |"
        )
    found, bits = record["ranks"], [one["bits"] for one in record["random"]]
    lines += [
        "",
        f"{len(bits)} random mixtures of {min(bits):.2f} to {max(bits):.2f} bits: rank correlation of "
        f"expected with measured KL {found['expected']:.3f}; of KL on one half of the text with that on "
        f"the other {found['halves']:.3f}; of expected KL with KL on text without end "
        f"{found['corrected']:.3f}.",
    ]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    model = parser.add_mutually_exclusive_group(required=True)
    model.add_argument("--models", type=Path, help="folder of tools/real_model.py")
    model.add_argument("--plain", type=Path, help="another model, as it is")
    parser.add_argument(
        "--num-samples", type=int, default=32, help="of 256 tokens, and as many held out"
    )
    parser.add_argument("--tokens", type=int, default=8192, help="of the evaluation text")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--folder", type=Path, help="of statistics and costs, which a second run reads"
    )
    parser.add_argument("--output", type=Path, help="JSON file")
    parser.add_argument("--docs", type=Path, help="Markdown file with the lines for the table")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    with tempfile.TemporaryDirectory() as scratch:
        record = measure(given, given.folder or Path(scratch))
    if given.output:
        write_atomically(given.output, json.dumps(record, indent=1) + "\n")
    print(markdown(record))
    if given.docs:
        write_part(given.docs, "mixture_table.py", markdown(record))
    return int(any(one["kl"] > one["uniform"] for one in record["mixed"]))


if __name__ == "__main__":
    sys.exit(main())
