"""Input tensors of a step: token ids, positions, slot mapping, block tables, tree masks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from ..base.image_input import NO_IMAGES, Images
from ..base.transfer import packed
from ..kernels.attention.paged_attention import AttentionBatch, DecodeGroup, SequenceSpan, TreeMask
from ..model.layers.attention import StepInputs
from ..model.layers.state import StateBatch
from ..scheduling.block_pool import NULL_BLOCK
from ..scheduling.request import NULL_SLOT
from ..scheduling.tree import Tree
from ..scheduling.window import evicted_places


class Run(NamedTuple):
    """Tokens of one sequence to compute in a step.

    Attributes:
        start: number of slots of the sequence before these tokens.
        block_ids: block table of the whole sequence.
        tree: of the draft tokens at the end, of which the first may be computed already.
        state_slot: of the sequence's constant state.
        num_evicted: tokens before `start` that have no slot any more: positions count them.
        images: of the sequence's prompt.
    """

    start: int
    token_ids: Sequence[int]
    block_ids: Sequence[int]
    tree: Tree | None = None
    state_slot: int = NULL_SLOT
    num_evicted: int = 0
    images: Images = NO_IMAGES


def step_inputs(
    runs: Sequence[Run],
    block_size: int,
    device: torch.device,
    dtype: torch.dtype,
    states: Sequence[torch.Tensor] = (),
) -> StepInputs:
    """Build the model's inputs for a step; all but tree masks go in one host-to-device copy.

    `states` are the tensors of the state cache.
    """
    token_ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    multi_token: list[tuple[int, int, int, Sequence[int], range, TreeMask | None]] = []
    decodes: list[tuple[int, int, Sequence[int], range]] = []
    for start, tokens, block_ids, tree, _, num_evicted, _ in runs:
        begin, end = len(token_ids), start + len(tokens)
        token_ids.extend(tokens)
        mask = None
        if tree is None or tree.is_chain:
            positions.extend(range(start + num_evicted, end + num_evicted))
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
        evicted = evicted_places(used)
        held = [*used[: evicted.start], *used[evicted.stop :]] if evicted else used
        if len(tokens) == 1 and mask is None:
            decodes.append((begin, end, held, evicted))
        else:
            multi_token.append((begin, begin + len(tokens), end, held, evicted, mask))
    width = max((len(held) for _, _, held, _ in decodes), default=0)
    padded: list[int] = []
    for _, _, held, _ in decodes:
        padded += [*held, *[NULL_BLOCK] * (width - len(held))]
    decode_columns = (
        [row for row, _, _, _ in decodes],
        padded,
        [length for _, length, _, _ in decodes],
        [len(evicted) * block_size for _, _, _, evicted in decodes],
    )
    tables = [held for _, _, _, held, _, _ in multi_token]
    state_slots = [run.state_slot for run in runs] if states else []
    columns = [token_ids, positions, slots, state_slots, *decode_columns]
    copied = packed([*columns, *tables], device)
    tokens, position_ids, slot_mapping, of_states, rows, block_ids, lengths, evicted_spans = copied[
        : len(columns)
    ]
    decode = None
    if decodes:
        # All sequences with evicted blocks keep the same number of sink tokens.
        sink_length = max(evicted.start for _, _, _, evicted in decodes) * block_size
        decode = DecodeGroup(rows, block_ids, lengths, evicted_spans, sink_length)
    spans = [
        SequenceSpan(
            begin, stop, end, table, evicted.start * block_size, len(evicted) * block_size, mask
        )
        for (begin, stop, end, _, evicted, mask), table in zip(
            multi_token, copied[len(columns) :], strict=True
        )
    ]
    batch = AttentionBatch(spans, decode, block_size, dtype)
    return StepInputs(
        tokens, position_ids, slot_mapping, batch, states=StateBatch(tuple(states), of_states)
    )


def _tree_mask(tree: Tree, device: torch.device) -> TreeMask:
    ancestors = torch.eye(len(tree.parents), dtype=torch.bool)
    for index, parent in enumerate(tree.parents):
        if parent >= 0:
            ancestors[index] |= ancestors[parent]
    return TreeMask(torch.tensor(tree.depths, device=device), ancestors.to(device))
