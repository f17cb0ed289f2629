"""Incoherence processing: Hadamard transforms of a weight's inputs and outputs, with signs and scales.

A weight `[in, out]` is `diag(su) H Q H diag(sv)`, with `H` the orthonormal Hadamard matrix of blocks of 128
channels: what is left to quantize, `Q`, is nearly normal whatever the weight looked like (Tseng et al.,
"QuIP#", ICML 2024, arXiv:2402.04396; the blocks, and scales beside the signs, are EXL3's).

The scales are chosen for the least error. Quantization gives all of `Q` the same noise, so that in a block of
outputs of root mean square `r` the squared error is `sum(sv^2) sum(r^2 / sv^2)`, which `sv` in proportion to
`sqrt(r)` makes least; and behind error feedback, where inputs count by the determinant of the Gram matrix,
`su` in proportion to the root mean square of an input channel.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch

BLOCK = 128
# Of the standard deviation of a codebook, by bits: what a normal source is multiplied with for the least
# error (measured on 6,144 values). Few bits reach the tails at the price of the middle; many must not clip.
_SPREADS = (1.1, 0.98, 0.91, 0.86, 0.83, 0.8, 0.78, 0.76)
_LEAST = 1e-6  # of the mean, for channels that are not zero


@lru_cache
def _matrix(device: torch.device) -> torch.Tensor:
    """Sylvester's Hadamard matrix of order 128, orthonormal, float32."""
    matrix = torch.ones(1, 1)
    while len(matrix) < BLOCK:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return (matrix / BLOCK**0.5).to(device)


def hadamard_blocks(values: torch.Tensor) -> torch.Tensor:
    """The transform of blocks of 128 along the last axis; it is its own inverse.

    Args:
        values: float32 `[..., n]`; 128 divides `n`.
    """
    return (values.unflatten(-1, (-1, BLOCK)) @ _matrix(values.device)).flatten(-2)


@dataclass(frozen=True, slots=True)
class Incoherence:
    """The transforms of one weight.

    Attributes:
        inputs: float32 `[in]`, `su`: signs and scales of input channels; 0 where a channel is always zero.
        outputs: float32 `[out]`, `sv`.
    """

    inputs: torch.Tensor
    outputs: torch.Tensor

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        """The weight to quantize `[out, in]`, for a weight `[out, in]`."""
        scaled = weight * _inverse(self.inputs)
        rotated = hadamard_blocks(scaled) * _inverse(self.outputs)[:, None]
        return hadamard_blocks(rotated.T).T.contiguous()

    def backward(self, values: torch.Tensor) -> torch.Tensor:
        """The weight `[out, in]` that quantized values `[out, in]` stand for."""
        rotated = hadamard_blocks(values) * self.inputs
        return (hadamard_blocks(rotated.T) * self.outputs).T.contiguous()

    def of_inputs(self, matrix: torch.Tensor) -> torch.Tensor:
        """A matrix `[in, in]` of products of inputs (a Gram matrix), for the transformed inputs."""
        scaled = hadamard_blocks(matrix * self.inputs * self.inputs[:, None])
        return hadamard_blocks(scaled.T).T.contiguous()


def incoherence(weight: torch.Tensor, deviation: float, bits: int, seed: int) -> Incoherence:
    """Transforms that bring a weight `[out, in]` to the spread that a codebook has its least error at.

    Args:
        deviation: standard deviation of the codebook.
        seed: of the signs.
    """
    generator = torch.Generator().manual_seed(seed)
    outputs = _live(weight.square().mean(dim=1).sqrt().sqrt())
    scaled = weight * _inverse(outputs)[:, None]
    inputs = _live(scaled.square().mean(dim=0).sqrt())
    energy = (scaled * _inverse(inputs)).square()
    energy = energy.unflatten(0, (-1, BLOCK)).mean(dim=1).unflatten(1, (-1, BLOCK)).mean(dim=2)
    # What a block has too much or too little, as where it holds channels that are zero.
    columns = energy.mean(dim=0).sqrt()
    rows = (energy * _inverse(columns.square())).mean(dim=1).sqrt()
    outputs = outputs * rows.repeat_interleave(BLOCK)
    inputs = inputs * columns.repeat_interleave(BLOCK) / (_SPREADS[bits - 1] * deviation)
    whole = outputs[outputs > 0].mean() if bool((outputs > 0).any()) else outputs.new_ones(())
    sides = inputs * whole, outputs / whole
    signed = [side * _signs(len(side), generator).to(side) for side in sides]
    return Incoherence(*(side.half().float() for side in signed))


def _live(scales: torch.Tensor) -> torch.Tensor:
    """Scales, 0 where next to nothing is left of a channel."""
    return torch.where(scales > _LEAST * scales.mean(), scales, 0.0)


def _signs(count: int, generator: torch.Generator) -> torch.Tensor:
    return torch.randint(0, 2, (count,), generator=generator).mul_(2).sub_(1)


def _inverse(scales: torch.Tensor) -> torch.Tensor:
    """1 over each scale; 0 for 0."""
    return torch.where(scales == 0, 0.0, 1 / torch.where(scales == 0, 1.0, scales))
