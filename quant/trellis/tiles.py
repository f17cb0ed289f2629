"""EXL3's tiles: 16 × 16 weights are one cyclic sequence of 256 states, packed into `16 * bits` int16 words.

The order of a tile's weights in its sequence is that in which the 32 lanes of a tensor core hold a 16 × 16
operand: eight of each lane, first the first eight output channels. A state has 16 bits, of which its
successor shares all but `bits`, so that a tile stores `bits` for each weight: one stream, highest bits first,
in 32-bit words whose int16 halves are swapped (exllamav3, `exllamav3_ext/quant/pack.cu`).
"""

from __future__ import annotations

import torch

from .codebook import STATE_BITS

TILE = 16
LENGTH = TILE * TILE


def _order() -> torch.Tensor:
    """The place `row * 16 + column` (input, output channel) of each weight of a sequence."""
    lane = torch.arange(32)[:, None]
    rows = (lane % 4) * 2 + torch.tensor([0, 1, 8, 9, 0, 1, 8, 9])
    columns = lane // 4 + torch.tensor([0, 0, 0, 0, 8, 8, 8, 8])
    return (rows * TILE + columns).flatten()


ORDER = _order()
_PLACES = ORDER.argsort()


def to_sequences(values: torch.Tensor) -> torch.Tensor:
    """Values `[in, out]` as sequences `[in / 16, out / 16, 256]`."""
    tiles = values.unflatten(1, (-1, TILE)).unflatten(0, (-1, TILE)).transpose(1, 2)
    return tiles.flatten(2)[..., ORDER.to(values.device)]


def from_sequences(sequences: torch.Tensor) -> torch.Tensor:
    """Inverse of `to_sequences`: `[in, out]`."""
    tiles = sequences[..., _PLACES.to(sequences.device)].unflatten(2, (TILE, TILE))
    return tiles.transpose(1, 2).flatten(2).flatten(0, 1)


def pack_states(states: torch.Tensor, bits: int) -> torch.Tensor:
    """States int32 `[..., 256]` of cyclic sequences as int16 `[..., 16 * bits]`."""
    shifts = torch.arange(bits - 1, -1, -1, dtype=torch.int32, device=states.device)
    stream = (states[..., None] >> shifts & 1).flatten(-2).unflatten(-1, (-1, 16))
    places = torch.arange(15, -1, -1, dtype=torch.int32, device=states.device)
    words = (stream << places).sum(-1, dtype=torch.int32)
    return words.unflatten(-1, (-1, 2)).flip(-1).flatten(-2).to(torch.int16)


def unpack_states(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """Inverse of `pack_states`: int32 `[..., 256]`, of 16 bits each."""
    words = (packed.to(torch.int32) & 0xFFFF).unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
    # The 16 bits that end with a weight's own lie in two neighbouring words, around the end of the tile.
    ends = torch.arange(1, LENGTH + 1, device=packed.device) * bits
    word, used = (ends - 1) // 16, (ends - 1) % 16 + 1
    pairs = words.roll(1, -1) << 16 | words
    return pairs[..., word] >> (16 - used).to(torch.int32) & ((1 << STATE_BITS) - 1)
