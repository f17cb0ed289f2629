"""A plain prompt enters few files, and none of what is not configured."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tools.path_trace import DECODE, PREFILL, START

ROOT = Path(__file__).resolve().parents[2]
Paths = dict[str, list[str]]

MOST_FILES = 40
OPTIONAL = {
    "eviction": ("engine/scheduling/kv_eviction.py", "engine/cache/compaction.py"),
    "LoRA": (
        "engine/model/layers/lora.py",
        "engine/execution/lora_manager.py",
        "engine/config/adapters.py",
    ),
    "swap": ("engine/scheduling/extensions.py",),
    "state slots": ("engine/scheduling/state_pool.py", "engine/model/layers/state.py"),
    "images": ("engine/base/image_input.py", "engine/multimodal/"),
    "pooling": ("engine/execution/pooling.py",),
    "grammar": (
        "engine/sampling/grammar.py",
        "engine/sampling/schema_limits.py",
        "engine/sampling/structural_tag.py",
    ),
    "speculation": (
        "engine/speculation/",
        "engine/execution/speculative_step.py",
        "engine/scheduling/draft_length.py",
    ),
}
"""Files, or folders, of what a plain prompt does not ask for."""


@pytest.fixture(scope="module")
def paths() -> Paths:
    """Traced in a process of its own: other tests warm caches, and leave threads that enter files too."""
    command = [sys.executable, "-m", "tools.path_trace"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return json.loads(run.stdout)


def test_a_first_token_enters_few_files(paths: Paths) -> None:
    assert len(paths[PREFILL]) <= MOST_FILES
    assert len(paths[DECODE]) < len(paths[PREFILL]) < len(paths[START])
    assert "engine/execution/model_runner.py" in paths[DECODE], "the files are told by their place"


@pytest.mark.parametrize("path", [PREFILL, DECODE])
@pytest.mark.parametrize("part", OPTIONAL)
def test_what_is_not_configured_is_not_entered(paths: Paths, path: str, part: str) -> None:
    assert [file for file in paths[path] if file.startswith(OPTIONAL[part])] == []
