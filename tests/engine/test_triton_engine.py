"""The whole engine on Triton's kernels gives the tokens of the torch path."""

from __future__ import annotations

from typing import Any

import pytest
from llmopt.engine import LLM, SamplingParams
from llmopt.engine.kernels.triton.runtime import VARIABLE
from triton_world import DEVICE

PROMPTS = [[1, 403, 407], [1] + [5 + 7 * i for i in range(11)]]


def tokens(**options: Any) -> list[tuple[int, ...]]:
    built = LLM("stories260K", device=DEVICE, dtype="float32", **options)
    params = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
    return [tuple(result.token_ids) for result in built.generate(PROMPTS, params)]


@pytest.mark.parametrize(
    "options", [{}, {"kv_cache_dtype": "int8", "prefill_chunk_size": 9, "block_size": 16}], ids=str
)
def test_greedy_tokens(monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]) -> None:
    monkeypatch.setenv(VARIABLE, "off")
    expected = tokens(**options)
    monkeypatch.setenv(VARIABLE, "interpret" if DEVICE == "cpu" else "auto")
    assert tokens(**options) == expected
