"""Quality cost of 8-bit activations: `python tools/cpu_activations_cost.py CHECKPOINT ...`.

Every checkpoint is scored on the bundled evaluation text with `cpu_activations` 16 and 8, against the
plain model: the mean KL of the next token's distribution, and perplexity. Beside them stands the KL
between the two runs of the same checkpoint: the effect of quantizing activations alone.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

from llmopt.bench.quality.quality import (
    Passage,
    distance,
    log_probabilities,
    nll_nats,
    read_passage,
)
from llmopt.engine.config.config import EngineConfig
from llmopt.engine.engine import Engine


def engine(model: str, **options: Any) -> Engine:
    return Engine(EngineConfig(model, device="cpu", num_threads=1, **options))


def cost(checkpoint: str, passage: Passage, plain: list[Any]) -> dict[str, Any]:
    """Scores of one checkpoint with 16-bit and with 8-bit activations."""
    found: dict[str, Any] = {"checkpoint": Path(checkpoint).name}
    runs = {}
    for bits in (16, 8):
        runs[bits] = log_probabilities(engine(checkpoint, cpu_activations=bits), passage)
        found[f"kl_{bits}"], found[f"top1_{bits}"] = distance(plain, runs[bits])
        found[f"perplexity_{bits}"] = math.exp(nll_nats(runs[bits], passage))
    found["kl_between"], found["top1_between"] = distance(runs[16], runs[8])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoints", nargs="+")
    parser.add_argument("--reference", default="stories3M", help="the unquantized model")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    reference = engine(options.reference, dtype="float32")
    passage = read_passage(
        reference.tokenizer, max_model_len=reference.max_model_len, num_tokens=options.tokens
    )
    plain = log_probabilities(reference, passage)
    perplexity = math.exp(nll_nats(plain, passage))
    print(
        f"{passage.num_scored} tokens; {options.reference} in float32: perplexity {perplexity:.4f}"
    )
    rows = [cost(checkpoint, passage, plain) for checkpoint in options.checkpoints]
    for row in rows:
        print(
            f"{row['checkpoint']:<28} KL to the plain model {row['kl_16']:.5f} -> {row['kl_8']:.5f}, "
            f"perplexity {row['perplexity_16']:.4f} -> {row['perplexity_8']:.4f}, "
            f"between the two: KL {row['kl_between']:.6f}, top-1 {row['top1_between']:.2%}"
        )
    if options.json:
        record = {"reference": options.reference, "tokens": passage.num_scored, "rows": rows}
        options.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
