"""Two ranks on pretended cards: captured steps without a fault, and the same collectives in the same order."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from llmopt.engine.base.sampling_params import SamplingParams
from llmopt.engine.config.config import SpeculationConfig
from llmopt.engine.execution.token_graphs import TOKEN_SIZES

from ...support.model_families import FAMILIES, save_model
from ...support.pretended_cuda.card import Card
from ...support.pretended_cuda.ranks import Collectives, Wire, follow, workers_apart
from ...support.pretended_cuda.runtime import pretended_cuda
from ...support.pretended_cuda.world import GREEDY, SAMPLED, engine_on

FEW: dict[str, Any] = {"num_blocks": 24, "block_size": 16, "tensor_parallel_size": 2}
GRAPHS = 2 + len(TOKEN_SIZES)
MODES: dict[str, dict[str, Any]] = {
    "async": {"async_scheduling": True},
    "profiled": {"num_blocks": None},
    "draft tokens of an n-gram": {"speculation": SpeculationConfig("ngram", ngram_min=1)},
    "eager": {"enforce_eager": True},
}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    save_model(folder, *FAMILIES["llama-3.1"])
    return folder


def served(
    folder: Path, replies: tuple[str | None, ...] = (), **options: Any
) -> tuple[Card, Card, Wire, int]:
    """Rank 0's card and rank 1's after they served the same, the messages, and how many came before requests."""
    card, other = Card(count=2), Card(count=2)
    params: tuple[SamplingParams, ...] = (SAMPLED, GREEDY)
    with (
        workers_apart(card, replies) as (wire, ours),
        engine_on(card, folder, **{**FEW, **options}) as engine,
    ):
        begun = len(wire.sent)
        with card.during("step"):
            for index, each in enumerate(params):
                engine.add_request(str(index), list(range(1, 8 + index)), each)
                engine.step()
            while engine.has_unfinished():
                engine.step()
        # While the folder of the meeting point is there.
        with pretended_cuda(other):
            theirs = follow(other, wire.sent)
    both = [[*side.done] for side in (ours, theirs)]
    if card.captures != other.captures:  # what a graph that is dropped holds is never run
        both = [[each for each in done if not each[2]] for done in both]
    assert both[0] == both[1], "ranks that would wait for each other"
    return card, other, wire, begun


@pytest.mark.sweep(2)
@pytest.mark.parametrize("mode", MODES)
def test_both_ranks_replay_without_a_fault(mode: str, llama: Path) -> None:
    card, other, wire, begun = served(llama, **MODES[mode])
    assert card.faults() == other.faults() == []
    graphs = {"eager": 0, "profiled": 2 * GRAPHS + 2}.get(mode, GRAPHS)
    assert card.captures == other.captures == graphs
    replays = [sum(entry.kind == "replay" for entry in each.log) for each in (card, other)]
    assert replays[0] == replays[1] and bool(replays[0]) == bool(graphs)
    if mode == "eager":
        return
    captured = card.launches("load", captured=True)
    layers = 3
    assert captured["nccl all-reduce"] == 2 * layers * graphs
    steps = [content for content in wire.sent[begun:] if b"replay" in content]
    assert steps and max(map(len, steps)) < 400
    # Eager steps and rows of logits are broadcast between the cards: no message holds their values.
    assert max(map(len, wire.sent[begun:])) < 8000


def test_norms_of_sharded_heads_are_captured(tmp_path: Path) -> None:
    """Each is an all-reduce of one float32 a row, of which no projection has as few."""
    save_model(tmp_path, *FAMILIES["olmo-2"])
    card, other, _, _ = served(tmp_path)
    assert card.faults() == other.faults() == []
    assert card.captures == other.captures == GRAPHS


@pytest.mark.sweep(1)
@pytest.mark.parametrize("family", ["gpt-oss", "qwen3-moe"])
def test_the_experts_of_each_rank_are_captured(family: str, tmp_path: Path) -> None:
    """Where a rank's rows lie is found on the device: nothing waits for how many tokens an expert has."""
    save_model(tmp_path, *FAMILIES[family])
    card, other, _, _ = served(tmp_path)
    assert card.faults() == other.faults() == []
    assert card.captures == other.captures == GRAPHS
    assert "_weighted_sum" in card.launches("load", captured=True)


def test_a_capture_refused_by_rank_1_leaves_both_eager_and_in_step(
    llama: Path, caplog: pytest.LogCaptureFixture
) -> None:
    card, other, _, _ = served(llama, (None, "OutOfMemoryError: full"))
    assert "CaptureFailed: worker 1: OutOfMemoryError: full" in caplog.text
    assert card.captures == 2
    assert not any(entry.kind == "replay" for each in (card, other) for entry in each.log)


def test_memory_that_does_not_suffice_for_a_captured_collective_ends_no_engine(
    llama: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    add, count = Collectives._add, [0]

    def failing(self: Collectives, *given: Any) -> None:
        add(self, *given)
        captured = self.card.capturing and self.card.current == 0
        count[0] += captured
        if captured and count[0] == 6:  # the last of a step of three layers
            raise torch.OutOfMemoryError("full")

    monkeypatch.setattr(Collectives, "_add", failing)
    card, other, _, _ = served(llama)
    assert "decode steps run without graphs, as capturing them failed: OutOfMemoryError: full" in (
        caplog.text
    )
    assert not any(entry.kind == "replay" for each in (card, other) for entry in each.log)


def test_a_capture_refused_by_rank_0_leaves_both_eager_and_in_step(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It fails in its warm-up, half-way through the layers: rank 1 waits for none of its all-reduces."""
    from llmopt.engine.model.layers.parallel import Group

    reduce, count = Group.all_reduce, [0]

    def failing(self: Group, part: torch.Tensor) -> torch.Tensor:
        if self._silent and self.rank == 0:
            count[0] += 1
            if count[0] == 3:
                raise torch.OutOfMemoryError("full")
        return reduce(self, part)

    monkeypatch.setattr(Group, "all_reduce", failing)
    card, other, _, _ = served(llama)
    assert (card.captures, other.captures) == (0, 1)
    assert not any(entry.kind == "replay" for each in (card, other) for entry in each.log)
