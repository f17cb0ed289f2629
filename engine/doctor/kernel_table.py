"""Kernel table: the kernel chosen for each operation on a device, for `llmopt doctor`."""

from __future__ import annotations

import torch

from ...quant.base.scheme import Activations, Scheme
from ...quant.kinds.codebook.scheme import CodebookScheme
from ...quant.kinds.e8p.scheme import E8pScheme
from ...quant.kinds.fp4.scheme import Fp4Scheme
from ...quant.kinds.fp8.scheme import FloatScheme
from ...quant.kinds.ggml.scheme import GgufScheme
from ...quant.kinds.integer.scheme import IntScheme
from ...quant.kinds.lookup.scheme import LookupScheme
from ...quant.kinds.trellis.scheme import TrellisScheme
from ...quant.kinds.vectorwise.scheme import VectorwiseScheme
from ..kernels.attention.dispatch import MASKS, PAGED_ATTENTION, AttentionKernelQuery
from ..kernels.common.dispatch import Choice
from ..kernels.elementwise.dispatch import (
    CLAMPED_SWIGLU_GATE,
    GATE,
    GELU_GATE,
    NORM,
    ROPE_AND_CACHE,
    RowKernelQuery,
)
from ..kernels.linear.linear import LINEAR, LinearKernelQuery
from ..kernels.linear.quantized_linear import QUANTIZED_LINEAR, QuantizedLinearKernelQuery
from ..kernels.moe.dispatch import EXPERTS, ExpertsKernelQuery
from ..sampling.kernels import SAMPLING, SamplingKernelQuery

SCHEMES: tuple[tuple[Scheme, int], ...] = (
    (IntScheme(4, 128, False), 16),
    (IntScheme(4, 128, True), 8),
    (IntScheme(8, -1, True), 16),
    (IntScheme(8, -1, True, Activations("int8")), 16),
    (VectorwiseScheme(), 16),
    (FloatScheme("channel"), 16),
    (FloatScheme("channel", Activations("fp8")), 16),
    (FloatScheme("block", Activations("fp8", "group128")), 16),
    (CodebookScheme("nf4"), 16),
    (Fp4Scheme("nvfp4"), 16),
    (Fp4Scheme("mxfp4"), 16),
    (GgufScheme("Q4_K"), 8),
    (LookupScheme(4), 16),
    (TrellisScheme(2), 16),
    (TrellisScheme(2), 8),
    (E8pScheme(2), 16),
    (E8pScheme(2), 8),
)
"""A scheme of each kind of quantized weight, and the bits of its activations."""


def table(device: torch.device, dtype: torch.dtype) -> list[Choice]:
    """The kernels chosen on `device` for a typical decoder in `dtype`."""
    choices = [
        *(
            PAGED_ATTENTION.explain(AttentionKernelQuery(device.type, dtype, 128, 128, mask))
            for mask in MASKS
        ),
        *(
            operation.explain(RowKernelQuery(device.type, dtype, size))
            for operation, size in (
                (NORM, 4096),
                (GATE, 4096),
                (GELU_GATE, 4096),
                (CLAMPED_SWIGLU_GATE, 4096),
                (ROPE_AND_CACHE, 128),
            )
        ),
        SAMPLING.explain(SamplingKernelQuery(device.type)),
        LINEAR.explain(LinearKernelQuery(device.type, dtype, 4096, 4096)),
        *(
            EXPERTS.explain(ExpertsKernelQuery(device.type, dtype, is_block_fp8=is_block_fp8))
            for is_block_fp8 in (False, True)
        ),
    ]
    for scheme, input_bits in SCHEMES:
        kernel_query = QuantizedLinearKernelQuery(
            device.type, dtype, 4096, 4096, scheme, input_bits
        )
        choices.append(QUANTIZED_LINEAR.explain(kernel_query))
    return choices
