"""Rows of embeddings and of cos/sin tables in C, against torch's."""

from __future__ import annotations

import pytest
import torch
from llmopt.engine.kernels.elementwise.native_rows import (
    cos_sin_rows,
    embedding_rows,
    native_rows,
)
from llmopt.engine.kernels.elementwise.reference import expand_cos_sin
from torch.nn import functional

pytestmark = pytest.mark.skipif(
    native_rows().reason is not None, reason="the C kernels are not compiled"
)
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [0, 1, 5, 130])
def test_they_are_torchs_rows_to_the_bit(rows: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(rows)
    ids = torch.randint(0, 40, (rows,), generator=generator)
    table = torch.randn(40, 23, generator=generator).to(dtype)
    assert torch.equal(embedding_rows(table, ids), functional.embedding(ids, table))
    columns = table.T  # not contiguous
    narrow = ids % len(columns)
    assert torch.equal(embedding_rows(columns, narrow), functional.embedding(narrow, columns))
    cos, sin = torch.randn(2, 40, 12, generator=generator).unbind()
    # Halfway between two of bfloat16, which rounds to the even one; and zeros of both signs.
    cos[:, :4] = torch.tensor([0x3F808000, 0x3F818000, 0, -(2**31)], dtype=torch.int32).view(
        torch.float32
    )
    found = cos_sin_rows(cos, sin, ids, dtype)
    expected = expand_cos_sin(*(part[ids].to(dtype)[:, None] for part in (cos, sin)))
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other) and one.dtype is dtype
        assert torch.equal(one.signbit(), other.signbit())
