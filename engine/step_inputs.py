"""The tensors of a step, from runs of tokens and the blocks of their sequences."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from .block_pool import NULL_BLOCK
from .kernels.paged_attention import AttentionBatch, DecodeGroup, SequenceSpan, TreeMask
from .model.attention import StepInputs
from .speculation.tree import Tree
from .window import dropped_places


class Run(NamedTuple):
    """Tokens of a sequence to compute.

    Attributes:
        start: slots of the sequence before them.
        block_ids: of the whole sequence.
        tree: of the guesses at their end, of which the first may have been computed before.
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

    def tensor(values: Sequence[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=device)

    token_ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    spans: list[SequenceSpan] = []
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
        slots.extend(
            block_ids[p // block_size] * block_size + p % block_size for p in range(start, end)
        )
        used = block_ids[: -(-end // block_size)]
        out = dropped_places(used)
        held = [*used[: out.start], *used[out.stop :]]
        if len(tokens) == 1 and mask is None:
            single.append((begin, end, held, out))
        else:
            front, gap = out.start * block_size, len(out) * block_size
            tokens_end = begin + len(tokens)
            spans.append(SequenceSpan(begin, tokens_end, end, tensor(held), front, gap, mask))
    decode = None
    if single:
        width = max(len(held) for _, _, held, _ in single)
        padding = [[NULL_BLOCK] * (width - len(held)) for _, _, held, _ in single]
        decode = DecodeGroup(
            rows=tensor([row for row, _, _, _ in single]),
            block_ids=tensor(
                [
                    block
                    for (_, _, held, _), rest in zip(single, padding, strict=True)
                    for block in (*held, *rest)
                ]
            ),
            lengths=tensor([length for _, length, _, _ in single]),
            gaps=tensor([len(out) * block_size for _, _, _, out in single]),
            # All that leave something out keep the same first tokens.
            front=max(out.start for _, _, _, out in single) * block_size,
        )
    batch = AttentionBatch(spans, decode, block_size, dtype)
    return StepInputs(tensor(token_ids), tensor(positions), tensor(slots), batch)


def _tree_mask(tree: Tree, device: torch.device) -> TreeMask:
    sees = torch.eye(len(tree.parents), dtype=torch.bool)
    for index, parent in enumerate(tree.parents):
        if parent >= 0:
            sees[index] |= sees[parent]
    return TreeMask(torch.tensor(tree.depths, device=device), sees.to(device))
