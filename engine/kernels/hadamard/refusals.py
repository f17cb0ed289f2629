"""Why a GEMM of codes between Hadamard transforms cannot serve: the scheme, the activations, the compiler."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ....quant.base.scheme import Scheme
from ....quant.kinds.e8p.scheme import E8pScheme
from ....quant.kinds.trellis.scheme import TrellisScheme
from ....quant.native.build import Native
from .e8p_linear import native_e8p
from .native_hadamard import FLOAT_BITS
from .trellis_linear import native_trellis, native_trellis_integer


@dataclass(frozen=True, slots=True)
class HadamardKernels:
    """The C kernels of one kind of codes.

    Attributes:
        scheme: of the weights.
        codes: what they are called.
        in_floats, in_integers: the compiled GEMMs of float32 and of quantized inputs.
        codebook: the only one with 8-bit inputs, where there are several.
    """

    scheme: type[Scheme]
    codes: str
    in_floats: Callable[[], Native]
    in_integers: Callable[[], Native]
    codebook: str | None = None

    def refuses_scheme(self, scheme: Scheme) -> str | None:
        """Why torch cannot serve."""
        if not isinstance(scheme, self.scheme):
            return f"it is for {self.codes}, not {scheme.label}"
        return None

    def refuses(
        self, input_bits: int, device: str, dtype: torch.dtype, scheme: Scheme, wants_8: bool
    ) -> str | None:
        """Why the kernel that quantizes inputs to `input_bits`, 8 or 16, or `FLOAT_BITS`, cannot serve.

        Args:
            wants_8: activations may be quantized to 8 bits.
        """
        if device != "cpu":
            return "it is a CPU kernel"
        if (reason := self.refuses_scheme(scheme)) is not None:
            return reason
        if dtype not in (torch.bfloat16, torch.float32):
            return f"it takes bfloat16 and float32, not {dtype}"
        if input_bits == FLOAT_BITS:
            return self.in_floats().reason
        if (
            input_bits == 8
            and isinstance(scheme, TrellisScheme)
            and scheme.codebook != self.codebook
        ):
            return f"it adds up the bytes of codebook {self.codebook}, which is not that of {scheme.label}"
        if input_bits == 8 and not wants_8:
            return "it quantizes the activations to 8 bits, which is not asked for"
        if input_bits == 16 and dtype is torch.float32:
            return "it quantizes the activations, to fewer bits than float32 has"
        return self.in_integers().reason


TRELLIS = HadamardKernels(
    TrellisScheme, "trellis codes", native_trellis, native_trellis_integer, "mul1"
)
E8P = HadamardKernels(E8pScheme, "E8P codes", native_e8p, native_e8p)
