"""Dense-and-sparse weights (SqueezeLLM): a lookup table per output channel, and CSR outliers."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from ..kinds.lookup.scheme import LookupScheme
from .base import QuantizedTensor

_ROWS = 256  # rows per chunk, because 64-bit indices take twice the memory of the weights


@dataclass(frozen=True, slots=True)
class LookupTensor(QuantizedTensor):
    """`w[o, i] = table[o, codes[o, i]] + sparse[o, i]`.

    Attributes:
        codes: uint8 `[out, in]`.
        table: float16 `[out, 2**bits]`, ascending.
        scheme: width and share of sparse weights.
        sparse_rows: int32 `[out + 1]`, CSR row pointers of the sparse weights.
        sparse_columns: int32 `[nonzeros]`.
        sparse_values: float16 `[nonzeros]`, the difference of the weight from its table value.
    """

    codes: torch.Tensor
    table: torch.Tensor
    scheme: LookupScheme
    sparse_rows: torch.Tensor | None = None
    sparse_columns: torch.Tensor | None = None
    sparse_values: torch.Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], self.codes.shape[1]

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
        held = slice(int(offsets[0]), int(offsets[-1]))
        return replace(
            chosen,
            sparse_rows=offsets - offsets[0],
            sparse_columns=self.sparse_columns[held],
            sparse_values=self.sparse_values[held],
        )
