"""Chains of an EAGLE head, replayed from graphs: the draft tokens of eager chains."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from llmopt.engine import LLM, SamplingParams
from llmopt.engine.config.config import SpeculationConfig
from llmopt.engine.execution.decode_graphs import StepGraphs
from llmopt.engine.execution.token_graphs import replay_drafts
from llmopt.engine.kernels.attention.dispatch import native_attention
from llmopt.engine.speculation.proposer import DraftTokens

from ...support.heads_world import write_eagle, write_eagle3

pytestmark = pytest.mark.skipif(native_attention().reason is not None, reason="nothing to capture")
PROMPTS = [[1, 403, 407, 403], [1, 9, 8], [1, 5, 12, 19, 26]]


def served(folder: Path, captured: bool) -> tuple[list[dict[str, Any]], list[Any]]:
    """The draft tokens of each step, and the tokens of the requests, one of which is sampled."""
    speculation = SpeculationConfig("eagle", folder, tree_width=1)
    options: dict[str, Any] = {"dtype": "float32", "max_model_len": 48, "num_blocks": 24}
    llm = LLM(
        "stories3M", device="cpu", seed=0, enforce_eager=True, speculation=speculation, **options
    )
    runner: Any = llm.engine.runner
    proposer = runner._proposer
    if captured:  # which the engine does on a GPU alone
        replay_drafts(proposer, runner._graphs._setting, (1, 2, 4), ())
        proposer.capture_all()
    drafted: list[dict[str, Any]] = []
    propose: Callable[..., Mapping[str, DraftTokens]] = proposer.propose

    def watched(rows: Any, draw: Any) -> Mapping[str, DraftTokens]:
        found = propose(rows, draw)
        drafted.append({name: tokens.token_ids for name, tokens in found.items()})
        return found

    proposer.propose = watched
    params = [
        SamplingParams(temperature=heat, max_tokens=count, ignore_eos=True, seed=3)
        for heat, count in ((0.9, 5), (0.0, 9), (0.0, 7))
    ]
    return drafted, [result.token_ids for result in llm.generate(PROMPTS, params)]


@pytest.mark.parametrize("write", [write_eagle, write_eagle3])
def test_replayed_chains_have_the_draft_tokens_of_eager_ones(
    write: Callable[[Path], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, sizes = write(tmp_path), set[int]()
    expected = served(folder, captured=False)
    replayed = StepGraphs.captured

    def watched(self: Any, kind: Any) -> Any:
        sizes.add(kind.size)
        return replayed(self, kind)

    monkeypatch.setattr(StepGraphs, "captured", watched)
    assert served(folder, captured=True) == expected
    assert sizes == {1, 2, 4}
