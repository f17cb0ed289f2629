"""Trellis codes between Hadamard transforms (EXL3): tensor, the grid of one weight, its noise, and kind.

Points depend on the neighbours': a tile is a vector of 16 input channels for each 16 outputs, which a Viterbi
search rounds as a whole, under error feedback (QTIP's LDLQ). What is quantized is nearly normal, so the error
has one mean square for each width: a search over widths takes noise of that size.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from ....base.errors import BadInput
from ...base.scheme import SUPPORTED_BITS
from ..base.grid import Parameters
from ..base.incoherence import (
    BLOCK,
    Incoherence,
    TransformedGrid,
    TransformedKind,
    TransformedTensor,
    seed_of,
    spread_evenly,
)
from ..integer.kind import round_to_nearest
from ..integer.scheme import IntScheme
from .scheme import TrellisScheme
from .viterbi import (
    LENGTH,
    TILE,
    codebook,
    from_sequences,
    nearest_states,
    pack_states,
    search_operations,
    to_sequences,
    unpack_states,
    values_of,
)


@dataclass(frozen=True, slots=True)
class TrellisTensor(TransformedTensor):
    """`w = (diag(suh) H Q H diag(svh))ᵀ`, with `Q` `[in, out]` the values of the states. `trellis` has packed
    states of tiles, int16 `[in / 16, out / 16, 16 * bits]`; `suh`, `svh` are float16."""

    trellis: torch.Tensor
    suh: torch.Tensor
    svh: torch.Tensor
    scheme: TrellisScheme

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.svh), len(self.suh)

    @property
    def transforms(self) -> Incoherence:
        return Incoherence(self.suh.float(), self.svh.float())

    def inner(self) -> torch.Tensor:
        parts = self.trellis.split(max(1, 2**20 // (self.out_features * TILE)))
        states = (unpack_states(part, self.scheme.bits) for part in parts)
        values = [from_sequences(values_of(part, self.scheme.codebook)) for part in states]
        return torch.cat(values).T.contiguous()

    def with_scales(self, inputs: torch.Tensor, outputs: torch.Tensor) -> TrellisTensor:
        return replace(self, suh=inputs.half(), svh=outputs.half())

    def rows(self, rows: slice) -> TrellisTensor:
        start, stop, _ = rows.indices(self.out_features)
        tiles = self.trellis[:, start // TILE : -(-stop // TILE)]
        return replace(self, trellis=tiles, svh=self.svh[rows])


class TrellisGrid(TransformedGrid[TrellisScheme, TrellisTensor]):
    """The paths of a trellis, for a weight whose transforms are of blocks of 128 channels."""

    vector = TILE

    def __init__(self, scheme: TrellisScheme, transforms: Incoherence):
        super().__init__(scheme, transforms)
        inputs, outputs = len(transforms.inputs), len(transforms.outputs)
        self.states = torch.zeros(inputs // TILE, outputs // TILE, LENGTH, dtype=torch.int32)

    def tensor(self, values: torch.Tensor, parameters: Parameters) -> TrellisTensor:
        packed, sides = pack_states(self.states, self.scheme.bits), self.transforms
        return TrellisTensor(packed, sides.inputs.half(), sides.outputs.half(), self.scheme)

    def nearest_values(self, targets: torch.Tensor, first: int) -> torch.Tensor:
        sequences = to_sequences(targets)
        states = self.states[first // TILE : (first + len(targets)) // TILE].zero_()
        live = sequences.abs().amax(dim=2) > 0  # no search for channels that are always zero
        nearest = nearest_states(sequences[live], self.scheme.bits, self.scheme.codebook)
        states[live] = nearest.to(states.device)
        return from_sequences(values_of(states, self.scheme.codebook)).to(targets)

    def yardstick(self, weight: torch.Tensor) -> torch.Tensor:
        # The nearest path of a trellis would take as long as the method.
        bits = next(bits for bits in SUPPORTED_BITS if bits >= self.scheme.bits)
        return round_to_nearest(weight, IntScheme(bits, 128, False), torch.float16).dequantize()


# Of the standard deviation of a codebook, by bits: what a normal source is multiplied with for the least
# error (measured on 6,144 values). Few bits reach the tails at the price of the middle; many must not clip.
_SPREADS = (1.1, 0.98, 0.91, 0.86, 0.83, 0.8, 0.78, 0.76)
# Mean squared error of the nearest paths, of the mean square of the weights behind the transforms, by bits
# (mul1; tests/quant/grids/test_trellis_noise.py searches for them).
_ERRORS = (0.271, 0.0688, 0.0176, 0.00462, 0.00121, 3.24e-4, 9.31e-5, 2.74e-5)


class TrellisKind(TransformedKind[TrellisScheme]):
    """Paths of a trellis."""

    def grid_of(self, weight: torch.Tensor, name: str) -> TrellisGrid:
        if weight.shape[0] % BLOCK or weight.shape[1] % BLOCK:
            raise BadInput(
                f"{name} is {weight.shape[0]} × {weight.shape[1]}: trellis codes have Hadamard transforms "
                f"of {BLOCK} channels, which do not divide it"
            )
        deviation = float(codebook(self.scheme.codebook).astype("float64").std())
        deviation *= _SPREADS[self.scheme.bits - 1]
        return TrellisGrid(self.scheme, spread_evenly(weight, deviation, seed_of(name)))

    @property
    def search_operations(self) -> float:
        return search_operations(self.scheme.bits)

    def blank(self, out_features: int, in_features: int, scale_dtype: torch.dtype) -> TrellisTensor:
        words = out_features // TILE, TILE * self.scheme.bits
        trellis = torch.zeros(in_features // TILE, *words, dtype=torch.int16)
        into, out_of = (torch.ones(size).half() for size in (in_features, out_features))
        return TrellisTensor(trellis, into, out_of, self.scheme)

    def noisy(self, weight: torch.Tensor, name: str) -> torch.Tensor:
        """The weight with noise as large as the error of its nearest paths, the same for a name."""
        transforms = self.grid_of(weight, name).transforms
        values = transforms.forward(weight)
        generator = torch.Generator().manual_seed(seed_of(name))
        noise = torch.randn(values.shape, generator=generator, device=generator.device).to(values)
        deviation = (_ERRORS[self.scheme.bits - 1] * values.square().mean()).sqrt()
        return transforms.backward(values + noise * deviation)


KIND = TrellisKind
