"""Dense-and-sparse rounding: a lookup table per output channel, and sparse float weights."""

from __future__ import annotations

import torch

from ..base.errors import BadInput
from ..kinds.lookup.scheme import LookupScheme
from ..tensors.lookup import LookupTensor
from .base import Grid, Parameters
from .lookup_kmeans import fit_tables, sort_rows

_ROWS = 256  # rows per chunk, because indices take twice the memory of the weights
_PIECE = 2**18


class LookupGrid(Grid):
    """A table for each output channel, and sparse float weights.

    A row is one group. Its parameters are the tables, float16 `[out, 1, 2**bits]`, and the mask of the sparse
    weights `[out, 1, in]`, which are the largest.
    """

    def __init__(self, scheme: LookupScheme, in_features: int):
        self.scheme, self.group = scheme, in_features
        # Sparse weights are the largest of all rows.
        self.rows_alone = not scheme.sparse_fraction

    def fit(self, values: torch.Tensor, importance: torch.Tensor | None = None) -> Parameters:
        weight = values.flatten(1)
        kept = largest_weights(weight, self.scheme.sparse_fraction)
        table = uniform_tables(weight, kept, self.scheme)
        if importance is not None:
            for begin in range(0, len(weight), _ROWS):
                rows = slice(begin, begin + _ROWS)
                spread = importance.expand_as(weight[rows]).masked_fill(kept[rows], 0.0)
                table[rows] = fit_tables(sort_rows(weight[rows], spread), table[rows])
        return table.to(torch.float16).unsqueeze(1), kept.unsqueeze(1)

    def round(self, values: torch.Tensor, parameters: Parameters) -> torch.Tensor:
        return self.tensor(values.flatten(1), parameters).dequantize().view(values.shape)

    def columns(self, parameters: Parameters) -> LookupColumns:
        return LookupColumns(*parameters)

    def tensor(self, values: torch.Tensor, parameters: Parameters) -> LookupTensor:
        table, kept = (part.squeeze(1) for part in parameters)
        return assign(values, table, kept, self.scheme)


class LookupColumns:
    """The tables `[out, 1, levels]` of a weight, for rounding its columns; sparse weights have no error."""

    def __init__(self, table: torch.Tensor, kept: torch.Tensor):
        self._table = table.squeeze(1).to(torch.float32)
        self._middles = (self._table[:, 1:] + self._table[:, :-1]) / 2
        self._kept = kept.squeeze(1).T.contiguous()

    def errors(
        self, targets: torch.Tensor, weights: torch.Tensor, first: int, *, out: torch.Tensor
    ) -> None:
        """See `Columns.errors`."""
        codes = torch.searchsorted(self._middles, targets.unsqueeze(1))
        points = self._table.gather(1, codes).squeeze(1)
        torch.sub(weights, torch.where(self._kept[first], targets, points), out=out)


def round_to_uniform_tables(
    weight: torch.Tensor, scheme: LookupScheme, *, name: str = "weight"
) -> LookupTensor:
    """Data-free quantization (RTN) of a weight `[out, in]` to uniform tables.

    Each table is uniform from the least to the largest weight of its row; the sparse weights are the
    largest of the whole matrix.

    Raises:
        BadInput: the weight does not fit into float16 tables.
    """
    kept = largest_weights(weight, scheme.sparse_fraction)
    return assign(weight, uniform_tables(weight, kept, scheme), kept, scheme, name=name)


def largest_weights(scores: torch.Tensor, fraction: float) -> torch.Tensor:
    """A mask `[out, in]` of the `fraction` of largest magnitudes; ties go to the first."""
    count = round(fraction * scores.numel())
    mask = torch.zeros(scores.numel(), dtype=torch.bool)
    if not count:
        return mask.view(scores.shape)
    pieces, largest = scores.flatten().split(_PIECE), torch.empty(0)
    for piece in pieces:
        largest = torch.cat([largest, piece.abs()])
        largest = largest.topk(min(count, largest.numel()), sorted=False).values
    least = largest.min()
    equal = count - int((largest > least).sum())
    for piece, chosen in zip(pieces, mask.split(_PIECE), strict=True):
        magnitudes = piece.abs()
        chosen.copy_(magnitudes > least)
        first = (magnitudes == least).nonzero()[:equal, 0]
        chosen[first] = True
        equal -= first.numel()
    return mask.view(scores.shape)


def uniform_tables(weight: torch.Tensor, kept: torch.Tensor, scheme: LookupScheme) -> torch.Tensor:
    """Float32 `[out, 2**bits]`, in equal steps over the range of the weights that are not `kept`."""
    low = weight.masked_fill(kept, torch.inf).amin(dim=1, keepdim=True)
    high = weight.masked_fill(kept, -torch.inf).amax(dim=1, keepdim=True)
    empty = low > high  # a row whose weights are all sparse
    low, high = low.masked_fill(empty, 0.0), high.masked_fill(empty, 0.0)
    return low + (high - low) * torch.linspace(0, 1, 2**scheme.bits, device=weight.device)


def assign(
    weight: torch.Tensor,
    table: torch.Tensor,
    kept: torch.Tensor,
    scheme: LookupScheme,
    *,
    name: str = "weight",
) -> LookupTensor:
    """Codes of the nearest values of the stored (float16) tables, and the sparse `kept` weights.

    Args:
        table: float32 `[out, 2**bits]`, ascending.
        kept: mask `[out, in]` of the sparse weights, whose table error is stored too.

    Raises:
        BadInput: a table does not fit into float16.
    """
    stored = table.to(torch.float16)
    if not bool(torch.isfinite(stored).all()):
        raise BadInput(f"{name} holds values too large for float16 tables")
    values = stored.to(torch.float32)
    middles = (values[:, 1:] + values[:, :-1]) / 2
    codes = torch.empty(weight.shape, dtype=torch.uint8)
    for begin in range(0, weight.shape[0], _ROWS):
        rows = slice(begin, begin + _ROWS)
        codes[rows] = torch.searchsorted(middles[rows], weight[rows].contiguous())
    if not scheme.sparse_fraction:
        return LookupTensor(codes, stored, scheme)
    rows, columns = kept.nonzero(as_tuple=True)
    missing = (weight[kept] - values[rows, codes[kept].long()]).to(torch.float16)
    if not bool(torch.isfinite(missing).all()):
        raise BadInput(f"{name} holds values too large for float16 sparse weights")
    begins = torch.zeros(weight.shape[0] + 1, dtype=torch.int32)
    begins[1:] = kept.sum(dim=1).cumsum(0)
    return LookupTensor(
        codes=codes,
        table=stored,
        scheme=scheme,
        sparse_rows=begins,
        sparse_columns=columns.to(torch.int32),
        sparse_values=missing,
    )
