# pyright: reportAssignmentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportPossiblyUnboundVariable=false
"""Linears with trellis codes on Triton, and the Hadamard transforms of their inputs and outputs.

A transform multiplies blocks of 128 channels with a matrix, in one launch. The input transform also scales
the channels and puts them into the GEMM's order; the output transform also adds the partial sums of split-K,
scales them, and adds a bias.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch.nn import functional

from ....quant.kinds.base.incoherence import BLOCK, sylvester
from ....quant.kinds.base.tensor import QuantizedTensor
from ....quant.kinds.trellis.kind import TrellisTensor
from ..common.devices import FEW_TOKENS
from .triton_code_gemm import RUN, code_gemm, dequantize_codes, trellis_tiles
from .triton_linear import TOKENS, crossover_tokens


@triton.jit(do_not_specialize=["num_columns"])
def _transform(
    x_ptr,
    matrix_ptr,
    before_ptr,
    after_ptr,
    bias_ptr,
    place_ptr,
    out_ptr,
    num_columns,
    x_row,
    out_row,
    x_split,
    num_splits,
    scale,
    ORDER: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Grid: tiles of columns, tiles of outputs. A column is a token's block of channels."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    mask = (column < num_columns)[None, :]
    token = (column // NUM_BLOCKS).to(tl.int64)
    channel = column % NUM_BLOCKS * ORDER
    output = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    sums = tl.full([OUTPUTS, COLUMNS], 0.0, tl.float32)
    for first in tl.static_range(0, ORDER, INPUTS):
        index = first + tl.arange(0, INPUTS)
        matrix = tl.load(matrix_ptr + output[:, None] * ORDER + index[None, :])
        at = channel[None, :] + index[:, None]
        pointers = x_ptr + token[None, :] * x_row + at
        x = tl.load(pointers, mask=mask, other=0.0).to(tl.float32)
        for _ in range(1, num_splits):
            pointers += x_split
            x += tl.load(pointers, mask=mask, other=0.0)
        if before_ptr is not None:
            x *= tl.load(before_ptr + at, mask=mask, other=0.0)
        sums = tl.dot(matrix, x, sums, input_precision=PRECISION)
    at = channel[None, :] + output[:, None]
    sums *= scale
    if after_ptr is not None:
        sums *= tl.load(after_ptr + at, mask=mask, other=0.0)
    if bias_ptr is not None:
        sums += tl.load(bias_ptr + at, mask=mask, other=0.0)
    if place_ptr is not None:
        at = tl.load(place_ptr + at, mask=mask, other=0)
    tl.store(out_ptr + token[None, :] * out_row + at, sums.to(out_ptr.dtype.element_ty), mask=mask)


@dataclass(frozen=True, slots=True)
class BlockTransform:
    """The transform of rows by `matrix`, float32 `[128, 128]` of ±1, with what is fused into its launch.
    `before`, `after`: float32 `[width]` scales; `places`: int32 `[width]`, where an output is stored, in rows
    of `stored` channels (0: `width`). 16-bit rows are multiplied in tf32."""

    matrix: torch.Tensor
    width: int
    precision: str
    before: torch.Tensor | None = None
    after: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    places: torch.Tensor | None = None
    stored: int = 0

    @property
    def nbytes(self) -> int:
        parts = self.before, self.after, self.bias, self.places
        return sum(part.nbytes for part in parts if part is not None)

    def __call__(self, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Rows `[tokens, stored]` in `dtype`, of rows `[tokens, width]` or sums `[splits, tokens, *]`."""
        x = x if x.stride(-1) == 1 else x.contiguous()
        tokens, stored = x.shape[-2], self.stored or self.width
        # Places that no channel goes to are inputs that a GEMM pads its rows with.
        make = torch.empty if stored == self.width else torch.zeros
        out = make(tokens, stored, dtype=dtype, device=x.device)
        if not tokens:
            return out
        num_blocks = self.width // BLOCK
        num_columns = tokens * num_blocks
        is_few = tokens <= FEW_TOKENS
        outputs, columns = (32, 16) if is_few else (BLOCK, 64)
        _transform[(-(-num_columns // columns), BLOCK // outputs)](
            *(x, self.matrix, self.before, self.after, self.bias, self.places, out),
            *(num_columns, x.stride(-2), out.stride(0), x.stride(0)),
            *(x.shape[0] if x.dim() == 3 else 1, BLOCK**-0.5),
            ORDER=BLOCK,
            NUM_BLOCKS=num_blocks,
            OUTPUTS=outputs,
            INPUTS=BLOCK if is_few else 64,
            COLUMNS=columns,
            PRECISION=self.precision,
            num_warps=4 if is_few else 8,
        )
        return out


def block_transform(width: int, dtype: torch.dtype, device: torch.device) -> BlockTransform:
    precision = "ieee" if dtype is torch.float32 else "tf32"
    # The kernel reads signs, which are exact in every dtype, and scales their sums by the norm.
    return BlockTransform(sylvester(BLOCK, device).sign(), width, precision)


class TritonTransformedLinear:
    """Fused GEMM of codes up to the crossover, dequantize + cuBLAS above it."""

    def __init__(self, weight: QuantizedTensor, dtype: torch.dtype) -> None:
        assert isinstance(weight, TrellisTensor)
        self.tiles = tiles = trellis_tiles(weight)
        self._dtype, sides, device = dtype, weight.transforms, tiles.words.device
        inputs = block_transform(tiles.in_features, dtype, device)
        stored = tiles.num_runs * RUN
        self._inputs = replace(inputs, before=sides.inputs, places=tiles.places, stored=stored)
        outputs = block_transform(tiles.out_features, dtype, device)
        self._outputs = replace(outputs, after=sides.outputs)
        self.weight_bytes = tiles.words.nbytes + self._inputs.nbytes + self._outputs.nbytes
        name = f"{weight.scheme.label}, {tiles.out_features} x {tiles.in_features}, {dtype}"
        ones = torch.ones(max(TOKENS), stored, dtype=dtype, device=device)
        self._crossover = crossover_tokens(
            name,
            ones,
            lambda x: self._outputs(code_gemm(x, self.tiles), dtype),
            lambda x: self._outputs(self._dequantized_gemm(x), dtype),
        )

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._multiply(x, x.dtype)

    def in_float32(self, x: torch.Tensor) -> torch.Tensor:
        return self._multiply(x, torch.float32)

    def fuse_bias(self, bias: torch.Tensor) -> None:
        self._outputs = replace(self._outputs, bias=bias.to(torch.float32).contiguous())
        self.weight_bytes += 4 * len(bias)

    def _multiply(self, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        inputs = self._inputs(x, self._dtype)
        is_few = len(x) <= self._crossover
        return self._outputs(
            code_gemm(inputs, self.tiles) if is_few else self._dequantized_gemm(inputs), dtype
        )

    def _dequantized_gemm(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, dequantize_codes(self.tiles, self._dtype))
