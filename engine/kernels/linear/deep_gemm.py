"""Block FP8 linears by DeepGEMM: e4m3 × e4m3 with a scale for each 128 inputs and each 128 × 128 weights."""

from __future__ import annotations

import torch

from ....quant.base.scheme import Scheme
from ....quant.kinds.base.tensor import QuantizedTensor
from ....quant.kinds.fp8.kind import BLOCK, Fp8Tensor
from ....quant.kinds.fp8.scheme import FloatScheme
from ..activations.quantized_activations import ActivationQuant, QuantizedActivations, Rows
from ..common.backends import package, refuses_device

NAME = "deep_gemm"


def refuses_dtype(device: str, dtype: torch.dtype) -> str | None:
    """The reason why it does not support a dtype on a device, installed or not, or None."""
    # Compute capability 10 takes scales that are powers of two, which ours are not.
    if (reason := refuses_device(device, (9,))) is not None:
        return reason
    return None if dtype is torch.bfloat16 else f"its outputs are bfloat16, not {dtype}"


def refuses_deep_gemm(
    device: str, dtype: torch.dtype, scheme: Scheme, out_features: int, in_features: int
) -> str | None:
    """The reason why it does not support a linear, or None."""
    if (reason := refuses_dtype(device, dtype)) is not None:
        return reason
    if not isinstance(scheme, FloatScheme) or scheme.granularity != "block":
        return f"it is for e4m3 in blocks with e4m3 inputs, not {scheme.label}"
    if (activations := scheme.activations) is None:
        return f"it is for e4m3 in blocks with e4m3 inputs, not {scheme.label}"
    if (
        activations.kind != "fp8"
        or activations.granularity != "group128"
        or not activations.dynamic
    ):
        return f"it is for e4m3 inputs with a scale for each {BLOCK}, not {scheme.label}"
    if out_features % BLOCK or in_features % BLOCK:
        return f"it needs whole blocks, not {out_features} × {in_features}"
    return package(NAME).reason


class DeepGemmLinear:
    """`fp8_gemm_nt`: codes and scales of inputs and weight in, bfloat16 out.

    Attributes:
        weight: e4m3 [out, in], and float32 scales [out / 128, in / 128].
    """

    def __init__(self, weight: QuantizedTensor, dtype: torch.dtype) -> None:
        assert isinstance(weight, Fp8Tensor) and weight.scheme.activations is not None
        self.activation_quant = ActivationQuant(weight.scheme.activations)
        self.weight = weight.values.contiguous(), weight.scales.float().contiguous()
        self._dtype = dtype
        self.weight_bytes = sum(part.nbytes for part in self.weight)

    def __call__(self, x: Rows) -> torch.Tensor:
        from ..activations.triton_per_token_quant import round_rows

        rows = x if isinstance(x, QuantizedActivations) else round_rows(x, self.activation_quant)
        values = self.weight[0]
        out = torch.empty(len(rows.codes), len(values), dtype=self._dtype, device=values.device)
        if len(out):
            library = package(NAME).module
            # As Hopper's kernel reads them: transposed, rows padded to 16 bytes.
            scales = library.get_mn_major_tma_aligned_tensor(rows.scales)
            library.fp8_gemm_nt((rows.codes, scales), self.weight, out)
        return out
