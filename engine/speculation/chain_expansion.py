"""Draft-chain expansion: a draft token for each row a level, which stay on the device until the last."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ..base.transfer import HostCopy, packed
from ..sampling.sampler import Sampler
from ..scheduling.step_plan import ScheduledRow
from ..scheduling.tree import Tree
from .proposer import DraftTokens, SamplingRowOf

Choose = Callable[[Sequence[ScheduledRow], Sequence[list[int]], torch.Tensor], torch.Tensor]
"""From rows, their draft tokens so far and float32 logits [rows, vocab] to the next tokens, int64 [rows]."""

Follow = Callable[
    [Sequence[ScheduledRow], Sequence[list[int]], torch.Tensor, torch.Tensor | None], torch.Tensor
]
"""From rows, their draft tokens, the last of these on the device, and which of the rows of the level before
go on, int64 [rows] (None: all), to the logits after them."""


def draft_chains(
    rows: Sequence[ScheduledRow], logits: torch.Tensor, choose: Choose, follow: Follow
) -> dict[str, list[int]]:
    """`num_draft_tokens` draft tokens of each row, by sequence id; `logits` are those of the first.

    The host waits once, after the last of them, unless a row's sampling depends on their values (penalties,
    token masks); until then 0 stands for a token on the host.
    """
    chains: dict[str, list[int]] = {row.sequence_id: [] for row in rows}
    going, waits = list(rows), list[Callable[[], None]]()
    while True:
        drafted = [chains[row.sequence_id] for row in going]
        tokens = choose(going, drafted, logits)
        wait = _append(drafted, tokens)
        if any(row.params.reads_tokens for row in going):
            wait()  # the next draft token depends on the values of these
        else:
            waits.append(wait)
        places = [
            place
            for place, (row, chain) in enumerate(zip(going, drafted, strict=True))
            if len(chain) < row.num_draft_tokens
        ]
        if not places:
            break
        kept = None
        if len(places) < len(going):
            (kept,) = packed([places], tokens.device)
            tokens = tokens.index_select(0, kept)
            going = [going[place] for place in places]
        logits = follow(going, [chains[row.sequence_id] for row in going], tokens, kept)
    for wait in waits:
        wait()
    return chains


def _append(chains: Sequence[list[int]], tokens: torch.Tensor) -> Callable[[], None]:
    """Append a token to each chain, 0 until the returned function has waited for it."""
    on_host = HostCopy(tokens)
    places = [len(chain) for chain in chains]
    for chain in chains:
        chain.append(0)

    def wait() -> None:
        for chain, place, token in zip(chains, places, on_host.wait().tolist(), strict=True):
            chain[place] = token

    return wait


def coupled_chains(
    rows: Sequence[ScheduledRow],
    logits: torch.Tensor,
    sampler: Sampler,
    draw: SamplingRowOf,
    follow: Follow,
) -> dict[str, DraftTokens]:
    """`draft_chains`, sampled with the noise that the target's tokens will be sampled with."""

    def choose(
        rows: Sequence[ScheduledRow], chains: Sequence[list[int]], logits: torch.Tensor
    ) -> torch.Tensor:
        sampling = [draw(row, chain) for row, chain in zip(rows, chains, strict=True)]
        return sampler.begin(logits, sampling).tokens

    drafts = draft_chains(rows, logits, choose, follow)
    return {
        name: DraftTokens(tuple(tokens), Tree.chain(len(tokens))) for name, tokens in drafts.items()
    }
