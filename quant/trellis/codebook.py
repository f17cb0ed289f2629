"""The computed codebooks of a trellis: the value of each of its 65,536 states, from a multiply and a mask.

Tseng et al., "QTIP: Quantization with Trellises and Incoherence Processing", NeurIPS 2024 (arXiv:2406.11235)
compute values from states in place of storing them: a linear congruential step scatters the 16 bits over 32,
and these become a number that is nearly normally distributed. Constants and order of operations are those of
exllamav3 (`exllamav3_ext/quant/codebook.cuh`), by whose names they go:

    3inst   x = 89226354 s + 64248484; the halves of (x & 0x8fff8fff) ^ 0x3b603b60, as float16, added
    mcg     x = 0xCBAC1FED s; the same
    mul1    x = 0x83DCD12D s; the sum of its four bytes, times 0x1eee, plus 0xc931 (bits of float16)
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

STATE_BITS = 16
MULTIPLIERS = {"mcg": 0xCBAC1FED, "mul1": 0x83DCD12D}
"""Of the codebooks that a file marks by a tensor of their name; the third, `3inst`, has no mark."""
_MASK, _EXPONENTS = 0x8FFF8FFF, 0x3B603B60
_SUM_BASE = 0x6400  # float16 1024, whose next 1023 bit patterns are the next integers


@lru_cache
def codebook(name: str) -> np.ndarray:
    """The value of every state, float16 `[65536]`; not to be written to."""
    states = np.arange(1 << STATE_BITS, dtype=np.uint32)
    with np.errstate(over="ignore"):
        if name == "3inst":
            words = states * np.uint32(89226354) + np.uint32(64248484)
        else:
            words = states * np.uint32(MULTIPLIERS[name])
    if name == "mul1":
        sums = words.view(np.uint8).reshape(-1, 4).sum(axis=1, dtype=np.uint16) + _SUM_BASE
        factor, offset = np.array([0x1EEE, 0xC931], dtype=np.uint16).view(np.float16)
        # One rounding, as of a fused multiply-add: a double holds the product exactly.
        exact = sums.astype(np.uint16).view(np.float16).astype(np.float64) * np.float64(factor)
        values = (exact + np.float64(offset)).astype(np.float16)
    else:
        halves = ((words & np.uint32(_MASK)) ^ np.uint32(_EXPONENTS)).view(np.float16)
        values = halves[0::2] + halves[1::2]
    values.setflags(write=False)
    return values
