"""Quality of SmolLM2-135M-Instruct behind its own server: equal to that in process, position by position."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import typer
from llmopt.cli.bench import bench
from llmopt.cli.main import run_guarded

LOAD = [
    "--num-prompts", "2", "--output-len", "4", "--num-runs", "1", "--num-warmups", "0",
    "--no-check-client",
]  # fmt: skip
QUALITY = ["--quality-protocol", "gptq", "--quality-window", "512", "--quality-tokens", "2048"]


def measured(folder: Path, *words: str | Path) -> tuple[dict[str, Any], np.ndarray]:
    """Quality and NLL per position of a benchmark into `folder`."""
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(bench)
    given = [str(word) for word in (*words, *LOAD, *QUALITY, "--output", folder)]
    assert run_guarded(lambda: app(given, standalone_mode=False), debug=False) == 0
    quality = json.loads((folder / "result.json").read_text())["llmopt"]["quality"]
    return quality, pq.read_table(folder / "quality.parquet")["nll"].to_numpy()


def test_perplexity_over_http_equals_that_in_process(real_model: Path, tmp_path: Path) -> None:
    mine, nll = measured(tmp_path / "in-process", real_model, "--dtype", "float32")
    theirs, served_nll = measured(
        tmp_path / "served", real_model, "--serve", "llmopt", "--serve-args", "--dtype float32"
    )
    difference = theirs["perplexity"] / mine["perplexity"] - 1
    print(
        f"\nperplexity in process {mine['perplexity']:.6f}, over HTTP {theirs['perplexity']:.6f} "
        f"({difference:+.2e} relative) on {mine['num_tokens']:,} tokens; largest difference of a "
        f"position's NLL {np.abs(nll - served_nll).max():.1e} nats"
    )
    assert mine["token_sha256"] == theirs["token_sha256"] and mine["num_tokens"] > 2000
    assert abs(difference) < 1e-4
    assert theirs["served"]["scored_by"] == "prompt_logprobs"
