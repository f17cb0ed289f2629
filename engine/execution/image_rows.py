"""Image rows: the embeddings of a step's placeholder tokens, gathered from the encoder cache."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..base.image_input import ImageInput
from ..base.transfer import packed
from ..cache.step_inputs import Run
from ..model.layers.embedded_rows import EmbeddedRows
from ..multimodal.encoder import EncoderCache


def embedded_rows(
    runs: Sequence[Run], encoders: EncoderCache, device: torch.device
) -> EmbeddedRows | None:
    """The embeddings of the placeholder tokens that `runs` compute; None without any.

    A run may begin or end within an image (chunked prefill, prefix hits) and takes its part of it.
    """
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
