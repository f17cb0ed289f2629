"""Codebooks of ggml's IQ types: points of a lattice in 4 or 8 dimensions, and the bytes of their signs.

The points are facts of the format; they are read from the package `gguf`, whose readers hold them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib import import_module

import numpy as np
import torch

from ..base.errors import BadInput

_DELTA = 0.125  # IQ1: what is added to all values of a run or a point, or subtracted


@dataclass(frozen=True, slots=True)
class Lattice:
    """How a type's blocks of 256 weights are made of lattice points.

    Attributes:
        dim: weights in a point.
        runs: parts of a block with a scale each.
        scale_bits: of a run's scale; its step is `d * unit * (2 * scale + 1)`.
        signs: `free`, `even` (an even number of minuses among eight), or `in the points`.
    """

    dim: int
    runs: int
    scale_bits: int
    unit: float
    signs: str


LATTICES = {
    "IQ1_S": Lattice(8, 8, 3, 1.0, "in the points"),
    "IQ1_M": Lattice(8, 16, 3, 1.0, "in the points"),
    "IQ2_XXS": Lattice(8, 8, 4, 0.125, "even"),
    "IQ2_XS": Lattice(8, 16, 4, 0.125, "even"),
    "IQ2_S": Lattice(8, 16, 4, 0.125, "free"),
    "IQ3_XXS": Lattice(4, 8, 4, 0.25, "even"),
    "IQ3_S": Lattice(4, 8, 4, 1.0, "free"),
}


@cache
def points(type_name: str, device: torch.device) -> torch.Tensor:
    """The points of a type, float32 `[count, dim]`; IQ1's first with the delta added, then subtracted.

    Raises:
        BadInput: the package `gguf` is not installed.
    """
    try:
        quants = import_module("gguf.quants")
    except ImportError as error:
        raise BadInput(
            f"{type_name} needs the package gguf for its codebook: pip install 'llmopt[gguf]'"
        ) from error
    reader = getattr(quants, type_name)
    reader.init_grid()
    table = torch.from_numpy(np.array(reader.grid).reshape(reader.grid_shape)).to(device)
    return torch.cat([table + _DELTA, table - _DELTA]) if type_name.startswith("IQ1") else table


@cache
def sign_bytes(device: torch.device) -> torch.Tensor:
    """The signs of eight weights by their first seven, uint8 `[128]`: the number of minuses is even."""
    seven = torch.arange(128, device=device)
    parity = sum((seven >> bit) & 1 for bit in range(7)) & 1
    return (seven | (parity << 7)).to(torch.uint8)
