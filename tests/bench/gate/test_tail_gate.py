"""A model of which one position in a hundred is ruined, in the engine: the tail gate finds it."""

from __future__ import annotations

from dataclasses import asdict

import pytest
import torch
from llmopt.bench.gate.limits import GateOutcome, parse_gate
from llmopt.bench.gate.score_checks import check_quality
from llmopt.bench.quality.passage import read_passage
from llmopt.bench.quality.scoring import Scorer, score_passage
from llmopt.bench.quality.summary import summarize
from llmopt.bench.record.result import RunData
from llmopt.engine.config.config import EngineConfig
from llmopt.engine.core.engine import Engine
from llmopt.engine.execution.prompt_pass import PromptPass

GATE = parse_gate("kl<=0.05 top1>=0.97 perplexity<=+3% p999_kl<=0.2")


class Ruined:
    """An engine whose logits are flattened at every hundredth position."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._num_rows = 0

    def prompt_pass(self) -> PromptPass:
        prompts = self._engine.prompt_pass()
        original = prompts.logits

        def logits(hidden: torch.Tensor) -> torch.Tensor:
            whole = original(hidden).clone()
            numbers = torch.arange(self._num_rows, self._num_rows + len(whole))
            self._num_rows += len(whole)
            whole[numbers % 100 == 50] *= 0.4
            return whole

        prompts.logits = logits  # pyright: ignore[reportAttributeAccessIssue]
        return prompts


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine(EngineConfig("stories3M", dtype="float32", num_threads=1))


def scored(engine: Engine, model: Scorer) -> RunData:
    passage = read_passage(engine.tokenizer, max_model_len=engine.max_model_len, num_tokens=4096)
    series, _ = score_passage(passage, model, engine.prompt_pass)
    quality = asdict(summarize(passage, series, reference="plain"))
    return RunData({"llmopt": {"quality": quality}}, series=series)


@pytest.mark.whole
def test_one_ruined_position_in_a_hundred_breaks_the_tail_gate(engine: Engine) -> None:
    good, bad = scored(engine, engine.prompt_pass), scored(engine, Ruined(engine).prompt_pass)
    outcomes = [[check_quality(limit, good, run).outcome for limit in GATE] for run in (good, bad)]
    assert outcomes[0] == [GateOutcome.PASS] * 4
    assert outcomes[1] == [*[GateOutcome.PASS] * 3, GateOutcome.REGRESSION]
