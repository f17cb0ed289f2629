# pyright: reportAssignmentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportPossiblyUnboundVariable=false
"""Linears with trellis and E8P codes on Triton, and the Hadamard transforms of their inputs and outputs.

A transform is a product with one matrix on an axis of the channels, a launch each.
Channels are `[outer, order, inner]`, and a stage multiplies the axis in the middle with a matrix: EXL3's
blocks of 128 are one stage with `inner` 1; QuIP#'s whole widths, Kronecker products of small matrices, are
two (of 128 and of all that is left) up to 65,536 channels. The first stage scales what it reads, or adds up
the partial sums of a split-K GEMM; the last one scales, adds a bias, and puts channels in the order that the
GEMM behind it reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch.nn import functional

from ....quant.kinds.base.incoherence import (
    BLOCK,
    HadamardBlocks,
    HadamardTransform,
    Transform,
    sylvester,
)
from ....quant.kinds.base.tensor import QuantizedTensor
from ....quant.kinds.e8p.kind import E8pTensor
from ....quant.kinds.trellis.kind import TrellisTensor
from ..common.devices import FEW_TOKENS, power_of_two
from .triton_code_gemm import (
    RUN,
    code_gemm,
    dequantize_codes,
    e8p_tiles,
    fits_tensor_memory,
    trellis_tiles,
)
from .triton_linear import TOKENS, crossover_tokens

MOST_ORDER = 512
"""Largest matrix that small ones are joined to."""


@dataclass(frozen=True, slots=True)
class TransformStage:
    """One matrix on one axis.

    Attributes:
        matrix: float32 `[order, order]`, a row for each output. Hadamard's are ±1, exact in every precision.
        inner: channels inside of the axis.
        scale: of the matrix.
        width: of all channels.
        before, after: float32 `[width]`, scales of channels on either side.
        bias: float32 `[width]`, added in the end.
        places: int32 `[width]`, where an output channel is stored.
        stored: channels of an output row.
    """

    matrix: torch.Tensor
    inner: int
    scale: float
    width: int
    before: torch.Tensor | None = None
    after: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    places: torch.Tensor | None = None
    stored: int = 0


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
    INNER: tl.constexpr,
    OUTER: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    COLUMNS: tl.constexpr,
    HAS_BEFORE: tl.constexpr,
    HAS_AFTER: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_PLACES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Grid: tiles of columns, tiles of outputs. A column is a token with its channels outside of the axis."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    is_column = column < num_columns
    token = (column // (OUTER * INNER)).to(tl.int64)
    rest = column % (OUTER * INNER)
    channel = rest // INNER * (ORDER * INNER) + rest % INNER
    output = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    sums = tl.full([OUTPUTS, COLUMNS], 0.0, tl.float32)
    for first in tl.static_range(0, ORDER, INPUTS):
        index = first + tl.arange(0, INPUTS)
        inside = index < ORDER
        matrix = tl.load(
            matrix_ptr + output[:, None] * ORDER + index[None, :],
            mask=(output < ORDER)[:, None] & inside[None, :],
            other=0.0,
        )
        at = channel[None, :] + index[:, None] * INNER
        mask = is_column[None, :] & inside[:, None]
        place = x_ptr + token[None, :] * x_row + at
        x = tl.load(place, mask=mask, other=0.0).to(tl.float32)
        for _ in range(1, num_splits):
            place += x_split
            x += tl.load(place, mask=mask, other=0.0)
        if HAS_BEFORE:
            x *= tl.load(before_ptr + at, mask=mask, other=0.0)
        sums = tl.dot(matrix, x, sums, input_precision=PRECISION)
    at = channel[None, :] + output[:, None] * INNER
    mask = is_column[None, :] & (output < ORDER)[:, None]
    sums *= scale
    if HAS_AFTER:
        sums *= tl.load(after_ptr + at, mask=mask, other=0.0)
    if HAS_BIAS:
        sums += tl.load(bias_ptr + at, mask=mask, other=0.0)
    if HAS_PLACES:
        at = tl.load(place_ptr + at, mask=mask, other=0)
    tl.store(out_ptr + token[None, :] * out_row + at, sums.to(out_ptr.dtype.element_ty), mask=mask)


class TransformedRows:
    """The stages of one transform, with what is fused into the first and the last.

    Args:
        stages: of `stages_of`, in order.
        precision: of products: those of 16-bit rows are taken in tf32.
    """

    def __init__(self, stages: Sequence[TransformStage], dtype: torch.dtype) -> None:
        self._stages = list(stages)
        self._precision = "ieee" if dtype is torch.float32 else "tf32"
        parts = (getattr(each, n) for each in stages for n in ("before", "after", "bias", "places"))
        self.nbytes = sum(part.nbytes for part in parts if part is not None)

    def fuse_bias(self, bias: torch.Tensor) -> None:
        """Add `bias [width]` to what the last stage stores."""
        last = replace(self._stages[-1], bias=bias.to(torch.float32).contiguous())
        self._stages[-1] = last
        self.nbytes += 4 * len(bias)

    def __call__(self, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Rows `[tokens, stored]` in `dtype`, of rows `[tokens, width]` or sums `[splits, tokens, *]`."""
        for number, stage in enumerate(self._stages):
            is_last = number == len(self._stages) - 1
            x = self._apply(stage, x, dtype if is_last else torch.float32)
        return x

    def _apply(self, stage: TransformStage, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        x = x if x.stride(-1) == 1 else x.contiguous()
        tokens, stored = x.shape[-2], stage.stored or stage.width
        # Places that no channel goes to are inputs that a GEMM pads its rows with.
        make = torch.empty if stored == stage.width else torch.zeros
        out = make(tokens, stored, dtype=dtype, device=x.device)
        if not tokens:
            return out
        order = len(stage.matrix)
        num_columns = tokens * (stage.width // order)
        padded = max(16, power_of_two(order))
        is_few = tokens <= FEW_TOKENS
        outputs = min(padded, 32 if is_few else 128)
        columns = 16 if is_few else 64
        _transform[(-(-num_columns // columns), -(-order // outputs))](
            x,
            stage.matrix,
            *(x if each is None else each for each in (stage.before, stage.after, stage.bias)),
            x if stage.places is None else stage.places,
            out,
            num_columns,
            x.stride(-2),
            out.stride(0),
            x.stride(0),
            x.shape[0] if x.dim() == 3 else 1,
            stage.scale,
            ORDER=order,
            INNER=stage.inner,
            OUTER=stage.width // order // stage.inner,
            OUTPUTS=outputs,
            INPUTS=min(padded, 128 if is_few else 64),
            COLUMNS=columns,
            HAS_BEFORE=stage.before is not None,
            HAS_AFTER=stage.after is not None,
            HAS_BIAS=stage.bias is not None,
            HAS_PLACES=stage.places is not None,
            PRECISION=self._precision,
            num_warps=4 if is_few else 8,
        )
        return out


def stages_of(
    transform: Transform, width: int, device: torch.device, *, backward: bool = False
) -> list[TransformStage]:
    """The stages of `Transform.forward`, or of its inverse."""
    if isinstance(transform, HadamardBlocks):
        return [_hadamard(BLOCK, 1, width, device)]
    assert isinstance(transform, HadamardTransform)
    factor = transform.factor
    size = width if factor is None else width // len(factor)
    first = min(BLOCK, size)
    stages, inner = ([_hadamard(first, 1, width, device)] if first > 1 else []), first
    while inner < size and size // inner * (1 if factor is None else len(factor)) > MOST_ORDER:
        step = min(BLOCK, size // inner)
        stages.append(_hadamard(step, inner, width, device))
        inner *= step
    if inner < size or factor is not None:
        rest = _hadamard(size // inner, inner, width, device)
        if factor is not None:
            left = (factor if backward else factor.mT).to(device, torch.float32)
            rest = replace(rest, matrix=torch.kron(left.contiguous(), rest.matrix))
        stages.append(rest)
    return stages


def _hadamard(order: int, inner: int, width: int, device: torch.device) -> TransformStage:
    return TransformStage(sylvester(order, device).sign(), inner, order**-0.5, width)


class TritonTransformedLinear:
    """Fused GEMM of codes up to the crossover, dequantize + cuBLAS above it."""

    def __init__(self, weight: QuantizedTensor, dtype: torch.dtype) -> None:
        assert isinstance(weight, TrellisTensor | E8pTensor)
        is_trellis = isinstance(weight, TrellisTensor)
        self.tiles = tiles = trellis_tiles(weight) if is_trellis else e8p_tiles(weight)
        self._dtype, sides, device = dtype, weight.transforms, tiles.words.device
        inputs = stages_of(sides.turn_inputs, tiles.in_features, device)
        inputs[0] = replace(inputs[0], before=sides.inputs)
        inputs[-1] = replace(inputs[-1], places=tiles.places, stored=tiles.num_runs * RUN)
        self._inputs = TransformedRows(inputs, dtype)
        outputs = stages_of(sides.turn_outputs, tiles.out_features, device, backward=True)
        outputs[-1] = replace(outputs[-1], after=sides.outputs)
        self._outputs = TransformedRows(outputs, dtype)
        self.weight_bytes = tiles.nbytes + self._inputs.nbytes + self._outputs.nbytes
        name = f"{weight.scheme.label}, {tiles.out_features} x {tiles.in_features}, {dtype}"
        ones = torch.ones(max(TOKENS), tiles.num_runs * RUN, dtype=dtype, device=device)
        self._crossover = 0
        if fits_tensor_memory(tiles):
            self._crossover = crossover_tokens(
                name,
                ones,
                lambda x: self._outputs(self._fused(x), dtype),
                lambda x: self._outputs(self._as_floats(x), dtype),
            )

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._multiply(x, x.dtype)

    def in_float32(self, x: torch.Tensor) -> torch.Tensor:
        """The result before it is rounded to the inputs' dtype."""
        return self._multiply(x, torch.float32)

    def fuse_bias(self, bias: torch.Tensor) -> None:
        """Add `bias [out]` to every row, in float32, before the cast to the output dtype."""
        self._outputs.fuse_bias(bias)
        self.weight_bytes += 4 * len(bias)

    def _multiply(self, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        product = self._fused if len(x) <= self._crossover else self._as_floats
        return self._outputs(product(self._inputs(x, self._dtype)), dtype)

    def _fused(self, x: torch.Tensor) -> torch.Tensor:
        return code_gemm(x, self.tiles)

    def _as_floats(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, dequantize_codes(self.tiles, self._dtype))
