"""Medusa heads: head k predicts the token k + 2 positions ahead (Cai et al., "Medusa", arXiv:2401.10774)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch
from torch.nn import functional

from ...quant.base.errors import BadInput
from ..base.device import packed
from ..cache.kv_cache import KvCache
from ..model.decoder.reader import CheckpointReader
from ..model.layers.projection import Projection, Weights
from ..model.layers.spec import KvLayout, LoadingOptions
from ..sampling.sampler import Sampler
from ..scheduling.step_plan import ScheduledRow
from .head_loader import HeadsCheckpoint
from .proposer import (
    DraftTokens,
    SamplingRowOf,
    TargetStates,
    TreeExpansion,
    coupled_chains,
    expand_trees,
)


@dataclass(frozen=True, slots=True)
class _Names:
    """Module names of a head: `block` by head and block index, `output` by head and number of blocks."""

    block: str
    output: str


_LAYOUTS = (
    _Names("{head}.{block}.linear", "{head}.{blocks}"),  # as Medusa's authors publish heads
    _Names("blocks.{head}.layers.{block}", "lm_heads.{head}"),  # as vLLM's converter writes them
)


@dataclass(frozen=True, slots=True)
class MedusaHead(Weights):
    """Residual blocks `x + silu(linear x)`, and a projection onto the vocabulary."""

    blocks: Sequence[Projection]
    output: Projection

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits, float32 [rows, vocab], of final hidden states [rows, hidden]."""
        for block in self.blocks:
            hidden = hidden + functional.silu(block(hidden))
        return self.output(hidden).float()


@dataclass(frozen=True, slots=True)
class MedusaHeads:
    """Head k, from 0 on, predicts the token k + 2 positions after the one whose hidden state it reads."""

    heads: Sequence[MedusaHead]

    kv_layouts: tuple[KvLayout, ...] = ()

    @property
    def bytes_held(self) -> int:
        """Bytes of weights."""
        return sum(head.weight_bytes for head in self.heads)

    @property
    def bytes_per_position(self) -> int:
        """Bytes of weights read per draft position."""
        return self.heads[0].weight_bytes


def load_medusa(
    checkpoint: HeadsCheckpoint, hidden_size: int, vocab_size: int, loading: LoadingOptions
) -> MedusaHeads:
    """Load Medusa heads for a model of this hidden size and vocabulary.

    The numbers of heads and blocks are taken from the file's tensors: published configs may lack them.

    Raises:
        BadInput: no heads, heads of another size, or tensors that belong to no head.
    """
    names = next((n for n in _LAYOUTS if _module(n.block, 0, 0) in checkpoint), None)
    if names is None:
        raise BadInput(
            f"{checkpoint.folder}: no Medusa heads: the file has neither "
            + " nor ".join(_module(n.block, 0, 0) for n in _LAYOUTS)
        )
    num_blocks = next(i for i in count() if _module(names.block, 0, i) not in checkpoint)
    num_heads = next(i for i in count() if _module(names.block, i, 0) not in checkpoint)
    head_size = checkpoint.shape(_module(names.block, 0, 0))[-1]
    if head_size != hidden_size:
        raise BadInput(
            f"{checkpoint.folder}: heads for a hidden size of {head_size}; the model's is {hidden_size}"
        )
    output = f"{names.output.format(head=0, blocks=num_blocks)}.weight"
    if output in checkpoint and checkpoint.shape(output)[0] != vocab_size:
        raise BadInput(
            f"{checkpoint.folder}: heads for {checkpoint.shape(output)[0]} tokens; the model has "
            f"{vocab_size}"
        )
    reader = CheckpointReader(checkpoint, loading)
    heads = []
    for head in range(num_heads):
        modules = [names.block.format(head=head, block=i) for i in range(num_blocks)]
        blocks = [
            reader.projection([m], hidden_size, [hidden_size], bias=f"{m}.bias" in checkpoint)
            for m in modules
        ]
        top = names.output.format(head=head, blocks=num_blocks)
        heads.append(
            MedusaHead(blocks, reader.projection([top], hidden_size, [vocab_size], bias=False))
        )
    reader.finish(lambda name: False)
    return MedusaHeads(heads)


def _module(pattern: str, head: int, block: int) -> str:
    return f"{pattern.format(head=head, block=block)}.weight"


class MedusaProposer:
    """Medusa proposer: the heads read the final hidden state that the last known token was sampled from."""

    aux_hidden_state_layers: tuple[int, ...] = ()
    caches: tuple[KvCache, ...] = ()

    def __init__(self, heads: MedusaHeads, width: int) -> None:
        self._heads = heads.heads
        self._width = width
        self._sampler = Sampler()
        self._hidden: dict[tuple[str, int], torch.Tensor] = {}
        self.bytes_held = heads.bytes_held

    def observe(self, steps: Sequence[TargetStates]) -> None:
        self._hidden = {step.place: step.hidden[-1] for step in steps}

    def propose(
        self, rows: Sequence[ScheduledRow], draw: SamplingRowOf
    ) -> Mapping[str, DraftTokens]:
        known = [
            row
            for row in rows
            if row.num_draft_tokens and (row.sequence_id, row.end - 1) in self._hidden
        ]
        if self._width == 1:
            return self._chains(known, draw)
        expansions = [TreeExpansion(row, self._width) for row in known]

        def logits(active: Sequence[TreeExpansion]) -> torch.Tensor:
            hidden = self._last_hidden([tree.row for tree in active])
            by_row = self._heads[active[0].level](hidden)
            of_nodes = [index for index, tree in enumerate(active) for _ in tree.frontier]
            return by_row.index_select(0, packed([of_nodes], by_row.device)[0])

        return expand_trees(expansions, self._sampler, draw, logits)

    def _chains(
        self, rows: Sequence[ScheduledRow], draw: SamplingRowOf
    ) -> Mapping[str, DraftTokens]:
        if not rows:
            return {}

        def follow(
            rows: Sequence[ScheduledRow], chains: Sequence[list[int]], *_: Any
        ) -> torch.Tensor:
            return self._heads[len(chains[0])](self._last_hidden(rows))

        first = self._heads[0](self._last_hidden(rows))
        return coupled_chains(rows, first, self._sampler, draw, follow)

    def _last_hidden(self, rows: Sequence[ScheduledRow]) -> torch.Tensor:
        return torch.stack([self._hidden[row.sequence_id, row.end - 1] for row in rows])
