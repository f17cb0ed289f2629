"""SmolLM2-135M-Instruct through every method: quantized, verified, and benchmarked beside the plain model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from llmopt.quant.methods.registry import METHODS

from tests.support.cli_process import run_llmopt

CALIBRATION = ("--num-samples", "16", "--seq-len", "256")
# AutoRound's 200 steps for each of 30 layers take an hour on two cores.
FEWER = {"autoround": ("--iters", "10", "--batch-size", "4")}
SHORT = ("--num-prompts", "4", "--num-runs", "1", "--output-len", "8", "--quality-tokens", "1024")
# Of 4 bits at most, in nats: nothing that works comes near it, and noise is far beyond.
WORST_KL = 2.0


def words_of(method: str) -> tuple[str, ...]:
    return *CALIBRATION, *FEWER.get(method, ())


@pytest.mark.timeout(900)
@pytest.mark.parametrize("method", sorted(METHODS))
def test_a_method_is_verified_and_benchmarked(
    method: str, real_model: Path, tmp_path: Path
) -> None:
    checkpoint, run = tmp_path / "checkpoint", tmp_path / "run"
    for words in (
        ("quantize", str(real_model), "--method", method, *words_of(method), "-o", str(checkpoint)),
        ("verify", str(checkpoint)),
        ("bench", str(checkpoint), "--reference", str(real_model), *SHORT, "-o", str(run)),
    ):
        done = run_llmopt(*words)
        assert done.returncode == 0, done.stderr
    result = json.loads((run / "result.json").read_text(encoding="utf-8"))
    kl = result["llmopt"]["quality"]["kl_nats"]
    print(f"{method}: KL {kl:.4f} nats, {result['median_tpot_ms']:.1f} ms a token")
    assert 0 < kl < WORST_KL
