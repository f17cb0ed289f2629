"""A plain prompt enters few files, and none of what is not configured."""

from __future__ import annotations

import pytest

from tools.path_trace import DECODE, PREFILL, START, Entered, traced_paths

MOST_FILES = 40
OPTIONAL = {
    "eviction": ("engine/scheduling/kv_eviction.py", "engine/cache/compaction.py"),
    "LoRA": (
        "engine/model/layers/lora.py",
        "engine/execution/lora_manager.py",
        "engine/config/adapters.py",
    ),
    "swap": ("engine/scheduling/swap_space.py",),
    "state slots": ("engine/scheduling/state_pool.py", "engine/model/layers/state.py"),
    "images": ("engine/base/image_input.py", "engine/multimodal/"),
    "pooling": ("engine/execution/pooling.py",),
    "grammar": ("engine/sampling/grammar.py", "engine/sampling/structural_tag.py"),
    "speculation": (
        "engine/speculation/",
        "engine/execution/speculative_step.py",
        "engine/scheduling/draft_length.py",
    ),
}
"""Files, or folders, of what a plain prompt does not ask for."""


@pytest.fixture(scope="module")
def paths() -> dict[str, Entered]:
    return traced_paths()


def test_a_first_token_enters_few_files(paths: dict[str, Entered]) -> None:
    assert len(paths[PREFILL]) <= MOST_FILES
    assert len(paths[DECODE]) < len(paths[PREFILL]) < len(paths[START])
    assert "engine/execution/model_runner.py" in paths[DECODE], "the files are told by their place"


@pytest.mark.parametrize("path", [PREFILL, DECODE])
@pytest.mark.parametrize("part", OPTIONAL)
def test_what_is_not_configured_is_not_entered(
    paths: dict[str, Entered], path: str, part: str
) -> None:
    assert [file for file in paths[path] if file.startswith(OPTIONAL[part])] == []
