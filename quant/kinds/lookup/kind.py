"""Dense-and-sparse weights (SqueezeLLM): tensor, grid, the k-means that fits its tables, and kind.

A weight is a value of its row's table, plus what the sparse matrix has. In weighted 1-D k-means a cluster is
an interval of sorted values: its sums are differences of prefix sums.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from ....base.errors import BadInput
from ..base.grid import Grid, Parameters
from ..base.kind import Kind, Rounding
from ..base.tensor import QuantizedTensor
from .scheme import LookupScheme

_ROWS = 256  # rows per chunk, because indices take twice the memory of the weights


@dataclass(frozen=True, slots=True)
class LookupTensor(QuantizedTensor):
    """`w[o, i] = table[o, codes[o, i]] + sparse[o, i]`.

    Attributes:
        table: float16 `[out, 2**bits]`, ascending.
        sparse_rows, sparse_columns: CSR row pointers int32 `[out + 1]` and columns int32 `[nonzeros]`.
        sparse_values: difference of the weight from its table value, float16 `[nonzeros]`.
    """

    codes: torch.Tensor
    table: torch.Tensor
    scheme: LookupScheme
    sparse_rows: torch.Tensor | None = None
    sparse_columns: torch.Tensor | None = None
    sparse_values: torch.Tensor | None = None

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        table = self.table.to(torch.float32)
        weight = torch.empty(self.shape, device=table.device)
        for begin in range(0, self.out_features, _ROWS):
            rows = slice(begin, begin + _ROWS)
            torch.gather(table[rows], 1, self.codes[rows].long(), out=weight[rows])
        if self.sparse_rows is not None:
            assert self.sparse_columns is not None and self.sparse_values is not None
            counts = self.sparse_rows.diff().long()
            rows = torch.arange(self.out_features, device=counts.device).repeat_interleave(counts)
            values = self.sparse_values.to(torch.float32)
            weight.index_put_((rows, self.sparse_columns.long()), values, accumulate=True)
        return weight.to(dtype)

    def rows(self, rows: slice) -> LookupTensor:
        chosen = replace(self, codes=self.codes[rows], table=self.table[rows])
        if self.sparse_rows is None:
            return chosen
        assert self.sparse_columns is not None and self.sparse_values is not None
        start, stop, _ = rows.indices(self.out_features)
        offsets = self.sparse_rows[start : stop + 1]
        kept = slice(int(offsets[0]), int(offsets[-1]))
        columns, values = self.sparse_columns[kept], self.sparse_values[kept]
        rest = {"sparse_columns": columns, "sparse_values": values}
        return replace(chosen, sparse_rows=offsets - offsets[0], **rest)


_PIECE = 2**18


class LookupGrid(Grid):
    """A float16 table `[out, 1, 2**bits]` for each row, and the mask of its sparse weights, the largest."""

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
        codes = torch.searchsorted(self._middles, targets.unsqueeze(1))
        points = self._table.gather(1, codes).squeeze(1)
        torch.sub(weights, torch.where(self._kept[first], targets, points), out=out)


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
    """Codes of the nearest values of stored tables, ascending `[out, 2**bits]`, and the `kept` weights."""
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


ITERATIONS = 50


class SortedRows(NamedTuple):
    """Sorted values float32 `[rows, n]`, and prefix sums float64 `[rows, n + 1]` of importance (`mass`) and
    importance times value (`moment`)."""

    values: torch.Tensor
    mass: torch.Tensor
    moment: torch.Tensor


def sort_rows(values: torch.Tensor, importance: torch.Tensor) -> SortedRows:
    """Sort rows float32 `[rows, n]`, with prefix sums; a value of importance 0 does not attract a centre."""
    ordered, index = values.sort(dim=1)
    masses = importance.gather(1, index).to(torch.float64)
    start = torch.zeros(values.shape[0], 1, dtype=torch.float64)
    sums = (torch.cat([start, part.cumsum(dim=1)], dim=1) for part in (masses, masses * ordered))
    return SortedRows(ordered, *sums)


def fit_tables(rows: SortedRows, start: torch.Tensor) -> torch.Tensor:
    """Ascending tables `[rows, k]` of (locally) least weighted error, by Lloyd's iterations from `start` and
    from quantiles of the importance."""
    first = _iterate(rows, start.to(torch.float64))
    shares = (torch.arange(start.shape[1], dtype=torch.float64) + 0.5) / start.shape[1]
    wanted = rows.mass[:, -1:] * shares
    index = torch.searchsorted(rows.mass[:, 1:].contiguous(), wanted.contiguous())
    quantiles = rows.values.gather(1, index.clamp_(max=rows.values.shape[1] - 1))
    second = _iterate(rows, quantiles.to(torch.float64))
    take_second = _gain(rows, second) > _gain(rows, first)
    return torch.where(take_second.unsqueeze(1), second, first).to(torch.float32)


def _clusters(rows: SortedRows, centres: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Importance and moment `[rows, k]` of each centre's cluster."""
    middles = ((centres[:, 1:] + centres[:, :-1]) / 2).to(torch.float32)
    borders = torch.searchsorted(rows.values, middles.contiguous())
    first = torch.zeros_like(borders[:, :1])
    edges = torch.cat([first, borders, torch.full_like(first, rows.values.shape[1])], dim=1)
    return rows.mass.gather(1, edges).diff(dim=1), rows.moment.gather(1, edges).diff(dim=1)


def _iterate(rows: SortedRows, centres: torch.Tensor) -> torch.Tensor:
    """Move each centre to the mean of its cluster until none moves; an empty one stays."""
    for _ in range(ITERATIONS):
        mass, moment = _clusters(rows, centres)
        moved = torch.where(mass > 0, moment / mass, centres)
        # Means of adjacent clusters are ordered up to rounding of the prefix sums.
        moved = moved.cummax(dim=1).values
        if torch.equal(moved, centres):
            break
        centres = moved
    return centres


def _gain(rows: SortedRows, centres: torch.Tensor) -> torch.Tensor:
    mass, moment = _clusters(rows, centres)
    return (2 * centres * moment - centres.square() * mass).sum(dim=1)


class LookupKind(Kind[LookupScheme]):
    """Tables of rows, with sparse weights."""

    def blank(self, out_features: int, in_features: int, scale_dtype: torch.dtype) -> LookupTensor:
        codes = torch.zeros(out_features, in_features, dtype=torch.uint8)
        table = torch.zeros(out_features, 2**self.scheme.bits, dtype=torch.float16)
        if not self.scheme.sparse_fraction:
            return LookupTensor(codes, table, self.scheme)
        kept = round(codes.numel() * self.scheme.sparse_fraction)
        rows = torch.linspace(0, kept, out_features + 1).to(torch.int32)
        columns = torch.arange(kept, dtype=torch.int32) % in_features
        return LookupTensor(codes, table, self.scheme, rows, columns, torch.zeros(kept).half())

    def rounded(self, weight: torch.Tensor, how: Rounding) -> LookupTensor:
        kept = largest_weights(weight, self.scheme.sparse_fraction)
        table = uniform_tables(weight, kept, self.scheme)
        return assign(weight, table, kept, self.scheme, name=how.name)

    def grid_for(self, shape: tuple[int, ...], how: Rounding) -> LookupGrid:
        return LookupGrid(self.scheme, shape[1])


KIND = LookupKind
