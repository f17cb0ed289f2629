"""The tensors of a step, from runs of tokens and the blocks of their sequences."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from ..base.transfer import packed
from ..kernels.attention.paged_attention import AttentionBatch, DecodeGroup, SequenceSpan, TreeMask
from ..model.layers.attention import StepInputs
from ..scheduling.block_pool import NULL_BLOCK
from ..scheduling.tree import Tree
from ..scheduling.window import evicted_places


class Run(NamedTuple):
    """Tokens of a sequence to compute.

    Attributes:
        start: slots of the sequence before them.
        block_ids: of the whole sequence.
        tree: of the draft tokens at their end, of which the first may have been computed before.
    """

    start: int
    token_ids: Sequence[int]
    block_ids: Sequence[int]
    tree: Tree | None = None


def step_inputs(
    runs: Sequence[Run],
    block_size: int,
    device: torch.device,
    dtype: torch.dtype,
) -> StepInputs:
    """Everything that a model reads of a step."""
    token_ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    several: list[tuple[int, int, int, Sequence[int], range, TreeMask | None]] = []
    single: list[tuple[int, int, Sequence[int], range]] = []
    for start, tokens, block_ids, tree in runs:
        begin, end = len(token_ids), start + len(tokens)
        token_ids.extend(tokens)
        mask = None
        if tree is None or tree.is_chain:
            positions.extend(range(start, end))
        else:
            mask = _tree_mask(tree, device)
            first, depths = end - len(tree.parents), tree.depths
            positions.extend(
                p if p < first else first - 1 + depths[p - first] for p in range(start, end)
            )
        slots += [
            block_ids[p // block_size] * block_size + p % block_size for p in range(start, end)
        ]
        used = block_ids[: -(-end // block_size)]
        out = evicted_places(used)
        held = [*used[: out.start], *used[out.stop :]] if out else used
        if len(tokens) == 1 and mask is None:
            single.append((begin, end, held, out))
        else:
            several.append((begin, begin + len(tokens), end, held, out, mask))
    width = max((len(held) for _, _, held, _ in single), default=0)
    padded: list[int] = []
    for _, _, held, _ in single:
        padded += [*held, *[NULL_BLOCK] * (width - len(held))]
    of_single = (
        [row for row, _, _, _ in single],
        padded,
        [length for _, length, _, _ in single],
        [len(out) * block_size for _, _, _, out in single],
    )
    tables = [held for _, _, _, held, _, _ in several]
    tokens, places, written, rows, block_ids, lengths, evicted_spans, *copied = packed(
        [token_ids, positions, slots, *of_single, *tables], device
    )
    decode = None
    if single:
        # All that leave something out keep the same first tokens.
        sink_length = max(out.start for _, _, _, out in single) * block_size
        decode = DecodeGroup(rows, block_ids, lengths, evicted_spans, sink_length)
    spans = [
        SequenceSpan(begin, stop, end, table, out.start * block_size, len(out) * block_size, mask)
        for (begin, stop, end, _, out, mask), table in zip(several, copied, strict=True)
    ]
    batch = AttentionBatch(spans, decode, block_size, dtype)
    return StepInputs(tokens, places, written, batch)


def _tree_mask(tree: Tree, device: torch.device) -> TreeMask:
    ancestors = torch.eye(len(tree.parents), dtype=torch.bool)
    for index, parent in enumerate(tree.parents):
        if parent >= 0:
            ancestors[index] |= ancestors[parent]
    return TreeMask(torch.tensor(tree.depths, device=device), ancestors.to(device))
