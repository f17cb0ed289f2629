"""E8P lattice codes between Hadamard transforms (QuIP#): codebook, tensor, the grid of one weight, and kind.

The grid has vectors of 8 transformed weights, each the nearest point of the codebook; error feedback over it
is QuIP#'s block LDLQ. A point and its residual cannot be told from their sum.

Tseng et al., "QuIP#: Even Better LLM Quantization with Hadamard Incoherence and Lattice Codebooks", ICML 2024
(arXiv:2402.04396). E8P (E8 padded) has 65,536 points of the E8 lattice, shifted by a quarter, from 256
patterns of magnitudes of D8 + 1/2: all 227 whose squared norm is at most 10, and 29 of those with 12. The
code of 16 bits, as QuIP-for-all stores it (`codebook/e8p12.py`; QuIP# has the signs in another order):

    bits 8 to 15   the pattern
    bits 0 to 7    signs, 1 for minus, of the channels in `SIGN_BITS`; where the number of ones is odd, bit 0
                   is turned over, and 1/4 is taken away from all eight numbers; else it is added

What 2 bits leave over is quantized again: for 4 bits in E8P, for 3 bits among 256 points of E8 itself, in
units of `RESIDUAL_STEPS`. The nearest code is exact: for a target the best signs of a pattern are its own,
but for one of a wrong parity, where the channel of the least product of magnitudes is turned over.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from typing import NamedTuple

import torch

from ....base.errors import BadInput
from ..base.grid import Parameters
from ..base.incoherence import (
    HadamardTransform,
    Incoherence,
    TransformedGrid,
    TransformedKind,
    TransformedTensor,
    seed_of,
    spread_evenly,
    whole_width,
)
from .scheme import E8pScheme

DIM = 8
CPU = torch.device("cpu")
SIGN_BITS = (7, 5, 6, 4, 3, 1, 2, 0)
"""The bit of each channel's sign. That of channel 7 counts from what makes the pattern's own sum even."""
# Channels of the 1/2 in the patterns of squared norm 12; the other five are 3/2. QuIP#'s choice and order.
_HALVES = (
    "123 023 013 012 367 357 347 356 346 345 267 257 247 256 246 "
    "245 167 157 147 156 146 045 067 057 047 056 046 014 237"
)


@lru_cache
def patterns(device: torch.device = CPU) -> torch.Tensor:
    """Magnitudes float32 `[256, 8]`, by squared norm up to 10 and lexicographic order, then 12; read-only."""
    every = product((0.5, 1.5, 2.5), repeat=DIM)
    inside = [
        magnitudes for magnitudes in every if sum(value * value for value in magnitudes) <= 10
    ]
    padding = [[0.5 if str(i) in halves else 1.5 for i in range(DIM)] for halves in _HALVES.split()]
    return torch.tensor([*inside, *padding], device=CPU).to(device)


@lru_cache
def points(device: torch.device = CPU) -> torch.Tensor:
    """The point of every code, float32 `[65536, 8]`."""
    magnitudes = patterns().clone()
    magnitudes[:, DIM - 1] *= 1 - 2 * (magnitudes.sum(dim=1) % 2)
    stored = torch.arange(256, device=CPU)
    odd = torch.stack([stored >> bit & 1 for bit in range(8)]).sum(dim=0) % 2
    minus = torch.stack([(stored ^ odd) >> bit & 1 for bit in SIGN_BITS], dim=1)
    signed = magnitudes[:, None] * (1 - 2 * minus)
    return (signed + 0.25 * (1 - 2 * odd)[:, None]).flatten(0, 1).to(device)


@lru_cache
def residual_points(device: torch.device = CPU) -> torch.Tensor:
    """256 points of E8 float32 `[256, 8]`: those of squared norm up to 2, then 15 of the 16 with one ±2.
    Whole numbers come first, in lexicographic order, then halves (QuIP#, `latticee8_padded12_rvq3bit.py`)."""
    inside = [
        point
        for values in ((-1, 0, 1), (-0.5, 0.5))
        for point in product(values, repeat=DIM)
        if sum(point) % 2 == 0 and sum(value * value for value in point) <= 2
    ]
    axes = 2 * torch.eye(DIM, device=CPU)
    return torch.cat([torch.tensor(inside, device=CPU), axes, -axes[:-1]]).to(device)


SHIFT = 0.25
RESIDUAL_STEPS = {3: 1 / 2.04, 4: 1 / 3.45}
"""Steps of the residual's points, by bits (QuIP#'s `opt_resid_scale`)."""
# Operations of a GEMM in the time of a search for one weight: 116,000 to 129,000, measured.
_SEARCH = 120_000
_AT_ONCE = 2048  # targets: 2 MiB for a number of each pattern and shift


class Codes(NamedTuple):
    """Codes int32 `[n]` of vectors of 8 weights, and of what they leave over; None with 2 bits."""

    codes: torch.Tensor
    residual: torch.Tensor | None


def nearest(targets: torch.Tensor, bits: int) -> Codes:
    """Codes of vectors float32 `[n, 8]`: the nearest point, and the point nearest to what it leaves over."""
    codes = nearest_codes(targets)
    if bits == 2:
        return Codes(codes, None)
    rest = (targets - values_of(Codes(codes, None), 2)) / RESIDUAL_STEPS[bits]
    if bits == 4:
        return Codes(codes, nearest_codes(rest))
    table = residual_points(targets.device)
    scores = torch.addmm(-table.square().sum(dim=1), rest, table.T, alpha=2)
    return Codes(codes, scores.argmax(dim=1).to(torch.int32))


def values_of(stored: Codes, bits: int) -> torch.Tensor:
    table = points(stored.codes.device)
    values = table[stored.codes.long() & 0xFFFF]
    if stored.residual is None:
        return values
    if bits == 3:
        table = residual_points(stored.codes.device)
    return values.add_(table[stored.residual.long() & 0xFFFF], alpha=RESIDUAL_STEPS[bits])


def nearest_codes(targets: torch.Tensor) -> torch.Tensor:
    return torch.cat([_nearest_codes(part) for part in targets.split(_AT_ONCE)])


def _nearest_codes(targets: torch.Tensor) -> torch.Tensor:
    table = patterns(targets.device)
    odd = table.sum(dim=1) % 2  # of the patterns' own sums
    unshifted = torch.stack([targets - SHIFT, targets + SHIFT])
    magnitudes, minus = unshifted.abs(), unshifted < 0
    # A minus changes a sum by an odd number, and the sum must be even.
    wrong = (odd - (minus.sum(dim=-1, keepdim=True) % 2)).abs_()
    least = magnitudes[..., :1] * table[:, 0]
    for channel in range(1, DIM):
        torch.minimum(least, magnitudes[..., channel, None] * table[:, channel], out=least)
    scores = 2 * magnitudes @ table.T - table.square().sum(dim=1)
    scores.addcmul_(least, wrong, value=-4)
    best, pattern = scores.max(dim=-1)
    errors = unshifted.square().sum(dim=-1) - best
    lowered = errors[1] < errors[0]
    chosen = lowered.long()[None]
    wrong = wrong.gather(-1, pattern[..., None])
    pattern = pattern.gather(0, chosen)[0]
    magnitudes, minus, wrong = (
        part.gather(0, chosen[..., None].expand(1, *part.shape[1:]))[0]
        for part in (magnitudes, minus, wrong)
    )
    turned = (magnitudes * table[pattern]).argmin(dim=1, keepdim=True)
    minus = minus ^ torch.zeros_like(minus).scatter_(1, turned, wrong > 0)
    minus[:, DIM - 1] ^= odd[pattern] > 0
    bits = torch.tensor(SIGN_BITS, dtype=torch.int32, device=CPU).to(targets.device)
    signs = (minus.to(torch.int32) << bits).sum(dim=1, dtype=torch.int32) ^ lowered.to(torch.int32)
    return pattern.to(torch.int32) << 8 | signs


MULTIPLE = 32
"""A weight's inputs are a multiple of it."""
_RESIDUAL_BYTES = {2: 0, 3: 1, 4: 2}


def pack_codes(codes: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
    """`Qidxs` of codes and residual: int16 `[out, in / 8]`, or int32 `[out, in * bits / 32]`."""
    if residual is None:
        return codes
    parts = (part.contiguous().view(torch.uint8) for part in (residual, codes))
    both = [part.unflatten(1, (codes.shape[1], -1)) for part in parts]
    return torch.cat(both, dim=2).flatten(1).view(torch.int32)


def unpack_codes(words: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    if bits == 2:
        return words, None
    stored = words.contiguous().view(torch.uint8).unflatten(1, (-1, bits))
    residual, codes = stored.split([_RESIDUAL_BYTES[bits], 2], dim=2)
    residual = residual.contiguous().flatten(1)
    if bits == 4:
        residual = residual.view(torch.int16)
    return codes.contiguous().flatten(1).view(torch.int16), residual


def words_of(in_features: int, bits: int) -> int:
    return in_features // DIM if bits == 2 else in_features * bits // 32


@dataclass(frozen=True, slots=True)
class E8pTensor(TransformedTensor):
    """`w = diag(sv) V (scale Q) Uᵀ diag(su)`, `Q` `[out, in]` the points of the codes, `U` and `V` Hadamard.

    Attributes:
        codes: codes of E8P, int16 `[out, in / 8]`.
        su, sv: signs and scales of inputs and outputs, float16 `[in]` and `[out]`.
        scale: scale of the whole weight or of each row of `Q`, float32 `[]` or `[out]`.
        residual: codes of the rest `[out, in / 8]`: uint8 with 3 bits, int16 with 4, None with 2.
        left, right: the odd factors of `U` and `V`, float32; None where a width is a power of two.
    """

    codes: torch.Tensor
    su: torch.Tensor
    sv: torch.Tensor
    scale: torch.Tensor
    scheme: E8pScheme
    residual: torch.Tensor | None = None
    left: torch.Tensor | None = None
    right: torch.Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.sv), len(self.su)

    @property
    def transforms(self) -> Incoherence:
        return Incoherence(
            self.su.float(),
            self.sv.float(),
            HadamardTransform(self.in_features, self.left),
            HadamardTransform(self.out_features, self.right),
        )

    def inner(self, rows: slice = slice(None)) -> torch.Tensor:
        """The points of some rows of codes, scaled: float32 `[rows, in]`."""
        residual = None if self.residual is None else self.residual[rows].flatten()
        stored = Codes(self.codes[rows].flatten(), residual)
        values = values_of(stored, self.scheme.bits).view(-1, self.in_features)
        scale = self.scale if self.scale.dim() == 0 else self.scale[rows, None]
        return values.mul_(scale)

    def with_scales(self, inputs: torch.Tensor, outputs: torch.Tensor) -> E8pTensor:
        return replace(self, su=inputs.half(), sv=outputs.half())

    def rows(self, rows: slice) -> E8pTensor:
        """All, or BadInput: a Hadamard transform mixes all outputs."""
        if rows.indices(self.out_features) != (0, self.out_features, 1):
            raise BadInput(
                f"{self.scheme.label} weights cannot be divided along their outputs, which one Hadamard "
                "transform mixes: choose another method"
            )
        return self


# Standard deviation of a normal source that has the least error, by bits (`opt_scale` in QuIP#; that of 4
# bits is 1.03 there, which has a tenth more error behind the exact search).
_DEVIATIONS = {2: 1.03, 3: 0.98, 4: 0.94}


class E8pGrid(TransformedGrid[E8pScheme, E8pTensor]):
    """The points of E8P, for a weight whose inputs are transformed as a whole, and so are its outputs."""

    vector = DIM

    def __init__(self, scheme: E8pScheme, transforms: Incoherence):
        super().__init__(scheme, transforms)
        inputs, outputs = len(transforms.inputs), len(transforms.outputs)
        self.codes = torch.zeros(inputs // DIM, outputs, dtype=torch.int32)
        self.residual = torch.zeros_like(self.codes)

    def tensor(self, values: torch.Tensor, parameters: Parameters) -> E8pTensor:
        bits, sides = self.scheme.bits, self.transforms
        stored = {3: torch.uint8, 4: torch.int16}
        turns = sides.turn_inputs, sides.turn_outputs
        left, right = (turn.factor for turn in turns if isinstance(turn, HadamardTransform))
        codes, residual = (part.T.contiguous() for part in (self.codes, self.residual))
        rest = None if bits == 2 else residual.to(stored[bits])
        scales = sides.inputs.half(), sides.outputs.half(), torch.ones(())
        return E8pTensor(codes.to(torch.int16), *scales, self.scheme, rest, left, right)

    def nearest_values(self, targets: torch.Tensor, first: int) -> torch.Tensor:
        vectors = targets.unflatten(0, (-1, DIM)).transpose(1, 2).reshape(-1, DIM)
        nearest_codes = nearest(vectors, self.scheme.bits)
        rows = slice(first // DIM, (first + len(targets)) // DIM)
        for kept, codes in zip((self.codes, self.residual), nearest_codes, strict=True):
            if codes is not None:
                kept[rows] = codes.view(-1, targets.shape[1]).to(kept.device)
        values = values_of(nearest_codes, self.scheme.bits)
        return values.view(-1, targets.shape[1], DIM).transpose(1, 2).flatten(0, 1)


class E8pKind(TransformedKind[E8pScheme]):
    """Points of E8P."""

    def grid_of(self, weight: torch.Tensor, name: str) -> E8pGrid:
        outputs, inputs = weight.shape
        if inputs % MULTIPLE:
            raise BadInput(
                f"{name} has {inputs} inputs: E8P codes need a multiple of {MULTIPLE}; --ignore it, or "
                "choose another method"
            )
        turns = whole_width(inputs), whole_width(outputs)
        deviation = _DEVIATIONS[self.scheme.bits]
        return E8pGrid(self.scheme, spread_evenly(weight, deviation, seed_of(name), *turns))

    @property
    def search_operations(self) -> float:
        searches = 2 if self.scheme.bits == 4 else 1
        return 2 * searches * _SEARCH  # with feedback, and without it for the report

    def blank(self, out_features: int, in_features: int, scale_dtype: torch.dtype) -> E8pTensor:
        codes = torch.zeros(out_features, in_features // DIM, dtype=torch.int16)
        residual = {2: None, 3: codes.to(torch.uint8), 4: codes}[self.scheme.bits]
        su, sv = (torch.ones(size).half() for size in (in_features, out_features))
        left, right = (whole_width(size).factor for size in (in_features, out_features))
        return E8pTensor(codes, su, sv, torch.ones(()), self.scheme, residual, left, right)


KIND = E8pKind
