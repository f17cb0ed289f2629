"""Steps of several tokens a sequence, replayed on static inputs, give the tokens of eager ones."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from llmopt.engine import LLM, SamplingParams
from llmopt.engine.cache.step_inputs import Run
from llmopt.engine.config.config import SpeculationConfig
from llmopt.engine.core import build
from llmopt.engine.execution import token_graphs
from llmopt.engine.execution.graph_setting import GraphSetting
from llmopt.engine.kernels.common.devices import VARIABLE

from ...support.model_families import save_model
from ...support.triton_world import DEVICE

pytestmark = pytest.mark.skipif(DEVICE != "cpu", reason="tests/gpu captures on a GPU")
# Interpreted programs take milliseconds each: as few as show every kernel.
NARROW = {
    "hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1,
    "num_hidden_layers": 1,
}  # fmt: skip
PROMPTS = [[1, 403, 407, 403, 407, 403], [1] + [5 + 7 * i for i in range(11)]]


def tokens(model: Path, **options: Any) -> list[tuple[int, ...]]:
    built = LLM(model, device="cpu", dtype="float32", max_model_len=48, num_blocks=30, **options)
    params = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
    return [tuple(result.token_ids) for result in built.generate(PROMPTS, params)]


@pytest.mark.sweep(1)
@pytest.mark.parametrize(
    "options",
    [
        {"speculation": "draft"},
        {"async_scheduling": True, "prefill_chunk_size": 10, "max_num_batched_tokens": 13},
    ],
    ids=["drafts and verification", "mixed steps"],
)
def test_replayed_steps_change_no_token(
    options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_model(tmp_path, "LlamaConfig", NARROW)
    options = {"block_size": 4, "max_num_seqs": 2, "max_num_batched_tokens": 24, **options}
    if "speculation" in options:
        # The model itself, whose tokens are all accepted.
        options["speculation"] = SpeculationConfig("draft", tmp_path, num_tokens=2)
    monkeypatch.setenv(VARIABLE, "interpret")
    expected = tokens(tmp_path, enforce_eager=True, **options)
    sizes: list[int] = []
    prepare = token_graphs.TokenGraphs.prepare

    def watched(self: Any, runs: Any, *rest: Any) -> Any:
        forward = prepare(self, runs, *rest)
        if forward is not None:
            sizes.append(sum(len(run.token_ids) for run in runs))
        return forward

    monkeypatch.setattr(token_graphs.TokenGraphs, "prepare", watched)
    monkeypatch.setattr(build, "token_graph_sizes", lambda device, most: (16, 32))
    assert tokens(tmp_path, **options) == expected
    assert any(size < 16 for size in sizes)
    assert len(sizes) > 1, "the steps went past the graphs"


def test_a_later_capture_that_fails_leaves_every_step_eager(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def refuse(_: Any) -> Any:
        raise MemoryError("no memory for this graph")

    model: Any = SimpleNamespace(captures_any_step=True)
    setting = GraphSetting(model, (), 4, 3, torch.device("cpu"), torch.float32, refuse)
    graphs = token_graphs.TokenGraphs(setting, (16,))
    for _ in range(2):
        assert graphs.prepare([Run(0, [5, 6, 7], [1])]) is None
    (line,) = [record.getMessage() for record in caplog.records]
    assert "steps of several tokens run without graphs" in line and "no memory" in line
