"""Incoherence processing: Hadamard transforms of a weight's inputs and outputs, with signs and scales.

A weight `[in, out]` is `diag(su) H Q Hᵀ diag(sv)`, `H` an orthonormal Hadamard matrix, of blocks of 128
channels in EXL3: what is left to quantize, `Q`, is nearly normal (QuIP#, ICML 2024, arXiv:2402.04396; scales
beside the signs are EXL3's).

Quantization gives all of `Q` the same noise, so that in a block of outputs of root mean square `r` the
squared error is `sum(sv^2) sum(r^2 / sv^2)`, which `sv` in proportion to `sqrt(r)` makes least; and behind
error feedback `su` in proportion to the root mean square of an input channel. They are fitted again to the
codes.

A width `2^k m` with `m` odd, which QuIP# transforms as a whole, has the Kronecker product of the discrete
cosine transform (DCT-II) of order `m` and Sylvester's Hadamard matrix.

What a code stands for cannot be told from values alone, so that the grid keeps codes while it is solved over.
"""

from __future__ import annotations

import math
import zlib
from abc import abstractmethod
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Generic, Self, TypeVar

import torch

from ...base.scheme import Scheme
from .grid import Grid, Parameters
from .kind import Kind, Rounding
from .tensor import QuantizedTensor

BLOCK = 128


class HadamardBlocks:
    """The orthogonal transform of blocks of 128 along the last axis, float32 `[..., width]`; its own inverse.
    128 divides the width."""

    block = BLOCK

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        blocks = values.contiguous().unflatten(-1, (-1, BLOCK))  # else a product for every row
        return (blocks @ sylvester(BLOCK, values.device)).flatten(-2)

    backward = forward


@dataclass(frozen=True, slots=True)
class HadamardTransform:
    """The transform of a whole width: an odd factor, float32 `[m, m]` or None, and the power of two."""

    block: int
    factor: torch.Tensor | None

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return self._transformed(values, None if self.factor is None else self.factor.mT)

    def backward(self, values: torch.Tensor) -> torch.Tensor:
        return self._transformed(values, self.factor)

    def _transformed(self, values: torch.Tensor, factor: torch.Tensor | None) -> torch.Tensor:
        order = 1 if factor is None else len(factor)
        turned, size = values.contiguous().view(-1, values.shape[-1]), self.block // order
        inner = 1
        while inner < size:  # H is a Kronecker product of small ones
            step = min(BLOCK, size // inner)
            turned = _on_axis(sylvester(step, values.device), turned, inner)
            inner *= step
        if factor is not None:
            turned = _on_axis(factor, turned, size)
        return turned.view(values.shape)


def whole_width(width: int) -> HadamardTransform:
    odd = width // (width & -width)
    return HadamardTransform(width, None if odd == 1 else cosine_factor(odd))


def cosine_factor(order: int) -> torch.Tensor:
    """The matrix of the DCT-II, orthonormal, float32 `[order, order]`."""
    angles = torch.arange(order, dtype=torch.float64)[:, None] * (torch.arange(order) + 0.5)
    matrix = torch.cos(angles * (math.pi / order)) * (2 / order) ** 0.5
    matrix[0] /= 2**0.5
    return matrix.to(torch.float32)


@lru_cache
def sylvester(order: int, device: torch.device) -> torch.Tensor:
    """Sylvester's Hadamard matrix of a power of two, orthonormal, float32."""
    matrix = torch.ones(1, 1)
    while len(matrix) < order:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return (matrix / order**0.5).to(device)


def _on_axis(matrix: torch.Tensor, values: torch.Tensor, inner: int) -> torch.Tensor:
    """`matrix` applied to the axis of `values` `[rows, width]` that has `inner` channels inside of it."""
    if inner == 1:
        return (values.unflatten(1, (-1, len(matrix))) @ matrix.mT).flatten(1)
    return (matrix @ values.unflatten(1, (-1, len(matrix), inner))).flatten(1)


Transform = HadamardBlocks | HadamardTransform
_BLOCKS = HadamardBlocks()
_LEAST = 1e-6  # of the mean, for channels that are not zero


@dataclass(frozen=True, slots=True)
class Incoherence:
    """Transforms of a weight, with signs and scales `su` of inputs, `sv` of outputs; 0: always zero."""

    inputs: torch.Tensor
    outputs: torch.Tensor
    turn_inputs: Transform = _BLOCKS
    turn_outputs: Transform = _BLOCKS

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        """The weight to quantize `[out, in]`, for a weight `[out, in]`."""
        scaled = weight * _inverse(self.inputs)
        rotated = self.turn_inputs.forward(scaled) * _inverse(self.outputs)[:, None]
        return self.turn_outputs.forward(rotated.T).T.contiguous()

    def backward(self, values: torch.Tensor) -> torch.Tensor:
        rotated = self.turn_inputs.backward(values) * self.inputs
        return (self.turn_outputs.backward(rotated.T) * self.outputs).T.contiguous()

    def unscaled(self, values: torch.Tensor) -> torch.Tensor:
        return self.turn_outputs.backward(self.turn_inputs.backward(values).T).T

    def of_inputs(self, matrix: torch.Tensor) -> torch.Tensor:
        """A matrix `[in, in]` of products of inputs (a Gram matrix), for the transformed inputs."""
        scaled = self.turn_inputs.forward(matrix * self.inputs * self.inputs[:, None])
        return self.turn_inputs.forward(scaled.T).T.contiguous()


def spread_evenly(
    weight: torch.Tensor,
    deviation: float,
    seed: int,
    turn_inputs: Transform = _BLOCKS,
    turn_outputs: Transform = _BLOCKS,
) -> Incoherence:
    """Transforms of a weight `[out, in]`, after which its blocks have one root mean square, `deviation`."""
    generator = torch.Generator().manual_seed(seed)
    outputs = _live(weight.square().mean(dim=1).sqrt().sqrt())
    scaled = weight * _inverse(outputs)[:, None]
    inputs = _live(scaled.square().mean(dim=0).sqrt())
    energy = (scaled * _inverse(inputs)).square()
    energy = energy.unflatten(0, (-1, turn_outputs.block)).mean(dim=1)
    energy = energy.unflatten(1, (-1, turn_inputs.block)).mean(dim=2)
    # What a block has too much or too little, as where it holds channels that are zero.
    columns = energy.mean(dim=0).sqrt()
    rows = (energy * _inverse(columns.square())).mean(dim=1).sqrt()
    outputs = outputs * rows.repeat_interleave(turn_outputs.block)
    inputs = inputs * columns.repeat_interleave(turn_inputs.block) / deviation
    whole = outputs[outputs > 0].mean() if bool((outputs > 0).any()) else outputs.new_ones(())
    sides = inputs * whole, outputs / whole
    bits = [torch.randint(0, 2, (len(s),), generator=generator, device="cpu") for s in sides]
    signs = (bit.mul_(2).sub_(1).to(weight) for bit in bits)
    signed = (side * sign for side, sign in zip(sides, signs, strict=True))
    inputs, outputs = (side.half().float() for side in signed)
    return Incoherence(inputs, outputs, turn_inputs, turn_outputs)


def _live(scales: torch.Tensor) -> torch.Tensor:  # 0 where next to nothing is left of a channel
    return torch.where(scales > _LEAST * scales.mean(), scales, 0.0)


def _inverse(scales: torch.Tensor) -> torch.Tensor:
    return torch.where(scales == 0, 0.0, 1 / torch.where(scales == 0, 1.0, scales))


def fitted_scales(
    transforms: Incoherence,
    values: torch.Tensor,
    weight: torch.Tensor,
    gram: torch.Tensor,
    damp: float,
) -> Incoherence:
    """The transforms with scales of least `|X(W - W')ᵀ|²`, for values of the codes and a weight `[out, in]`
    and XᵀX `[in, in]`, to whose diagonal the share `damp` of its mean is added; all float32."""
    gram = gram.clone()
    gram.diagonal().add_(damp * float(gram.diagonal().mean()))
    codes = transforms.unscaled(values)
    wanted = weight @ gram
    outputs, inputs = transforms.outputs, transforms.inputs
    for _ in range(2):
        scaled = codes * inputs
        energy = ((scaled @ gram) * scaled).sum(dim=1)
        fits = (wanted * scaled).sum(dim=1) / energy.clamp(min=1e-30)
        outputs = torch.where((outputs != 0) & (energy > 0), fits, outputs)
        turned = codes * outputs[:, None]
        system = (turned.T @ turned) * gram
        missing = (turned * wanted).sum(dim=0) - system @ inputs
        system.diagonal().add_(damp * float(system.diagonal().mean()) + 1e-30)
        step = torch.linalg.solve(system, missing)
        inputs = torch.where(inputs != 0, inputs + step, 0.0)
    return replace(transforms, inputs=inputs.half().float(), outputs=outputs.half().float())


class TransformedTensor(QuantizedTensor):
    """`w = diag(sv) V Q Uᵀ diag(su)`, `Q` `[out, in]` the values of the codes, `U` and `V` Hadamard."""

    __slots__ = ()

    @property
    @abstractmethod
    def transforms(self) -> Incoherence: ...

    @abstractmethod
    def inner(self) -> torch.Tensor:
        """The quantized values, float32 `[out, in]`."""

    @abstractmethod
    def with_scales(self, inputs: torch.Tensor, outputs: torch.Tensor) -> Self:
        """The same codes with other scales `[in]` and `[out]`, signs included."""

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return self.transforms.backward(self.inner()).to(dtype)


SchemeT = TypeVar("SchemeT", bound=Scheme)
TensorT = TypeVar("TensorT", bound=TransformedTensor)


class TransformedGrid(Grid, Generic[SchemeT, TensorT]):
    """The grid of one weight `[out, in]`, as its transforms leave it."""

    rows_alone = False

    def __init__(self, scheme: SchemeT, transforms: Incoherence):
        self.scheme, self.transforms = scheme, transforms
        self.group = len(transforms.inputs)

    @abstractmethod
    def tensor(self, values: torch.Tensor, parameters: Parameters) -> TensorT:
        """The codes that were kept last, with the transforms."""

    @abstractmethod
    def nearest_values(self, targets: torch.Tensor, first: int) -> torch.Tensor:
        """The values nearest to `targets` `[channels, out]` from channel `first` on; keeps their codes."""

    def fit(self, values: torch.Tensor, importance: torch.Tensor | None = None) -> Parameters:
        return ()

    def columns(self, parameters: Parameters) -> Self:
        return self

    def errors(
        self, targets: torch.Tensor, weights: torch.Tensor, first: int, *, out: torch.Tensor
    ) -> None:
        torch.sub(weights, self.nearest_values(targets, first), out=out)

    def round(self, values: torch.Tensor, parameters: Parameters) -> torch.Tensor:
        return self.nearest_values(values.flatten(1).T, 0).T.unflatten(1, values.shape[1:])

    def nearest(self, weight: torch.Tensor, importance: torch.Tensor | None = None) -> TensorT:
        values = self.transforms.forward(weight).unsqueeze(1)
        return self.tensor(self.round(values, ()).flatten(1), ())

    def yardstick(self, weight: torch.Tensor) -> torch.Tensor:
        return self.nearest(weight).dequantize()


def seed_of(name: str) -> int:
    return zlib.crc32(name.encode())


class TransformedKind(Kind[SchemeT]):
    """A kind whose grids belong to one weight, with its transforms."""

    @abstractmethod
    def grid_of(self, weight: torch.Tensor, name: str) -> TransformedGrid[SchemeT, Any]:
        """The grid of a weight `[out, in]`, whose name seeds the signs; BadInput if the shape is unfit."""

    def rounded(self, weight: torch.Tensor, how: Rounding) -> TransformedTensor:
        return self.grid_of(weight, how.name).nearest(weight)
