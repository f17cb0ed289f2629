"""The grid of each scheme."""

from __future__ import annotations

import torch

from ..base.scheme import Scheme
from ..kinds.codebook.scheme import CodebookScheme
from ..kinds.e8p.scheme import E8pScheme
from ..kinds.fp4.scheme import Fp4Scheme
from ..kinds.fp8.scheme import FloatScheme
from ..kinds.ggml.scheme import GgufScheme
from ..kinds.integer.scheme import IntScheme
from ..kinds.lookup.scheme import LookupScheme
from ..kinds.trellis.scheme import TrellisScheme
from .base import Grid
from .codebook_grid import CodebookGrid
from .float_grid import FloatGrid
from .fp4_grid import Fp4Grid
from .int_grid import IntGrid, group_ranges, search_ranges
from .k_grid import K_AFFINE, K_SIGNED, KAffineGrid, KSignedGrid
from .lookup_grid import LookupGrid
from .simple_block_grid import SIMPLE, SimpleBlockGrid
from .table_block_grid import TABLES, TableBlockGrid
from .vectorwise_grid import VectorwiseGrid

_BLOCKS = (*SIMPLE, *TABLES, *K_AFFINE, *K_SIGNED)


def grid_of(
    scheme: Scheme,
    shape: tuple[int, ...],
    scale_dtype: torch.dtype,
    *,
    input_scale: torch.Tensor | None = None,
    mse: bool = False,
    largest: torch.Tensor | None = None,
) -> Grid:
    """The grid of a weight.

    Args:
        shape: `(out, in)`.
        scale_dtype: the dtype that the format stores scales in.
        input_scale: float32 `[1]`, for a scheme with static activations.
        mse: whether integer ranges are searched for the least `sum |w - w'|**2.4`.
        largest: the largest magnitude that a scheme with one scale of the whole weight must cover.
    """
    out_features, in_features = shape
    if isinstance(scheme, IntScheme):
        ranges = search_ranges if mse else group_ranges
        return IntGrid(scheme, in_features, scale_dtype, input_scale=input_scale, ranges=ranges)
    if isinstance(scheme, FloatScheme):
        return FloatGrid(scheme, out_features, in_features, scale_dtype, input_scale=input_scale)
    if isinstance(scheme, CodebookScheme):
        return CodebookGrid(scheme, out_features, in_features)
    if isinstance(scheme, Fp4Scheme):
        return Fp4Grid(scheme, largest, input_scale)
    if isinstance(scheme, LookupScheme):
        return LookupGrid(scheme, in_features)
    if isinstance(scheme, GgufScheme):
        return _block_grid(scheme)
    assert not isinstance(scheme, TrellisScheme | E8pScheme), "these have a grid for each weight"
    return VectorwiseGrid(scheme, in_features)


def refuses_solver(scheme: Scheme) -> str | None:
    """Why no solver but nearest goes to a scheme; None: it has a `Grid`."""
    if isinstance(scheme, GgufScheme) and scheme.type not in _BLOCKS:
        return f"blocks of {scheme.type} are rounded whole"
    return None


def _block_grid(scheme: GgufScheme) -> Grid:
    """The grid of one of ggml's block types."""
    if scheme.type in SIMPLE:
        return SimpleBlockGrid(scheme)
    if scheme.type in TABLES:
        return TableBlockGrid(scheme)
    return KAffineGrid(scheme) if scheme.type in K_AFFINE else KSignedGrid(scheme)
