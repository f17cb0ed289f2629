"""ggml's blocks as grids: simple blocks of 32, tables of 16 values, and K-quants of 256 with sub-blocks."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable

import torch

from ..base.grid import Affine, Grid, Parameters, ScalarGrid
from ..base.kind import Kind, Rounding
from ..base.ranged import Line, RangedGrid
from .fit import error_weights, in_chunks, search_affine, search_whole
from .k_blocks import AFFINE, SIGNED, pack_affine, pack_q2, pack_q3, pack_signed
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
TABLES = ("IQ4_NL", "IQ4_XS")
_RUN = 32


class SimpleBlockGrid(RangedGrid):
    """Q8_0, Q4_0, Q5_0, Q4_1, Q5_1: scales and offsets (or zeros), float16 `[out, groups]`."""

    group = WIDTH

    def __init__(self, scheme: GgufScheme):
        self.scheme, self._levels = scheme, 2**scheme.bits
        self.symmetric = scheme.type.endswith("_0")  # without an offset
        self.two_ends = not self.symmetric

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


def _affine(
    step: torch.Tensor, low: float, high: float, offset: torch.Tensor | None = None
) -> Affine:
    """Levels from `low` to `high`; of a step of 0 only the level 0, which IQ4's table does not have."""
    flat = step == 0
    low_edge, high_edge = (torch.where(flat, 0.0, float(edge)) for edge in (low, high))
    return Affine(torch.where(flat, 1.0, step), offset, low_edge, high_edge)


class RunGrid(ScalarGrid):
    """Blocks that are divided into runs with a scale each, which are searched. Parameters, float32: codes of
    the runs' scales `[out, groups, runs]`, with an offset codes of the runs' minimums too, and the block's
    float16 numbers `[out, groups, heads]`: d, with an offset dmin too."""

    def __init__(self, scheme: GgufScheme, runs: int):
        self.scheme, self.runs, self.group = scheme, runs, scheme.block[0]

    @abstractmethod
    def search(self, x: torch.Tensor, weights: torch.Tensor) -> Parameters:
        """Parameters of blocks `[n, runs, width]`; `weights` are of the squared errors."""

    @abstractmethod
    def packed(self, levels: torch.Tensor, parameters: Parameters) -> torch.Tensor:
        """Bytes of blocks from levels `[n, width]` and parameters `[n, ...]`."""

    def plain_weights(self, x: torch.Tensor) -> torch.Tensor:
        return x.square()

    def fit(self, values: torch.Tensor, importance: torch.Tensor | None = None) -> Parameters:
        x = values.reshape(-1, self.runs, self.group // self.runs)
        if importance is None:
            weights = self.plain_weights(x)
        else:
            weights = importance.expand(values.shape).reshape(x.shape)
        parts = self.search(x, weights)
        return tuple(part.to(torch.float32).view(*values.shape[:2], -1) for part in parts)

    def coded(self, levels: torch.Tensor, parameters: Parameters) -> GgufTensor:
        blocks = tuple(part.flatten(0, 1) for part in parameters)
        data = self.packed(levels.view(-1, self.group), blocks)
        return GgufTensor(data.view(len(levels), -1), self.scheme)


class TableBlockGrid(RunGrid):
    """IQ4_NL, whose blocks are one run of 32, and IQ4_XS: `d * scale * value`."""

    def __init__(self, scheme: GgufScheme):
        super().__init__(scheme, scheme.block[0] // _RUN)

    def search(self, x: torch.Tensor, weights: torch.Tensor) -> Parameters:
        if self.scheme.type == "IQ4_NL":
            head = fit_nl(x.squeeze(1), weights.squeeze(1))
            return torch.ones_like(head), head
        scales, _, head = in_chunks(fit_xs, x, weights)
        return scales, head

    def affine(self, parameters: Parameters) -> Affine:
        scales, head = parameters
        return _affine(head * scales, IQ4_VALUES[0], IQ4_VALUES[-1])

    def snap(self, scaled: torch.Tensor, affine: Affine) -> None:
        nearest = nearest_iq4(scaled)
        torch.clamp(nearest, affine.low, affine.high, out=scaled)  # pyright: ignore[reportArgumentType, reportCallIssue]

    def packed(self, levels: torch.Tensor, parameters: Parameters) -> torch.Tensor:
        scales, head = parameters
        return pack_nl(head, levels) if self.runs == 1 else pack_xs(scales, levels, head)


class KAffineGrid(RunGrid):
    """Q2_K, Q4_K and Q5_K: `d * scale * code - dmin * minimum`."""

    def __init__(self, scheme: GgufScheme):
        runs, self._levels, self._scale_levels = AFFINE[scheme.type]
        super().__init__(scheme, runs)

    def plain_weights(self, x: torch.Tensor) -> torch.Tensor:
        return error_weights(x, None)

    def search(self, x: torch.Tensor, weights: torch.Tensor) -> Parameters:
        levels, scale_levels = self._levels, self._scale_levels
        scales, _, lows, heads = in_chunks(
            lambda x, weights: search_affine(x, weights, levels, scale_levels, rounds=1), x, weights
        )
        return scales, lows, heads

    def affine(self, parameters: Parameters) -> Affine:
        scales, lows, heads = parameters
        return _affine(heads[..., :1] * scales, 0, self._levels, -(heads[..., 1:] * lows))

    def packed(self, levels: torch.Tensor, parameters: Parameters) -> torch.Tensor:
        scales, lows, heads = parameters
        codes = levels.view(len(levels), self.runs, -1).to(torch.uint8)
        fields = scales.to(torch.uint8), codes, lows.to(torch.uint8), heads.to(torch.float16)
        is_q2 = self.scheme.type == "Q2_K"
        return pack_q2(*fields) if is_q2 else pack_affine(*fields, self.scheme.bits)


class KSignedGrid(RunGrid):
    """Q3_K and Q6_K: `d * scale * code`."""

    def __init__(self, scheme: GgufScheme):
        super().__init__(scheme, 16)
        self._middle, self._scale_middle = SIGNED[scheme.type]

    def search(self, x: torch.Tensor, weights: torch.Tensor) -> Parameters:
        scales, _, head = in_chunks(
            lambda x, weights: search_whole(x, weights, self._middle, self._scale_middle),
            x,
            weights,
        )
        return scales, head

    def affine(self, parameters: Parameters) -> Affine:
        scales, head = parameters
        return _affine(head * scales, -self._middle, self._middle - 1)

    def packed(self, levels: torch.Tensor, parameters: Parameters) -> torch.Tensor:
        scales, head = parameters
        pack = pack_q3 if self.scheme.type == "Q3_K" else pack_signed
        codes = levels.add_(self._middle).to(torch.uint8)
        return pack(scales.to(torch.int8), codes, head.to(torch.float16))


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
