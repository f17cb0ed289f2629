"""Zero-filled quantized weights, to measure a format's packed size."""

from __future__ import annotations

import torch

from ..base.scheme import Scheme
from ..kinds.codebook.scheme import CodebookScheme
from ..kinds.e8p.scheme import E8pScheme
from ..kinds.fp4.scheme import Fp4Scheme
from ..kinds.fp8.scheme import FloatScheme
from ..kinds.ggml.scheme import GgufScheme
from ..kinds.integer.scheme import IntScheme
from ..kinds.lookup.scheme import LookupScheme
from ..kinds.trellis.scheme import TrellisScheme
from ..kinds.vectorwise.scheme import VectorwiseScheme
from ..trellis.hadamard import whole_width
from .base import QuantizedTensor
from .codebook import NESTED_BLOCK, CodebookTensor
from .e8p import E8pTensor
from .fp4 import Fp4Tensor
from .fp8 import Fp8Tensor
from .gguf import GgufTensor
from .integer import IntTensor
from .lookup import LookupTensor
from .trellis import TrellisTensor
from .vectorwise import VectorwiseTensor


def blank_tensor(
    scheme: Scheme, out_features: int, in_features: int, scale_dtype: torch.dtype
) -> QuantizedTensor:
    """A weight `[out, in]` of a scheme whose every code is 0."""
    codes = torch.zeros(out_features, in_features, dtype=torch.uint8)
    static = scheme.activations is not None and not scheme.activations.dynamic
    input_scale = torch.ones(1) if static else None
    if isinstance(scheme, IntScheme):
        groups = scheme.num_groups(in_features)
        index = torch.arange(in_features, dtype=torch.int32) * groups // in_features
        return IntTensor(
            codes=codes,
            scales=torch.ones(out_features, groups, dtype=scale_dtype),
            zeros=torch.full((out_features, groups), scheme.middle, dtype=torch.uint8),
            scheme=scheme,
            group_index=index.to(torch.int32) if scheme.permuted else None,
            input_scale=input_scale,
        )
    if isinstance(scheme, FloatScheme):
        scales = torch.ones(scheme.scale_shape(out_features, in_features), dtype=scale_dtype)
        return Fp8Tensor(codes.to(torch.float8_e4m3fn), scales, scheme, input_scale)
    if isinstance(scheme, Fp4Scheme):
        nvidia = scheme.kind == "nvfp4"
        blocks = torch.ones(out_features, in_features // scheme.block_size)
        scales = blocks.to(torch.float8_e4m3fn if nvidia else torch.uint8)
        return Fp4Tensor(codes, scales, scheme, torch.ones(1) if nvidia else None, input_scale)
    if isinstance(scheme, CodebookScheme):
        blocks = -(-codes.numel() // scheme.block_size)
        if not scheme.double_quant:
            return CodebookTensor(codes, torch.ones(blocks), scheme)
        return CodebookTensor(
            codes,
            torch.zeros(blocks, dtype=torch.uint8),
            scheme,
            nested_absmax=torch.ones(-(-blocks // NESTED_BLOCK)),
            nested_map=torch.zeros(256),
            nested_offset=torch.zeros(1),
        )
    if isinstance(scheme, VectorwiseScheme):
        return VectorwiseTensor(codes.to(torch.int8), torch.ones(out_features), scheme)
    if isinstance(scheme, GgufScheme):
        width, size = scheme.block
        rows = torch.zeros(out_features, in_features // width * size, dtype=torch.uint8)
        return GgufTensor(rows, scheme)
    if isinstance(scheme, TrellisScheme):
        words = out_features // 16, 16 * scheme.bits
        trellis = torch.zeros(in_features // 16, *words, dtype=torch.int16)
        into, out_of = (torch.ones(size).half() for size in (in_features, out_features))
        return TrellisTensor(trellis, into, out_of, scheme)
    if isinstance(scheme, E8pScheme):
        return _blank_e8p(scheme, out_features, in_features)
    return _blank_lookup(codes, scheme)


def _blank_e8p(scheme: E8pScheme, out_features: int, in_features: int) -> E8pTensor:
    codes = torch.zeros(out_features, in_features // 8, dtype=torch.int16)
    residual = {2: None, 3: codes.to(torch.uint8), 4: codes}[scheme.bits]
    su, sv = (torch.ones(size).half() for size in (in_features, out_features))
    left, right = (whole_width(size).factor for size in (in_features, out_features))
    return E8pTensor(codes, su, sv, torch.ones(()), scheme, residual, left, right)


def _blank_lookup(codes: torch.Tensor, scheme: LookupScheme) -> LookupTensor:
    out_features = codes.shape[0]
    table = torch.zeros(out_features, 2**scheme.bits, dtype=torch.float16)
    if not scheme.sparse_fraction:
        return LookupTensor(codes, table, scheme)
    kept = round(codes.numel() * scheme.sparse_fraction)
    return LookupTensor(
        codes,
        table,
        scheme,
        sparse_rows=torch.zeros(out_features + 1, dtype=torch.int32),
        sparse_columns=torch.zeros(kept, dtype=torch.int32),
        sparse_values=torch.zeros(kept, dtype=torch.float16),
    )
