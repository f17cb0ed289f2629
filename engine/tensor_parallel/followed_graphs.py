"""Graphs of a tensor-parallel rank other than 0: captured and replayed as rank 0 says."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ...quant.base.errors import first_line
from ..execution.graph_setting import GraphName, GraphSetting, Replay
from ..execution.step_graphs import StepGraphs
from ..execution.token_graphs import TokenGraphs
from ..model.parallel.group import Group, PeerLost


class GraphSizes(NamedTuple):
    """What the graphs of a model need beside its shard and the cache, as `StepGraphs` and `TokenGraphs` take
    it; the same on every rank."""

    sizes: tuple[int, ...]
    token_sizes: tuple[int, ...]
    max_blocks: int


class FollowedGraphs:
    """The graphs of one rank, on its own shard and cache."""

    def __init__(self, setting: GraphSetting, sizes: GraphSizes, group: Group) -> None:
        self._model, self._broadcast = setting.model, group.broadcast
        self._graphs: dict[str, StepGraphs | TokenGraphs] = {
            "decode": StepGraphs(setting, sizes.sizes),
            "tokens": TokenGraphs(setting, sizes.token_sizes),
        }

    @torch.inference_mode()
    def capture(self, name: GraphName) -> str | None:
        """Capture a graph; returns why it failed, or None."""
        try:
            self._graphs[name.kind].capture_padding(name.key)
        except PeerLost:
            raise
        except Exception as error:  # rank 0 tells of it, and all ranks go on without the graph
            return f"{type(error).__name__}: {first_line(error)}"
        return None

    @torch.inference_mode()
    def replay(self, step: Replay) -> None:
        """Replay a graph on the inputs of rank 0."""
        graphs, key = self._graphs[step.name.kind], step.name.key
        graphs.static(key).share(step.news, self._broadcast)
        graph = graphs.captured(key)
        assert graph is not None, "rank 0 replays what every rank has captured"
        hidden = graph.replay()
        if step.num_logits:
            self._model.logits(hidden[: step.num_logits])

    def give_up(self, kind: str) -> None:
        """Drop the graphs of a kind."""
        self._graphs[kind].give_up()


def warm_up(group: Group, sizes: GraphSizes, width: int | None, dtype: torch.dtype) -> None:
    """All-reduce as many numbers as captured steps will: NCCL connects an algorithm when it is first used,
    which no capture may do. Every rank calls it."""
    rows = sorted({*sizes.sizes, *sizes.token_sizes})
    for count in rows:  # the sums of squares of a `ShardedNorm`
        group.all_reduce(torch.zeros(count, 1, dtype=torch.float32, device=group.device))
    for count in sorted({1, *(size * (width or 1) for size in rows)}):
        group.all_reduce(torch.zeros(count, dtype=dtype, device=group.device))
