"""Quality scoring at real size: memory, speed and perplexity of a model against its reference.

    python tools/quality_at_size.py MODEL TEXT [--checkpoint FOLDER] [--tokens 100000] [--window 512]

Scores a quantized checkpoint (round-to-nearest int8 of MODEL unless one is given) beside MODEL with the
protocol of the GPTQ paper, and prints peak memory above the weights of both, the rate of scoring beside that
of prefill, and MODEL's perplexity in float32 beside a transformers loop over the first windows. The window is
that of the prefill, 512, because attention over more tokens is slower in both. Exits with 1 if a limit is
broken.
"""

from __future__ import annotations

import argparse
import math
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import torch
from llmopt.bench.machine.environment import peak_memory_bytes, restart_peak_memory
from llmopt.bench.quality.passage import Passage, ProtocolOptions, read_passage
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


def engine(model: Path, dtype: str = "auto") -> Engine:
    return Engine(EngineConfig(model, num_blocks=NUM_BLOCKS, dtype=dtype))


def transformers_perplexity(model: Path, passage: Passage) -> float:
    """Perplexity by transformers, in float32."""
    from transformers import AutoModelForCausalLM

    oracle = AutoModelForCausalLM.from_pretrained(
        model, dtype=torch.float32, trust_remote_code=False
    ).eval()
    total, count = 0.0, 0
    for window in passage.windows:
        ids = torch.tensor([window.token_ids])
        with torch.inference_mode():
            total += float(oracle(ids, labels=ids).loss) * (len(window.token_ids) - 1)
        count += len(window.token_ids) - 1
    return math.exp(total / count)


def perplexity_error(model: Path, passage: Passage) -> float:
    """How far the engine's perplexity is from that of transformers, both in float32; prints both."""
    ours = summarize(passage, score_passage(passage, engine(model, "float32"))[0]).perplexity
    theirs = transformers_perplexity(model, passage)
    error = abs(ours / theirs - 1)
    print(
        f"first {len(passage.windows)} windows in float32: perplexity {ours:.5f}, transformers "
        f"{theirs:.5f}: {error:.5%} apart (limit {MAX_PERPLEXITY_ERROR:.1%})"
    )
    return error


def score(checkpoint: Path, given: argparse.Namespace) -> tuple[Passage, int, float]:
    """Score the checkpoint beside the model; prints and returns (passage, bytes above weights, share of
    the prefill rate)."""
    model, reference = engine(checkpoint), engine(given.model)
    passage = read_passage(
        model.tokenizer,
        max_model_len=model.max_model_len,
        num_tokens=given.tokens,
        path=given.text,
        options=ProtocolOptions("gptq", given.window),
    )
    weights = model.memory.weight_bytes + reference.memory.weight_bytes
    restart_peak_memory()
    series, speed = score_passage(passage, model, reference, progress=TerminalProgress())
    above = peak_memory_bytes() - weights
    quality = summarize(passage, series, reference=str(given.model))
    rates = speed.as_dict()
    share = rates["share_of_prefill_rate"] or 0.0
    print(
        f"{passage.num_scored:,} positions of {passage.source}, {passage.description}, {model.dtype}"
    )
    print(
        f"memory: {above / 1e9:.2f} GB above {weights / 1e9:.2f} GB of weights of both models "
        f"(limit {MAX_BYTES_ABOVE_WEIGHTS / 1e9:g} GB)"
    )
    print(
        f"speed: {rates['scored_tokens_per_second']:.0f} positions/s by both models; prefill alone "
        f"{rates['prefill_tokens_per_second']:.0f} and {rates['reference_prefill_tokens_per_second']:.0f} "
        f"tokens/s: {share:.1%} of the prefill rate (limit {given.min_share:.0%})"
    )
    print(
        f"perplexity {quality.perplexity:.4f}, reference {quality.reference_perplexity:.4f}, KL mean "
        f"{quality.kl_nats:.5f}, p99 {quality.p99_kl_nats:.5f}, p99.9 {quality.p999_kl_nats:.5f} nats, "
        f"top-1 {quality.top1_agreement:.2%}, rank moved {quality.rank_moved:.2%}"
    )
    return passage, above, share


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("model", type=Path, help="folder of the plain model, the reference")
    parser.add_argument("text", type=Path, help="WikiText-2 test, or any text")
    parser.add_argument("--checkpoint", type=Path, help="a quantized checkpoint of it")
    parser.add_argument("--tokens", type=int, default=100_000)
    parser.add_argument("--window", type=int, default=512)
    parser.add_argument("--check-windows", type=int, default=20, help="windows for transformers")
    parser.add_argument("--min-share", type=float, default=MIN_SHARE_OF_PREFILL)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = given.checkpoint or quantized(given.model, Path(folder))
        passage, above, share = score(checkpoint, given)
    first = replace(passage, windows=passage.windows[: given.check_windows])
    error = perplexity_error(given.model, first)
    kept = (
        above <= MAX_BYTES_ABOVE_WEIGHTS
        and share >= given.min_share
        and error <= MAX_PERPLEXITY_ERROR
    )
    print("all limits are kept" if kept else "a limit is broken")
    return 0 if kept else 1


if __name__ == "__main__":
    raise SystemExit(main())
