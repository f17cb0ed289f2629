"""The E8P codebook (E8 padded): 65,536 points of the E8 lattice, shifted by a quarter, from 256 patterns.

Tseng et al., "QuIP#: Even Better LLM Quantization with Hadamard Incoherence and Lattice Codebooks", ICML 2024
(arXiv:2402.04396). Vectors of 8 halves of odd integers with an even sum (D8 + 1/2) are told by their
magnitudes and 7 signs: the eighth makes the sum even. E8P has 256 patterns of magnitudes: all 227 whose
squared norm is at most 10, and 29 of those whose squared norm is 12. One bit more says whether 1/4 is added
to all eight numbers or taken away, and these lie in E8 + 1/4 again. The code of 16 bits, as QuIP-for-all
stores it (`codebook/e8p12.py`; QuIP# has the signs in another order):

    bits 8 to 15   the pattern
    bits 0 to 7    signs, 1 for minus, of the channels in `SIGN_BITS`; where the number of ones is odd, bit 0
                   is turned over, and 1/4 is taken away

What 2 bits leave over is quantized again: for 4 bits in E8P, for 3 bits among 256 points of E8 itself.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import product

import torch

DIM = 8
CPU = torch.device("cpu")
SIGN_BITS = (7, 5, 6, 4, 3, 1, 2, 0)
"""The bit of each channel's sign. That of channel 7 counts from what makes the pattern's own sum even."""
# Channels of the 1/2 in the patterns of squared norm 12; the other five are 3/2. QuIP#'s choice and order.
_HALVES = (
    "123 023 013 012 367 357 347 356 346 345 267 257 247 256 246 "
    "245 167 157 147 156 146 045 067 057 047 056 046 014 237"
)


@lru_cache
def patterns(device: torch.device = CPU) -> torch.Tensor:
    """Magnitudes float32 `[256, 8]`: those of squared norm up to 10 in lexicographic order, then of 12.

    This and the other tables are not to be written to.
    """
    inside = []
    for magnitudes in product((0.5, 1.5, 2.5), repeat=DIM):
        if sum(value * value for value in magnitudes) <= 10:
            inside.append(magnitudes)
    padding = [
        tuple(0.5 if str(channel) in halves else 1.5 for channel in range(DIM))
        for halves in _HALVES.split()
    ]
    return torch.tensor([*inside, *padding], device=CPU).to(device)


@lru_cache
def points(device: torch.device = CPU) -> torch.Tensor:
    """The point of every code, float32 `[65536, 8]`."""
    magnitudes = patterns().clone()
    magnitudes[:, DIM - 1] *= 1 - 2 * (magnitudes.sum(dim=1) % 2)
    stored = torch.arange(256, device=CPU)
    odd = torch.stack([stored >> bit & 1 for bit in range(8)]).sum(dim=0) % 2
    minus = torch.stack([(stored ^ odd) >> bit & 1 for bit in SIGN_BITS], dim=1)
    signed = magnitudes[:, None] * (1 - 2 * minus)
    return (signed + 0.25 * (1 - 2 * odd)[:, None]).flatten(0, 1).to(device)


@lru_cache
def residual_points(device: torch.device = CPU) -> torch.Tensor:
    """256 points of E8 float32 `[256, 8]`: those of squared norm up to 2, then 15 of the 16 with one ±2.

    Whole numbers come first, in lexicographic order, then halves (QuIP#, `latticee8_padded12_rvq3bit.py`).
    """
    inside = [
        point
        for values in ((-1, 0, 1), (-0.5, 0.5))
        for point in product(values, repeat=DIM)
        if sum(point) % 2 == 0 and sum(value * value for value in point) <= 2
    ]
    axes = 2 * torch.eye(DIM, device=CPU)
    return torch.cat([torch.tensor(inside, device=CPU), axes, -axes[:-1]]).to(device)
