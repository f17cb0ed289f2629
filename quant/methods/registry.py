"""Registry of quantization methods."""

from __future__ import annotations

from .autoround import AutoRound
from .awq import Awq
from .base import Method
from .codebook_methods import BlockFloat, Codebook
from .eight_bit import Fp8, Int8
from .gptq import Gptq
from .hqq import Hqq
from .rtn import RoundToNearest
from .smoothquant import SmoothQuant
from .squeezellm import SqueezeLlm
from .transformed import QUIP, TRELLIS

METHODS: dict[str, Method] = {
    method.name: method
    for method in (
        Awq(),
        RoundToNearest(),
        SmoothQuant(),
        Gptq(),
        AutoRound(),
        Int8(),
        Fp8(),
        Codebook("nf4"),
        Codebook("fp4"),
        BlockFloat("nvfp4"),
        BlockFloat("mxfp4"),
        Hqq(),
        SqueezeLlm(),
        TRELLIS,
        QUIP,
    )
}
