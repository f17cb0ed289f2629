"""Quality of the real model at size: memory bound, and perplexity as transformers computes it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).parents[2] / "tools" / "quality_at_size.py"


def test_wikitext_in_bounded_memory(real_model: Path) -> None:
    text = os.environ.get("LLMOPT_WIKITEXT")
    if not text:
        pytest.skip("needs WikiText-2: name wiki.test.raw in LLMOPT_WIKITEXT")
    # The share of the prefill rate is printed, not judged: a test asserts no time.
    words = ["--tokens", "8192", "--check-windows", "4", "--min-share", "0"]
    done = subprocess.run(
        [sys.executable, str(TOOL), str(real_model), text, *words],
        capture_output=True,
        text=True,
        check=False,
    )
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    assert "all limits are kept" in done.stdout
