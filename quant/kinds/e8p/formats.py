"""QuIP# format (`quant_method: QUiP`) of QuIP-for-all: E8P codes between Hadamard transforms.

Layout in `docs/formats.md`, codes in `kind.py`. Layout and names are those of QuIP-for-all (`qlinear.py`,
`quantizer.py`), of which Aphrodite took the 2 bits; both cast the factors to their own dtype.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from ....base.errors import BadInput
from ...base.scheme import Scheme
from ..base.format import (
    Config,
    Stored,
    TensorSource,
    WeightFormat,
    held_scheme,
    only_scheme,
)
from ..base.kind import Storage
from ..base.raw import Array, Entries, Floats, Raw, read_array, read_numbers
from ..base.tensor import SCALE_DTYPES, QuantizedTensor
from .kind import DIM, MULTIPLE, RESIDUAL_STEPS, E8pTensor, pack_codes, unpack_codes, words_of
from .scheme import E8pScheme

QUANT_METHOD = "QUiP"
CODEBOOKS = {2: "E8P12", 3: "E8P12RVQ3B", 4: "E8P12RVQ4B"}
_WORDS = {2: torch.int16, 3: torch.int32, 4: torch.int32}


class QuipFormat(WeightFormat):
    """E8P codes in the layout of QuIP-for-all."""

    name = "quip"
    markers: tuple[str, ...] = (".Qidxs",)
    # QuIP-for-all also stores a `weight` that holds nothing, to be found by what asks for a device.
    suffixes: tuple[str, ...] = (
        ".Qidxs", ".SU", ".SV", ".Wscale", ".had_left", ".had_right", ".weight"
    )  # fmt: skip
    plain_head = True
    # The tensors say how the factors and the scale are stored.
    irrelevant: tuple[str, ...] = (
        *("use_rand", "codesz", "idx_dtype", "per_channel", "opt_resid_scale"),
    )

    def _scheme(self, scheme: Scheme) -> E8pScheme:
        return held_scheme(self.name, scheme, E8pScheme, ": only E8P codes")

    @property
    def quant_method(self) -> str:
        return QUANT_METHOD

    def check_scheme(self, scheme: Scheme) -> None:
        self._scheme(scheme)

    def check(self, module: str, out_features: int, in_features: int, scheme: Scheme) -> None:
        self._scheme(scheme)
        if in_features % MULTIPLE or out_features % DIM:
            raise BadInput(
                f"format quip needs inputs in multiples of {MULTIPLE} and outputs of {DIM}, but {module} is "
                f"{out_features} × {in_features}: --ignore it, or choose another method"
            )

    def pack(self, module: str, tensor: QuantizedTensor) -> dict[str, torch.Tensor]:
        assert isinstance(tensor, E8pTensor)
        words = pack_codes(tensor.codes, tensor.residual)
        stored = {"Qidxs": words, "SU": tensor.su, "SV": tensor.sv, "Wscale": tensor.scale}
        stored |= {"had_left": tensor.left, "had_right": tensor.right}
        return {f"{module}.{name}": part for name, part in stored.items() if part is not None}

    def unpack(self, module: str, source: TensorSource, config: Config) -> E8pTensor:
        scheme, stored = self.scheme(config, module), Stored(source, module)
        su, sv = (self._vector(stored, name) for name in ("SU", "SV"))
        words = stored.matrix("Qidxs", _WORDS[scheme.bits])
        expected = len(sv), words_of(len(su), scheme.bits)
        if tuple(words.shape) != expected or len(su) % MULTIPLE:
            raise BadInput(
                f"{module}.Qidxs has shape {tuple(words.shape)}, but SU and SV of {len(su)} and "
                f"{len(sv)} channels imply {expected}, of a multiple of {MULTIPLE} inputs"
            )
        scale = stored.tensor("Wscale", *SCALE_DTYPES).float()
        if scale.shape not in ((), (len(sv),)):
            shapes = f"{tuple(scale.shape)}, but the format has () or ({len(sv)},)"
            raise BadInput(f"{module}.Wscale has shape {shapes}")
        codes, residual = unpack_codes(words, scheme.bits)
        left, right = (
            self._factor(stored, f"had_{side}", len(channels))
            for side, channels in (("left", su), ("right", sv))
        )
        return E8pTensor(codes, su, sv, scale, scheme, residual, left, right)

    @staticmethod
    def _vector(stored: Stored, ending: str) -> torch.Tensor:
        vector = stored.tensor(ending, torch.float16)
        if vector.dim() != 1 or not len(vector):
            shapes = f"{tuple(vector.shape)}, but the format has a vector there"
            raise BadInput(f"{stored.module}.{ending} has shape {shapes}")
        return vector

    @staticmethod
    def _factor(stored: Stored, ending: str, width: int) -> torch.Tensor | None:
        odd = width // (width & -width)
        if odd == 1:
            return None
        if ending not in stored:
            raise BadInput(
                f"there is no {stored.module}.{ending}, and a Hadamard matrix from the tables of QuIP# "
                "is not supported (use_rand: false)"
            )
        factor = stored.tensor(ending, *SCALE_DTYPES)
        if tuple(factor.shape) != (odd, odd):
            shapes = f"{tuple(factor.shape)}, but {width} channels imply ({odd}, {odd})"
            raise BadInput(f"{stored.module}.{ending} has shape {shapes}")
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
        bits = {name: bits for bits, name in CODEBOOKS.items()}.get(str(codebook))
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

    def config_files(self, config: dict[str, Any]) -> dict[str, dict[str, Any]]:
        return {"quantization_config.json": config}

    @staticmethod
    def read_raw(entries: Entries, module: str, config: dict[str, Any]) -> Raw:
        """`Qidxs` of 2, 3 or 4 bytes for 8 weights: a residual before the code, little-endian."""
        codebook = config.get("codebook")
        if codebook not in _BYTES:
            raise ValueError(f"a codebook {codebook!r}")
        length = _BYTES[codebook]
        words = read_array(entries[f"{module}.Qidxs"], "I16" if length == 2 else "I32")
        stored = {name: read_array(entries[f"{module}.{name}"], "F16") for name in ("SU", "SV")}
        outputs, inputs = len(stored["SV"]), len(stored["SU"])
        if words.shape[0] != outputs or words.nbytes * 8 != outputs * inputs * length:
            raise ValueError(f"Qidxs of {words.shape} do not fit {outputs} × {inputs} weights")
        octets = np.frombuffer(words.tobytes(), dtype=np.uint8).reshape(
            outputs, inputs // 8, length
        )
        codes, residual = octets[..., length - 2 :], octets[..., : length - 2]
        parts: dict[str, Array] = {"codes": np.ascontiguousarray(codes).view("<i2")[..., 0]}
        if length > 2:
            residual = np.ascontiguousarray(residual)
            parts["residual"] = (residual.view("<i2") if length == 4 else residual)[..., 0]
        numbers: dict[str, Floats] = {}
        for name, part in (("SU", "su"), ("SV", "sv")):
            parts[part], numbers[part] = stored[name], stored[name].astype(np.float32)
        _, scale = read_numbers(entries[f"{module}.Wscale"])
        parts["scale"] = numbers["scale"] = scale
        problems = []
        for name, width in (("left", inputs), ("right", outputs)):
            odd = width // (width & -width)
            if odd > 1:
                _, factor = read_numbers(entries[f"{module}.had_{name}"])
                parts[name] = numbers[name] = factor
                if factor.shape != (odd, odd):
                    problems.append(f"has a {name} factor of {factor.shape}, not of order {odd}")
                elif np.abs(factor @ factor.T - np.eye(odd)).max() > 0.01:
                    problems.append(f"has a {name} factor that is not orthogonal")
        return Raw(parts, numbers, (outputs, inputs), tuple(problems))


_BYTES = {"E8P12": 2, "E8P12RVQ3B": 3, "E8P12RVQ4B": 4}

STORAGE = Storage(formats=(QuipFormat(),))
