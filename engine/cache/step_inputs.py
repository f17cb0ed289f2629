"""Input tensors of a step: token ids, positions, slot mapping, block tables, tree masks, image embeddings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from ..base.device import packed, to_device
from ..base.image_input import NO_IMAGES, ImageInput, Images
from ..kernels.attention.batch import (
    AttentionBatch,
    DecodeCounts,
    DecodeGroup,
    SequenceSpan,
    TreeMask,
)
from ..model.layers.attention import StepInputs
from ..model.layers.embedding import EmbeddedRows
from ..model.layers.state import StateBatch
from ..multimodal.encoder import EncoderCache
from ..scheduling.block_pool import NULL_BLOCK, evicted_places
from ..scheduling.draft_length import Tree
from ..scheduling.request import NULL_SLOT, Axes, RopePositions


class Run(NamedTuple):
    """Tokens of one sequence to compute in a step.

    Attributes:
        start: number of slots of the sequence before these tokens.
        block_ids: block table of the whole sequence.
        tree: tree of the draft tokens at the end; the first of them may be computed already.
        num_evicted: tokens before `start` without a slot; positions count them.
        bidirectional_images: positions of the images whose tokens attend to each other; no step cuts them.
    """

    start: int
    token_ids: Sequence[int]
    block_ids: Sequence[int]
    tree: Tree | None = None
    state_slot: int = NULL_SLOT
    num_evicted: int = 0
    images: Images = NO_IMAGES
    rope_positions: RopePositions | None = None
    bidirectional_images: tuple[range, ...] = ()

    @property
    def indices(self) -> Sequence[int]:
        """Index of each token in the sequence, by which RoPE rotates text; in a tree by depth."""
        start, tree = self.start + self.num_evicted, self.tree
        end = start + len(self.token_ids)
        if tree is None or tree.is_chain:
            return range(start, end)
        known, depths = end - len(tree.parents), tree.depths
        return [i if i < known else known - 1 + depths[i - known] for i in range(start, end)]

    @property
    def seen_images(self) -> tuple[range, ...]:
        """Bidirectional images that some of these tokens belong to."""
        end = self.start + len(self.token_ids)
        images = self.bidirectional_images
        images = tuple(i for i in images if i.start < end and i.stop > self.start)
        assert all(image.stop <= end for image in images), "a step cuts an image"
        return images


def step_inputs(
    runs: Sequence[Run],
    block_size: int,
    device: torch.device,
    dtype: torch.dtype,
    states: Sequence[torch.Tensor] = (),
) -> StepInputs:
    """Inputs for a step, in one copy but for tree masks; `states`: tensors of the state cache."""
    token_ids: list[int] = []
    slots: list[int] = []
    multi_token: list[tuple[Run, int, Sequence[int], range, TreeMask | None]] = []
    decodes: list[tuple[int, int, Sequence[int], range]] = []
    for run in runs:
        start, tokens, block_ids, tree = run.start, run.token_ids, run.block_ids, run.tree
        begin, end = len(token_ids), start + len(tokens)
        token_ids.extend(tokens)
        mask = None if tree is None or tree.is_chain else _tree_mask(tree, device)
        slots += [
            block_ids[p // block_size] * block_size + p % block_size for p in range(start, end)
        ]
        used = block_ids[: -(-end // block_size)]
        evicted = evicted_places(used)
        table = [*used[: evicted.start], *used[evicted.stop :]] if evicted else used
        if len(tokens) == 1 and mask is None:
            decodes.append((begin, end, table, evicted))
        else:
            multi_token.append((run, begin, table, evicted, mask))
    tables = [table for _, _, table, _, _ in multi_token]
    state_slots = [run.state_slot for run in runs] if states else []
    columns = [token_ids, *_axes(runs), slots, state_slots, *_decode_columns(decodes, block_size)]
    copied = packed([*columns, *tables], device)
    ids, temporal, height, width, slot_mapping, of_states, *of_decodes = copied[: len(columns)]
    decode = None
    if decodes:
        # All sequences with evicted blocks keep the same number of sink tokens.
        sink_length = max(evicted.start for _, _, _, evicted in decodes) * block_size
        rows, block_ids, lengths, evicted_spans = of_decodes
        counts = DecodeCounts(
            [row for row, _, _, _ in decodes],
            [length - len(evicted) * block_size for _, length, _, evicted in decodes],
        )
        decode = DecodeGroup(rows, block_ids, lengths, evicted_spans, sink_length, counts)
    spans = [
        SequenceSpan(
            begin,
            begin + len(run.token_ids),
            run.start + len(run.token_ids),
            table,
            evicted.start * block_size,
            len(evicted) * block_size,
            mask,
            run.seen_images if run.bidirectional_images else (),
        )
        for (run, begin, _, evicted, mask), table in zip(
            multi_token, copied[len(columns) :], strict=True
        )
    ]
    return StepInputs(
        ids,
        torch.stack([temporal, height, width]) if height.numel() else temporal,
        slot_mapping,
        AttentionBatch(spans, decode, block_size, dtype),
        states=StateBatch(tuple(states), of_states),
    )


def _axes(runs: Sequence[Run]) -> Axes:
    """Temporal, height and width positions of a step's tokens; no height and width if all are equal."""
    positions: list[int] = []
    grids: list[tuple[int, Axes]] = []
    for run in runs:
        if run.rope_positions is None:
            positions.extend(run.indices)
            continue
        axes = run.rope_positions.of(run.indices)
        if not axes[0] == axes[1] == axes[2]:
            grids.append((len(positions), axes))
        positions.extend(axes[0])
    if not grids:
        return positions, [], []
    heights, widths = list(positions), list(positions)
    for begin, (_, height, width) in grids:
        heights[begin : begin + len(height)] = height
        widths[begin : begin + len(width)] = width
    return positions, heights, widths


def _decode_columns(
    decodes: Sequence[tuple[int, int, Sequence[int], range]], block_size: int
) -> tuple[list[int], list[int], list[int], list[int]]:
    """Rows, padded block tables, lengths and evicted spans of the sequences with one token."""
    width = max((len(table) for _, _, table, _ in decodes), default=0)
    padded: list[int] = []
    for _, _, table, _ in decodes:
        padded += [*table, *[NULL_BLOCK] * (width - len(table))]
    return (
        [row for row, _, _, _ in decodes],
        padded,
        [length for _, length, _, _ in decodes],
        [len(evicted) * block_size for _, _, _, evicted in decodes],
    )


def _tree_mask(tree: Tree, device: torch.device) -> TreeMask:
    ancestors = np.eye(len(tree.parents), dtype=np.bool_)
    for index, parent in enumerate(tree.parents):
        if parent >= 0:
            ancestors[index] |= ancestors[parent]
    return TreeMask(packed([tree.depths], device)[0], to_device(ancestors, device))


def embedded_rows(
    runs: Sequence[Run], encoders: EncoderCache, device: torch.device
) -> EmbeddedRows | None:
    """Embeddings of placeholder tokens, or None; a run within an image takes its part of them."""
    rows: list[int] = []
    taken: list[tuple[ImageInput, slice]] = []
    begin = 0
    for run in runs:
        start = run.start + run.num_evicted
        end = start + len(run.token_ids)
        for image in run.images:
            if not image.overlaps(start, end):
                continue
            positions, skipped = image.embedded_positions(start, end)
            if positions:
                rows += [begin + position - start for position in positions]
                taken.append((image, slice(skipped, skipped + len(positions))))
        begin += len(run.token_ids)
    if not taken:
        return None
    encoded = encoders.embeddings([image for image, _ in taken])
    parts = [(encoded[image.content_hash], part) for image, part in taken]
    levels = len(parts[0][0].deepstack)
    return EmbeddedRows(
        packed([rows], device)[0],
        torch.cat([image.embeddings[part] for image, part in parts]),
        tuple(torch.cat([i.deepstack[n][part] for i, part in parts]) for n in range(levels)),
    )
