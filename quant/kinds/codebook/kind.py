"""Codes into a fixed table of 16 values, nf4 or fp4, bit-identical to bitsandbytes: tensor, grid and kind.

Dettmers et al., "QLoRA: Efficient Finetuning of Quantized LLMs", NeurIPS 2023 (arXiv:2305.14314), and
"8-bit Optimizers via Block-wise Quantization", ICLR 2022 (arXiv:2110.02861) for the quantized absmax.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import torch
from torch.nn import functional

from ...base.device import HOST, rows_at_once
from ..base.grid import Affine, Parameters, Table
from ..base.kind import Kind, Rounding
from ..base.ranged import Line, RangedGrid
from ..base.tensor import QuantizedTensor
from .scheme import CodebookScheme

# Quantiles of a normal distribution, scaled to [-1, 1], with an exact zero: bitsandbytes' float32 values.
NF4_TABLE = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
    *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
    *(0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941),
    *(0.7229568362236023, 1.0),
)
# Sign, then three bits of magnitude over a largest value of 12.
_FP4_MAGNITUDES = (0.0, 0.0052083333, 0.6666666667, 1.0, 0.3333333333, 0.5, 0.1666666667, 0.25)
FP4_TABLE = (*_FP4_MAGNITUDES, *(-value for value in _FP4_MAGNITUDES))
_TABLES = {"nf4": NF4_TABLE, "fp4": FP4_TABLE}

NESTED_BLOCK = 256  # of bitsandbytes' double quantization


def codebook(kind: str) -> torch.Tensor:
    return torch.tensor(_TABLES[kind], dtype=torch.float32)


@dataclass(frozen=True, slots=True)
class CodebookTensor(QuantizedTensor):
    """`w = table[code] * absmax`, one absmax per `block_size` weights in row-major order.

    Attributes:
        absmax: `[blocks]`: float32, or with double quantization uint8 codes into `nested_map`.
        nested_absmax, nested_map: float32 `[ceil(blocks / 256)]` and `[256]`, double quantization only.
        nested_offset: mean that is subtracted from the absmax values, float32 `[1]`, likewise.
    """

    codes: torch.Tensor
    absmax: torch.Tensor
    scheme: CodebookScheme
    nested_absmax: torch.Tensor | None = None
    nested_map: torch.Tensor | None = None
    nested_offset: torch.Tensor | None = None

    def magnitudes(self) -> torch.Tensor:
        if self.nested_absmax is None:
            return self.absmax
        assert self.nested_map is not None and self.nested_offset is not None
        values = self.nested_map[self.absmax.long()]
        outer = self.nested_absmax.repeat_interleave(NESTED_BLOCK)[: values.numel()]
        return values * outer + self.nested_offset

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        table = codebook(self.scheme.kind).to(self.codes.device)
        values = table.index_select(0, self.codes.flatten().to(torch.int32))
        magnitudes, size = self.magnitudes(), self.scheme.block_size
        whole = values.numel() // size
        values[: whole * size].view(whole, size).mul_(magnitudes[:whole].unsqueeze(1))
        if whole < magnitudes.numel():
            values[whole * size :].mul_(magnitudes[-1])
        return values.view(self.shape).to(dtype)

    def rows(self, rows: slice) -> CodebookTensor:
        start, stop, _ = rows.indices(self.out_features)
        size, width = self.scheme.block_size, self.in_features
        if start * width % size or (stop * width % size and stop < self.out_features):
            raise ValueError("rows of a codebook tensor begin and end with a block")
        blocks = slice(start * width // size, -(-stop * width // size))
        plain = replace(self.scheme, double_quant=False)
        return CodebookTensor(self.codes[rows], self.magnitudes()[blocks], plain)


_PIECE = 2**18


class CodebookGrid(RangedGrid):
    """A table of 16 values times the absmax of a block (nf4, fp4): float32 `[out, groups]`. If blocks run
    over a row's end, or absmax values are quantized, the weight is one group, whose parameters are the
    dequantized absmax of all blocks and the tensors they are stored in."""

    of_integers = False

    def __init__(self, scheme: CodebookScheme, out_features: int, in_features: int):
        self.scheme, self._shape = scheme, (out_features, in_features)
        self.rows_alone = in_features % scheme.block_size == 0 and not scheme.double_quant
        self.group = scheme.block_size if self.rows_alone else in_features
        self._table = Table(codebook(scheme.kind).unique())

    def fit(self, values: torch.Tensor, importance: torch.Tensor | None = None) -> Parameters:
        if self.rows_alone:
            return super().fit(values, importance)
        absmax = _normalized(values.flatten(), self.scheme.block_size)[1]
        if not self.scheme.double_quant:
            return (absmax,)
        codes, *nested = _nested(absmax)
        stored = CodebookTensor(codes.view(1, -1), codes, self.scheme, *nested)
        return (stored.magnitudes(), codes, *nested)

    def ranges(self, low: torch.Tensor, high: torch.Tensor) -> Parameters:
        return (torch.maximum(-low, high),)

    def refitted(self, line: Line, parameters: Parameters) -> Parameters:
        return (line.slope(parameters[0]),)

    def affine(self, parameters: Parameters) -> Affine:
        step = parameters[0].unsqueeze(-1)
        if not self.rows_alone:
            out_features, in_features = self._shape
            step = parameters[0].repeat_interleave(self.scheme.block_size)
            step = step[: out_features * in_features].view(out_features, 1, in_features)
        return Affine(torch.where(step == 0, 1.0, step))

    def snap(self, scaled: torch.Tensor, affine: Affine) -> None:
        self._table.snap(scaled)

    def coded(self, levels: torch.Tensor, parameters: Parameters) -> CodebookTensor:
        codes = nearest(levels, codebook(self.scheme.kind))
        if not self.scheme.double_quant:
            return CodebookTensor(codes, parameters[0].flatten(), self.scheme)
        _, *nested = parameters
        return CodebookTensor(codes, nested[0], self.scheme, *nested[1:])


def _nested(absmax: torch.Tensor) -> Parameters:
    """Codes of doubly quantized absmax `[blocks]`, and the absmax, map and offset that they go with."""
    offset = absmax.mean()
    nested_map = dynamic_map(absmax.device)
    nested, nested_absmax = _normalized(absmax - offset, NESTED_BLOCK)
    codes = nearest(nested, nested_map).flatten()[: absmax.numel()]
    return codes, nested_absmax, nested_map.clone(), offset.view(1)


def _normalized(values: torch.Tensor, block_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Blocks `[blocks, block_size]` within -1..1, and absmax; zeros become NaN, 0 times infinity."""
    blocks = functional.pad(values, (0, -values.numel() % block_size)).view(-1, block_size)
    absmax = blocks.abs().amax(dim=1)
    return (blocks * (1 / absmax).unsqueeze(1)).clamp_(-1, 1), absmax


def nearest(values: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Codes (uint8) of the nearest table values; of two equally near, the lower code; 0 for NaN."""
    ordered, codes = table.sort(stable=True)
    first = torch.cat([torch.ones(1, dtype=torch.bool), ordered[1:] != ordered[:-1]])
    ordered, codes = ordered[first], codes[first].to(torch.uint8)  # fp4 has two zeros
    chosen = torch.empty(values.numel(), dtype=torch.uint8)
    # In chunks, because the intermediate indices take several times the memory of the values.
    at_once = rows_at_once(values.device, _PIECE, 1)
    for piece, out in zip(values.flatten().split(at_once), chosen.split(at_once), strict=True):
        above = torch.searchsorted(ordered, piece).clamp_(1, ordered.numel() - 1)
        below = above - 1
        to_above, to_below = (ordered[above] - piece).abs_(), (piece - ordered[below]).abs_()
        upper, lower = codes[above], codes[below]
        take_upper = (to_above < to_below) | ((to_above == to_below) & (upper < lower))
        out.copy_(torch.where(take_upper, upper, lower).masked_fill_(piece.isnan(), 0))
    return chosen.view(values.shape)


@cache
def dynamic_map(device: torch.device = HOST) -> torch.Tensor:
    """The 256 values of bitsandbytes' signed "dynamic" 8-bit type, ascending, float32. For each of seven
    decades `10**-6 .. 1`, the means of 1, 2, .. 64 equal steps from 0.1 to 1, with both signs, and 0 and 1.
    The least value is -1, to which bitsandbytes' CPU code moves it before use."""
    values = [0.0, 1.0]
    for decade in range(7):
        edges = torch.linspace(0.1, 1, 2**decade + 1, dtype=torch.float32, device=HOST)
        means = (10 ** (decade - 6) * ((edges[:-1] + edges[1:]) / 2)).tolist()
        values += means + [-mean for mean in means]
    ordered = torch.tensor(sorted(values), dtype=torch.float32, device=device)
    ordered[0] = -1
    return ordered


class CodebookKind(Kind[CodebookScheme]):
    """Fixed tables of 16 values."""

    def blank(
        self, out_features: int, in_features: int, scale_dtype: torch.dtype
    ) -> CodebookTensor:
        codes = torch.zeros(out_features, in_features, dtype=torch.uint8)
        blocks = -(-codes.numel() // self.scheme.block_size)
        if not self.scheme.double_quant:
            return CodebookTensor(codes, torch.ones(blocks), self.scheme)
        nested = torch.ones(-(-blocks // NESTED_BLOCK)), torch.zeros(256), torch.zeros(1)
        absmax = torch.zeros(blocks, dtype=torch.uint8)
        return CodebookTensor(codes, absmax, self.scheme, *nested)

    def rounded(self, weight: torch.Tensor, how: Rounding) -> CodebookTensor:
        """Divide blocks by their absmax, and take the nearest table values.

        A block of zeros gets code 0 and absmax 0, as in bitsandbytes. (Its fp4 on a CPU compares with a table
        of four digits; here, as on a GPU, the table is the reader's. The GPU writes small negative weights as
        -0, here they are 0.)
        """
        blocks, absmax = _normalized(weight.flatten(), self.scheme.block_size)
        codes = nearest(blocks, codebook(self.scheme.kind)).flatten()
        codes = codes[: weight.numel()].view(weight.shape)
        if not self.scheme.double_quant:
            return CodebookTensor(codes, absmax, self.scheme)
        stored, *nested = _nested(absmax)
        return CodebookTensor(codes, stored, self.scheme, *nested)

    def grid_for(self, shape: tuple[int, ...], how: Rounding) -> CodebookGrid:
        return CodebookGrid(self.scheme, *shape)


KIND = CodebookKind
