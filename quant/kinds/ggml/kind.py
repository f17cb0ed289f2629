"""ggml's blocks as grids: simple blocks of 32, tables of 16 values, and K-quants of 256 with sub-blocks."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..base.grid import (
    Affine,
    Grid,
    Parameters,
    ScalarGrid,
    snap_to_integers,
)
from ..base.kind import Kind, Rounding
from ..base.ranged import Line, RangedGrid
from .fit import (
    AffineCodes,
    SignedCodes,
    error_weights,
    in_chunks,
    search_affine,
    search_whole,
)
from .k_blocks import AFFINE, K_WIDTH, SIGNED, pack_affine, pack_q2, pack_q3, pack_signed
from .scheme import GgufScheme
from .small_blocks import (
    IQ4_VALUES,
    WIDTH,
    fit_nl,
    fit_xs,
    nearest_iq4,
    pack_nl,
    pack_simple,
    pack_xs,
)
from .tensor import GgufTensor, quantize_blocks

SIMPLE = ("Q8_0", "Q4_0", "Q5_0", "Q4_1", "Q5_1")


class SimpleBlockGrid(RangedGrid):
    """Q8_0, Q4_0, Q5_0, Q4_1, Q5_1.

    Its parameters are the scales and the offsets (zeros where the type has none), float16 `[out, groups]`.
    """

    group = WIDTH

    def __init__(self, scheme: GgufScheme):
        self.scheme = scheme
        self._levels = 2**scheme.bits
        self.two_ends = not self.symmetric

    @property
    def symmetric(self) -> bool:
        """Whether the type has no offset."""
        return self.scheme.type.endswith("_0")

    def fit(self, values: torch.Tensor, importance: torch.Tensor | None = None) -> Parameters:
        if importance is not None:
            return self.searched(values, importance)
        return self.ranges(*values.aminmax(dim=-1))

    def ranges(self, low: torch.Tensor, high: torch.Tensor) -> Parameters:
        if not self.symmetric:
            scale = (high - low) / (self._levels - 1)
            return scale.to(torch.float16), low.to(torch.float16)
        if self.scheme.type == "Q8_0":
            scale = torch.maximum(-low, high) / 127
        else:  # the value of largest magnitude takes the least code
            scale = torch.where(-low >= high, low, high) / (-self._levels / 2)
        return scale.to(torch.float16), torch.zeros_like(scale, dtype=torch.float16)

    def refitted(self, line: Line, parameters: Parameters) -> Parameters:
        scale, low = (part.to(torch.float32) for part in parameters)
        scale = line.slope(scale)
        if self.symmetric:
            return scale.to(torch.float16), parameters[1]
        return scale.to(torch.float16), line.offset(scale, low).to(torch.float16)

    def affine(self, parameters: Parameters) -> Affine:
        scale, low = (part.to(torch.float32).unsqueeze(-1) for part in parameters)
        scale = torch.where(scale == 0, 1.0, scale)
        if not self.symmetric:
            return Affine(scale, low, 0, self._levels - 1)
        if self.scheme.type == "Q8_0":
            return Affine(scale, None, -127, 127)
        return Affine(scale, None, -self._levels // 2, self._levels // 2 - 1)

    def coded(self, levels: torch.Tensor, parameters: Parameters) -> GgufTensor:
        codes = levels.view(-1, WIDTH)
        scale, low = (part.reshape(-1, 1) for part in parameters)
        if self.scheme.type in ("Q4_0", "Q5_0"):
            codes += self._levels // 2
        data = pack_simple(self.scheme.type, codes, scale, None if self.symmetric else low)
        return GgufTensor(data.view(len(levels), -1), self.scheme)


TABLES = ("IQ4_NL", "IQ4_XS")
_RUN = 32


class TableBlockGrid(ScalarGrid):
    """IQ4_NL: blocks of 32 with a step; IQ4_XS: super-blocks of 256 with `d * scale` for each run of 32.

    Its parameters: codes of the scales, float32 `[out, groups, runs]` (IQ4_NL: 1), and d, float32
    `[out, groups, 1]`.
    """

    def __init__(self, scheme: GgufScheme):
        self.scheme = scheme
        self.group = scheme.block[0]

    def fit(self, values: torch.Tensor, importance: torch.Tensor | None = None) -> Parameters:
        runs = values.reshape(-1, self.group // _RUN, _RUN)
        if importance is None:
            weights = runs.square()
        else:
            weights = importance.expand(values.shape).reshape(runs.shape)
        if self.scheme.type == "IQ4_NL":
            head = fit_nl(runs.squeeze(1), weights.squeeze(1))
            scales = torch.ones_like(head)
        else:
            scales, _, head = (part.to(torch.float32) for part in in_chunks(fit_xs, runs, weights))
        return tuple(part.view(*values.shape[:2], -1) for part in (scales, head))

    def affine(self, parameters: Parameters) -> Affine:
        scales, head = parameters
        step = head * scales
        flat = step == 0
        low, high = (torch.where(flat, 0.0, float(end)) for end in (IQ4_VALUES[0], IQ4_VALUES[-1]))
        return Affine(torch.where(flat, 1.0, step), None, low, high)

    def snap(self, scaled: torch.Tensor, affine: Affine) -> None:
        nearest = nearest_iq4(scaled)
        # The table has no 0, which is all that a step of 0 holds.
        torch.clamp(nearest, affine.low, affine.high, out=scaled)  # pyright: ignore[reportArgumentType, reportCallIssue]

    def coded(self, levels: torch.Tensor, parameters: Parameters) -> GgufTensor:
        scales, head = (part.flatten(0, 1) for part in parameters)
        blocks = levels.view(-1, self.group)
        is_nl = self.scheme.type == "IQ4_NL"
        data = pack_nl(head, blocks) if is_nl else pack_xs(scales, blocks, head)
        return GgufTensor(data.view(len(levels), -1), self.scheme)


class KAffineGrid(ScalarGrid):
    """Q2_K, Q4_K and Q5_K: `d * scale * code - dmin * minimum`.

    Its parameters: codes of the scales and minimums of the sub-blocks, float32 `[out, groups, runs]`, and
    heads (d and dmin), float16 `[out, groups, 2]`.
    """

    group = K_WIDTH

    def __init__(self, scheme: GgufScheme):
        self.scheme = scheme
        self._runs, self._levels, self._scale_levels = AFFINE[scheme.type]

    def fit(self, values: torch.Tensor, importance: torch.Tensor | None = None) -> Parameters:
        blocks = values.reshape(-1, self._runs, K_WIDTH // self._runs)
        if importance is None:
            weights = error_weights(blocks, None)
        else:
            weights = importance.expand(values.shape).reshape(blocks.shape)

        def search(x: torch.Tensor, weights: torch.Tensor) -> AffineCodes:
            return search_affine(x, weights, self._levels, self._scale_levels, rounds=1)

        scales, _, lows, heads = in_chunks(search, blocks, weights)
        parts = scales.to(torch.float32), lows.to(torch.float32), heads
        return tuple(part.view(*values.shape[:2], -1) for part in parts)

    def affine(self, parameters: Parameters) -> Affine:
        scales, lows, heads = parameters
        step = heads[..., :1].to(torch.float32) * scales
        offset = heads[..., 1:].to(torch.float32) * lows
        flat = step == 0
        high = torch.where(flat, 0.0, float(self._levels))
        return Affine(torch.where(flat, 1.0, step), -offset, torch.zeros_like(high), high)

    def snap(self, scaled: torch.Tensor, affine: Affine) -> None:
        snap_to_integers(scaled, affine)

    def coded(self, levels: torch.Tensor, parameters: Parameters) -> GgufTensor:
        scales, lows, heads = (part.flatten(0, 1) for part in parameters)
        codes = levels.view(-1, self._runs, K_WIDTH // self._runs)
        fields = scales.to(torch.uint8), codes.to(torch.uint8), lows.to(torch.uint8), heads
        is_q2 = self.scheme.type == "Q2_K"
        data = pack_q2(*fields) if is_q2 else pack_affine(*fields, self.scheme.bits)
        return GgufTensor(data.view(len(levels), -1), self.scheme)


class KSignedGrid(ScalarGrid):
    """Q3_K and Q6_K: `d * scale * code`.

    Its parameters: codes of the sub-blocks' scales, float32 `[out, groups, 16]`, and d, float32
    `[out, groups, 1]`.
    """

    group = K_WIDTH

    def __init__(self, scheme: GgufScheme):
        self.scheme = scheme
        self._middle, self._scale_middle = SIGNED[scheme.type]

    def fit(self, values: torch.Tensor, importance: torch.Tensor | None = None) -> Parameters:
        blocks = values.reshape(-1, 16, K_WIDTH // 16)
        if importance is None:
            weights = blocks.square()
        else:
            weights = importance.expand(values.shape).reshape(blocks.shape)

        def search(x: torch.Tensor, weights: torch.Tensor) -> SignedCodes:
            return search_whole(x, weights, self._middle, self._scale_middle)

        scales, _, head = in_chunks(search, blocks, weights)
        parts = scales.to(torch.float32), head.to(torch.float32)
        return tuple(part.view(*values.shape[:2], -1) for part in parts)

    def affine(self, parameters: Parameters) -> Affine:
        scales, head = parameters
        step = head * scales
        flat, middle = step == 0, float(self._middle)
        low, high = (torch.where(flat, 0.0, edge) for edge in (-middle, middle - 1.0))
        return Affine(torch.where(flat, 1.0, step), None, low, high)

    def snap(self, scaled: torch.Tensor, affine: Affine) -> None:
        snap_to_integers(scaled, affine)

    def coded(self, levels: torch.Tensor, parameters: Parameters) -> GgufTensor:
        scales, head = (part.flatten(0, 1) for part in parameters)
        codes = levels.add_(self._middle).view(-1, K_WIDTH).to(torch.uint8)
        pack = pack_q3 if self.scheme.type == "Q3_K" else pack_signed
        data = pack(scales.to(torch.int8), codes, head.to(torch.float16))
        return GgufTensor(data.view(len(levels), -1), self.scheme)


class GgufKind(Kind[GgufScheme]):
    """ggml's blocks; those of its lattices, and MXFP4, are rounded whole."""

    def blank(self, out_features: int, in_features: int, scale_dtype: torch.dtype) -> GgufTensor:
        width, size = self.scheme.block
        rows = torch.zeros(out_features, in_features // width * size, dtype=torch.uint8)
        return GgufTensor(rows, self.scheme)

    def rounded(self, weight: torch.Tensor, how: Rounding) -> GgufTensor:
        data = quantize_blocks(weight, self.scheme.type, how.importance, name=how.name)
        return GgufTensor(data, self.scheme)

    def grid_for(self, shape: tuple[int, ...], how: Rounding) -> Grid:
        return _GRIDS[self.scheme.type](self.scheme)

    @property
    def refuses_solver(self) -> str | None:
        if self.scheme.type in _GRIDS:
            return None
        return f"blocks of {self.scheme.type} are rounded whole"


_GRIDS: dict[str, Callable[[GgufScheme], Grid]] = {
    **dict.fromkeys(SIMPLE, SimpleBlockGrid),
    **dict.fromkeys(TABLES, TableBlockGrid),
    **dict.fromkeys(AFFINE, KAffineGrid),
    **dict.fromkeys(SIGNED, KSignedGrid),
}

KIND = GgufKind
