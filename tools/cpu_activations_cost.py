"""Quality cost of 8-bit activations: `python tools/cpu_activations_cost.py CHECKPOINT ...`.

Every checkpoint is scored on the bundled evaluation text with `cpu_activations` 16 and 8, against the
plain model: the mean KL of the next token's distribution, and perplexity. Beside them stands the KL
between the two runs of the same checkpoint: the effect of quantizing activations alone.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from llmopt.bench.quality.passage import Passage, read_passage
from llmopt.bench.quality.scoring import score_passage
from llmopt.bench.quality.summary import Quality, summarize
from llmopt.engine.config.config import EngineConfig
from llmopt.engine.engine import Engine


def engine(model: str, **options: Any) -> Engine:
    return Engine(EngineConfig(model, device="cpu", num_threads=1, **options))


def scores(passage: Passage, model: Engine, reference: Engine) -> Quality:
    """Scores of a model against a reference."""
    series, _ = score_passage(passage, model, reference)
    return summarize(passage, series, reference=reference.folder.name)


def cost(checkpoint: str, passage: Passage, reference: Engine) -> dict[str, Any]:
    """Scores of one checkpoint with 16-bit and with 8-bit activations."""
    row: dict[str, Any] = {"checkpoint": Path(checkpoint).name}
    runs = {bits: engine(checkpoint, cpu_activations=bits) for bits in (16, 8)}
    for bits, run in runs.items():
        scored = scores(passage, run, reference)
        row[f"kl_{bits}"], row[f"top1_{bits}"] = scored.kl_nats, scored.top1_agreement
        row[f"perplexity_{bits}"] = scored.perplexity
    between = scores(passage, runs[8], runs[16])
    row["kl_between"], row["top1_between"] = between.kl_nats, between.top1_agreement
    return row


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
    perplexity = summarize(passage, score_passage(passage, reference)[0]).perplexity
    print(
        f"{passage.num_scored} tokens; {options.reference} in float32: perplexity {perplexity:.4f}"
    )
    rows = [cost(checkpoint, passage, reference) for checkpoint in options.checkpoints]
    for row in rows:
        print(
            f"{row['checkpoint']:<28} KL to the plain model {row['kl_16']:.5f} -> {row['kl_8']:.5f}, "
            f"perplexity {row['perplexity_16']:.4f} -> {row['perplexity_8']:.4f}, "
            f"between the two: KL {row['kl_between']:.6f}, top-1 {row['top1_between']:.2%}"
        )
    if options.json:
        record = {"reference": reference.folder.name, "tokens": passage.num_scored, "rows": rows}
        options.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
