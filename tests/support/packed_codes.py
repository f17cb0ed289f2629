"""The layout of the C kernels' packed codes (`weight.h`), in torch."""

from __future__ import annotations

import torch
from llmopt.engine.kernels.linear.grid import CHUNK, PANEL
from torch.nn import functional

SLAB_PANELS = 32  # panels packed at a time: bounds the temporaries
PLANES = (4, 2, 1)


def pack_codes_torch(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Codes `[out, in]` as `pack_codes` packs them: `[panels, chunks, bits, 4 * PANEL]`, uint8."""
    out_features, in_features = codes.shape
    panels, chunks = -(-out_features // PANEL), -(-in_features // CHUNK)
    packed = torch.empty(panels, chunks, bits, 4 * PANEL, dtype=torch.uint8)
    for begin in range(0, panels, SLAB_PANELS):
        rows = codes[begin * PANEL : (begin + SLAB_PANELS) * PANEL]
        slab = packed[begin : begin + SLAB_PANELS]
        missing = slab.shape[0] * PANEL - rows.shape[0]
        padded = functional.pad(rows, (0, chunks * CHUNK - in_features, 0, missing))
        quads = padded.contiguous().view(torch.int32).view(-1, PANEL, chunks, CHUNK // 4)
        slab.copy_(_planes(quads.permute(0, 2, 3, 1).contiguous().view(torch.uint8), bits))
    return packed


def _planes(quads: torch.Tensor, bits: int) -> torch.Tensor:
    """`[panels, chunks, 8, bytes]` of codes as `[panels, chunks, bits, bytes]`."""
    if bits == 8:
        return quads
    planes, shift = [], 0
    for width in PLANES:
        if not bits & width:
            continue
        parts = ((quads >> shift) & (2**width - 1)).unflatten(2, (width, 8 // width))
        plane = parts[:, :, :, 0].clone()
        for index in range(1, 8 // width):
            plane |= parts[:, :, :, index] << (width * index)
        planes.append(plane)
        shift += width
    return torch.cat(planes, dim=2)
