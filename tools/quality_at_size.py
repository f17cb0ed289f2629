"""Quality scoring at real size: memory, speed and perplexity of a model against its reference.

    python tools/quality_at_size.py MODEL TEXT [--checkpoint FOLDER] [--tokens 100000]

Scores a quantized checkpoint (round-to-nearest int8 of MODEL unless one is given) beside MODEL with the
protocol of the GPTQ paper, and prints peak memory above the weights of both, the rate of scoring beside that
of prefill, and perplexity beside a transformers loop over the first windows. Exits with 1 if a limit is
broken.
"""

from __future__ import annotations

import argparse
import math
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from llmopt.bench.machine.environment import peak_memory_bytes, restart_peak_memory
from llmopt.bench.quality.passage import Passage
from llmopt.bench.quality.protocols import ProtocolOptions, read_passage
from llmopt.bench.quality.scoring import score_passage
from llmopt.bench.quality.summary import summarize
from llmopt.cli.output.console import TerminalProgress
from llmopt.engine.config.config import EngineConfig
from llmopt.engine.engine import Engine

MAX_BYTES_ABOVE_WEIGHTS = 1.5e9
MIN_SHARE_OF_PREFILL = 0.60
MAX_PERPLEXITY_ERROR = 1e-3
NUM_BLOCKS = 96  # of 32 tokens: a window of 2,048, and a step behind it


def quantized(model: Path, folder: Path) -> Path:
    """`model` as round-to-nearest int8, written below `folder`."""
    output = folder / f"{model.name}-rtn-int8"
    words = ["quantize", str(model), "--method", "rtn", "--bits", "8", "--output", str(output)]
    subprocess.run([sys.executable, "-m", "llmopt.cli.main", *words], check=True)
    return output


def engine(model: Path) -> Engine:
    return Engine(EngineConfig(model, num_blocks=NUM_BLOCKS, enable_prefix_caching=False))


def transformers_perplexity(model: Path, passage: Passage, num_windows: int) -> float:
    """Perplexity over the first windows by transformers, in float32."""
    from transformers import AutoModelForCausalLM

    oracle = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    total, count = 0.0, 0
    for window in passage.windows[:num_windows]:
        ids = torch.tensor([window.token_ids])
        with torch.inference_mode():
            total += float(oracle(ids, labels=ids).loss) * (len(window.token_ids) - 1)
        count += len(window.token_ids) - 1
    return math.exp(total / count)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("model", type=Path, help="folder of the plain model, the reference")
    parser.add_argument("text", type=Path, help="WikiText-2 test, or any text")
    parser.add_argument("--checkpoint", type=Path, help="a quantized checkpoint of it")
    parser.add_argument("--tokens", type=int, default=100_000)
    parser.add_argument("--check-windows", type=int, default=20, help="windows for transformers")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = given.checkpoint or quantized(given.model, Path(folder))
        model, reference = engine(checkpoint), engine(given.model)
        passage = read_passage(
            model.tokenizer,
            max_model_len=model.max_model_len,
            num_tokens=given.tokens,
            path=given.text,
            options=ProtocolOptions("gptq"),
        )
        weights = model.memory.weight_bytes + reference.memory.weight_bytes
        restart_peak_memory()
        series, speed = score_passage(passage, model, reference, progress=TerminalProgress())
        above = peak_memory_bytes() - weights
        quality = summarize(passage, series, reference=str(given.model))
    rates = speed.as_dict()
    share = rates["share_of_prefill_rate"] or 0.0
    print(
        f"{passage.num_scored:,} positions of {passage.source}, {passage.protocol}, {passage.settings}"
    )
    print(
        f"memory: {above / 1e9:.2f} GB above {weights / 1e9:.2f} GB of weights of both models "
        f"(limit {MAX_BYTES_ABOVE_WEIGHTS / 1e9:g} GB)"
    )
    print(
        f"speed: {rates['scored_tokens_per_second']:.0f} positions/s of both models; prefill alone "
        f"{rates['prefill_tokens_per_second']:.0f} and {rates['reference_prefill_tokens_per_second']:.0f} "
        f"tokens/s: {share:.1%} of the prefill rate (limit {MIN_SHARE_OF_PREFILL:.0%})"
    )
    print(
        f"perplexity {quality.perplexity:.4f}, reference {quality.reference_perplexity:.4f}, KL mean "
        f"{quality.kl_nats:.5f}, p99 {quality.p99_kl_nats:.5f}, p99.9 {quality.p999_kl_nats:.5f} nats, "
        f"top-1 {quality.top1_agreement:.2%}, rank moved {quality.rank_moved:.2%}"
    )
    windows = series.needed("window")
    ours_nll = series.needed("reference_nll")[windows < given.check_windows]
    ours = math.exp(ours_nll.mean(dtype="float64"))
    theirs = transformers_perplexity(given.model, passage, given.check_windows)
    error = abs(ours / theirs - 1)
    print(
        f"first {given.check_windows} windows: perplexity {ours:.5f}, transformers {theirs:.5f}: "
        f"{error:.5%} apart (limit {MAX_PERPLEXITY_ERROR:.1%})"
    )
    kept = (
        above <= MAX_BYTES_ABOVE_WEIGHTS
        and share >= MIN_SHARE_OF_PREFILL
        and error <= MAX_PERPLEXITY_ERROR
    )
    print("all limits are kept" if kept else "a limit is broken")
    return 0 if kept else 1


if __name__ == "__main__":
    raise SystemExit(main())
