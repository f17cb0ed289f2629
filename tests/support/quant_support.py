"""What the tests of this folder share besides fixtures."""

from __future__ import annotations

import os

from llmopt.recipes import MODELS

STORIES = MODELS / "stories3M"
TINY = MODELS / "stories260K"
SAMPLES, LENGTH = 24, 128  # small enough to be quick, large enough that AWQ finds better scales

# For tests that look at files, not at errors: a run through the pipeline as quick as may be.
QUICK: dict[str, object] = {"num_samples": 2, "seq_len": 32, "held_out": 0}


def llmopt_environment() -> dict[str, str]:
    """One thread, as `quantized` uses, so that bytes can be compared; no network."""
    return os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "COLUMNS": "120"}
