"""QuIP# format (`quant_method: QUiP`) of QuIP-for-all: E8P codes between Hadamard transforms.

Per linear `P`:

    P.Qidxs      int16    [out, in/8]        2 bits: codes, see `quant/e8p/codebook.py`
                 int32    [out, in*b/32]     3 and 4 bits: with a residual, see `quant/e8p/packing.py`
    P.SU         float16  [in]               signs and scales of inputs
    P.SV         float16  [out]              of outputs
    P.Wscale     float32  [] or [out]        of the codes, here 1
    P.had_left   float32  [m, m]             where `in` is `m` times a power of two, `m` odd and above 1
    P.had_right  float32  [m, m]             the same of `out`

`quantization_config.json` repeats the `quantization_config`. Layout and names are those of QuIP-for-all
(`qlinear.py`, `quantizer.py`), of which Aphrodite took the 2 bits; both cast the factors to their own dtype.
QuIP#'s own files have q, k and v as one matrix, permuted for its CUDA kernels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..base.errors import BadInput
from ..base.scheme import Scheme
from ..e8p.codebook import DIM
from ..e8p.packing import MULTIPLE, pack_codes, unpack_codes, words_of
from ..e8p.search import RESIDUAL_STEPS
from ..kinds.e8p.scheme import E8pScheme
from ..tensors.base import QuantizedTensor
from ..tensors.e8p import E8pTensor
from .base import SCALE_DTYPES, Config, TensorSource, expect_dtype, expect_matrix, only_scheme

QUANT_METHOD = "QUiP"
CODEBOOKS = {2: "E8P12", 3: "E8P12RVQ3B", 4: "E8P12RVQ4B"}
_WORDS = {2: torch.int16, 3: torch.int32, 4: torch.int32}


class QuipFormat:
    """E8P codes in the layout of QuIP-for-all."""

    name = "quip"
    markers: tuple[str, ...] = (".Qidxs",)
    # QuIP-for-all also stores a `weight` that holds nothing, to be found by what asks for a device.
    suffixes: tuple[str, ...] = (
        ".Qidxs", ".SU", ".SV", ".Wscale", ".had_left", ".had_right", ".weight"
    )  # fmt: skip

    def _scheme(self, scheme: Scheme) -> E8pScheme:
        if not isinstance(scheme, E8pScheme):
            raise BadInput(f"format quip cannot hold {scheme.label} weights: only E8P codes")
        return scheme

    def check_scheme(self, scheme: Scheme) -> None:
        self._scheme(scheme)

    def check(self, module: str, out_features: int, in_features: int, scheme: Scheme) -> None:
        self._scheme(scheme)
        if in_features % MULTIPLE or out_features % DIM:
            raise BadInput(
                f"format quip needs inputs in multiples of {MULTIPLE} and outputs of {DIM}, but {module} is "
                f"{out_features} × {in_features}: --ignore it, or choose another method"
            )

    def scale_dtype(self, weights: torch.dtype, scheme: Scheme) -> torch.dtype:
        return torch.float16

    def pack(self, module: str, tensor: QuantizedTensor) -> dict[str, torch.Tensor]:
        assert isinstance(tensor, E8pTensor)
        stored = {
            f"{module}.Qidxs": pack_codes(tensor.codes, tensor.residual, tensor.scheme.bits),
            f"{module}.SU": tensor.su,
            f"{module}.SV": tensor.sv,
            f"{module}.Wscale": tensor.scale,
        }
        for side, factor in (("left", tensor.left), ("right", tensor.right)):
            if factor is not None:
                stored[f"{module}.had_{side}"] = factor
        return stored

    def unpack(self, module: str, source: TensorSource, config: Config) -> E8pTensor:
        scheme = self.scheme(config, module)
        su, sv = (self._vector(f"{module}.{name}", source) for name in ("SU", "SV"))
        name = f"{module}.Qidxs"
        words = expect_matrix(name, source.tensor(name), _WORDS[scheme.bits])
        expected = len(sv), words_of(len(su), scheme.bits)
        if tuple(words.shape) != expected or len(su) % MULTIPLE:
            raise BadInput(
                f"{name} has shape {tuple(words.shape)}, but SU and SV of {len(su)} and {len(sv)} channels "
                f"imply {expected}, of a multiple of {MULTIPLE} inputs"
            )
        name = f"{module}.Wscale"
        scale = expect_dtype(name, source.tensor(name), *SCALE_DTYPES).float()
        if scale.shape not in ((), (len(sv),)):
            raise BadInput(
                f"{name} has shape {tuple(scale.shape)}, but the format has () or ({len(sv)},)"
            )
        codes, residual = unpack_codes(words, scheme.bits)
        left, right = (
            self._factor(f"{module}.had_{side}", source, len(channels))
            for side, channels in (("left", su), ("right", sv))
        )
        return E8pTensor(codes, su, sv, scale, scheme, residual, left, right)

    @staticmethod
    def _vector(name: str, source: TensorSource) -> torch.Tensor:
        vector = expect_dtype(name, source.tensor(name), torch.float16)
        if vector.dim() != 1 or not len(vector):
            raise BadInput(
                f"{name} has shape {tuple(vector.shape)}, but the format has a vector there"
            )
        return vector

    @staticmethod
    def _factor(name: str, source: TensorSource, width: int) -> torch.Tensor | None:
        odd = width // (width & -width)
        if odd == 1:
            return None
        if name not in source:
            raise BadInput(
                f"there is no {name}, and a Hadamard matrix from the tables of QuIP# is not supported "
                "(use_rand: false)"
            )
        factor = expect_dtype(name, source.tensor(name), *SCALE_DTYPES)
        if tuple(factor.shape) != (odd, odd):
            raise BadInput(
                f"{name} has shape {tuple(factor.shape)}, but {width} channels imply ({odd}, {odd})"
            )
        return factor.float()

    def config(self, schemes: Mapping[str, Scheme], ignore: Sequence[str]) -> dict[str, Any]:
        scheme = self._scheme(only_scheme(self.name, schemes))
        return {
            "quant_method": QUANT_METHOD,
            "rescale_WH": False,
            "use_rand": True,
            "codebook": CODEBOOKS[scheme.bits],
            "codesz": DIM,
            "idx_dtype": str(_WORDS[scheme.bits]),
            "merge_suv": False,
            "per_channel": False,
            "opt_resid_scale": RESIDUAL_STEPS.get(scheme.bits, -1),
            "modules_to_not_convert": list(ignore),
        }

    def scheme(self, config: Config, module: str) -> E8pScheme:
        codebook = config.get("codebook")
        bits = next((bits for bits, name in CODEBOOKS.items() if name == codebook), None)
        if bits is None:
            raise BadInput(
                f"quant_method {QUANT_METHOD} has codebook {codebook!r}: this reads "
                f"{', '.join(CODEBOOKS.values())}"
            )
        step = config.get("opt_resid_scale")
        if step is not None and bits > 2 and abs(step - RESIDUAL_STEPS[bits]) > 1e-6:
            raise BadInput(
                f"quant_method {QUANT_METHOD} has opt_resid_scale {step}: of {codebook} this reads "
                f"{RESIDUAL_STEPS[bits]:.6g}"
            )
        return E8pScheme(bits)
