"""EXL3 format (`quant_method: exl3`) of exllamav3: packed trellises between Hadamard transforms.

Layout in `docs/formats.md`. Layout and names: exllamav3 1.4.1, `modules/quant/exl3.py` and
`conversion/quant_config.py`. It has `quantization_config` beside `config.json`, GPTQModel wants it inside.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ....base.errors import BadInput
from ...base.scheme import Scheme
from ..base.format import Config, Skips, Stored, TensorSource, WeightFormat, held_scheme
from ..base.incoherence import BLOCK
from ..base.kind import Storage
from ..base.raw import Array, Entries, Entry, Raw, read_array, read_headers
from ..base.tensor import QuantizedTensor
from .kind import TrellisTensor
from .scheme import TRELLIS_CODEBOOKS, TrellisScheme
from .viterbi import MULTIPLIERS, TILE

LAYOUT_VERSION = "1.4.1"
"""The version of exllamav3 whose layout this is; it is what readers compare `version` with."""
CONFIG_FILE = "quantization_config.json"
_PLAIN_HEAD_BITS = 16
_DTYPES = {"I16": "int16", "I32": "int32", "F16": "float16", "BF16": "bfloat16", "F32": "float32"}


class Exl3Format(WeightFormat):
    """Packed trellises, in exllamav3's layout."""

    name = "exl3"
    markers: tuple[str, ...] = (".trellis",)
    suffixes: tuple[str, ...] = (".trellis", ".suh", ".svh", ".mcg", ".mul1")
    # Each module's tensors say its layout; the rest is how they were made.
    irrelevant: tuple[str, ...] = (
        *("version", "bits", "head_bits", "mtp_bits", "vision_bits", "out_scales", "codebook"),
        *("calibration", "tensor_storage", "original_quantization_config"),
    )
    plain_head = True

    def skips(self, config: Config) -> Skips:
        """`tensor_storage` lists the quantized modules."""
        stored = config.get("tensor_storage")
        return super().skips(config) if stored is None else lambda name: name not in stored

    def _scheme(self, scheme: Scheme) -> TrellisScheme:
        return held_scheme(self.name, scheme, TrellisScheme, ": only trellis codes")

    def check_scheme(self, scheme: Scheme) -> None:
        self._scheme(scheme)

    def check(self, module: str, out_features: int, in_features: int, scheme: Scheme) -> None:
        self._scheme(scheme)
        if out_features % BLOCK or in_features % BLOCK:
            raise BadInput(
                f"format exl3 has Hadamard transforms of {BLOCK} channels, which do not divide "
                f"{module} of {out_features} × {in_features}: --ignore it, or choose another method"
            )

    def pack(self, module: str, tensor: QuantizedTensor) -> dict[str, torch.Tensor]:
        assert isinstance(tensor, TrellisTensor)
        stored = {"trellis": tensor.trellis, "suh": tensor.suh, "svh": tensor.svh}
        multiplier = MULTIPLIERS.get(tensor.scheme.codebook)
        if multiplier is not None:
            word = torch.tensor(multiplier - 2**32, dtype=torch.int32)
            stored[tensor.scheme.codebook] = word
        return {f"{module}.{name}": part for name, part in stored.items()}

    def unpack(self, module: str, source: TensorSource, config: Config) -> TrellisTensor:
        stored = Stored(source, module)
        trellis = stored.tensor("trellis", torch.int16)
        if trellis.dim() != 3 or trellis.shape[2] % TILE:
            raise BadInput(
                f"{module}.trellis has shape {tuple(trellis.shape)}, but the format has "
                "[in / 16, out / 16, 16 × bits]"
            )
        scales = []
        for side, tiles in zip(("suh", "svh"), trellis.shape[:2], strict=True):
            scale = stored.tensor(side, torch.float16)
            if tuple(scale.shape) != (tiles * TILE,) or scale.numel() % BLOCK:
                raise BadInput(
                    f"{module}.{side} has shape {tuple(scale.shape)}, but {module}.trellis implies "
                    f"({tiles * TILE},), in whole blocks of {BLOCK}"
                )
            scales.append(scale)
        marks = [name for name in MULTIPLIERS if name in stored]
        if len(marks) > 1:
            raise BadInput(f"{module} is marked for two codebooks: {' and '.join(marks)}")
        for name in marks:
            multiplier = int(stored.tensor(name, torch.int32)) % 2**32
            if multiplier != MULTIPLIERS[name]:
                raise BadInput(
                    f"{module}.{name} is {multiplier:#x}, another multiplier than {MULTIPLIERS[name]:#x}"
                )
        scheme = TrellisScheme(trellis.shape[2] // TILE, marks[0] if marks else "3inst")
        suh, svh = scales
        return TrellisTensor(trellis, suh, svh, scheme)

    def config(self, schemes: Mapping[str, Scheme], ignore: Sequence[str]) -> dict[str, Any]:
        kinds = {module: self._scheme(scheme) for module, scheme in schemes.items()}
        codebooks = {scheme.codebook for scheme in kinds.values()}
        if len(codebooks) != 1:
            raise BadInput(
                f"format exl3 has one codebook in its config, not {', '.join(sorted(codebooks))}"
            )
        storage: dict[str, dict[str, Any]] = {}  # of each module, but for its tensors
        for module, scheme in kinds.items():
            name, entry = scheme.codebook, {"quant_format": "exl3", "bits_per_weight": scheme.bits}
            marks = {f"{name}_multiplier": MULTIPLIERS[name]} if name in MULTIPLIERS else {}
            storage[module] = entry | marks
        head = kinds.get("lm_head")
        others = (scheme for name, scheme in kinds.items() if name != "lm_head" or len(kinds) == 1)
        bits = [scheme.bits for scheme in others]
        return {
            "quant_method": "exl3",
            "version": LAYOUT_VERSION,
            "bits": round(sum(bits) / len(bits), 3),
            "head_bits": head.bits if head else _PLAIN_HEAD_BITS,
            "out_scales": "always",
            "codebook": codebooks.pop(),
            "tensor_storage": storage,
        }

    def scheme(self, config: Config, module: str) -> TrellisScheme:
        stored = (config.get("tensor_storage") or {}).get(module) or {}
        bits = stored.get("bits_per_weight", config.get("bits"))
        codebook = next((name for name in MULTIPLIERS if f"{name}_multiplier" in stored), None)
        codebook = codebook or ("3inst" if stored else config.get("codebook", "3inst"))
        if not isinstance(bits, int | float) or codebook not in TRELLIS_CODEBOOKS:
            raise BadInput(
                f"quant_method exl3 says no bits for {module}, or a codebook other than "
                f"{', '.join(TRELLIS_CODEBOOKS)}"
            )
        return TrellisScheme(round(bits), codebook)

    def config_files(self, config: dict[str, Any]) -> dict[str, dict[str, Any]]:
        return {CONFIG_FILE: config}

    def completed_config(self, config: dict[str, Any], folder: Path) -> dict[str, Any]:
        headers = read_headers(sorted(folder.glob("*.safetensors")))
        storage = {}
        for module, entry in config["tensor_storage"].items():
            names = (f"{module}{suffix}" for suffix in (*self.suffixes, ".bias"))
            stored = {name: _header(headers[name]) for name in names if name in headers}
            storage[module] = {"stored_tensors": stored, **entry}
        return {**config, "tensor_storage": storage}

    @staticmethod
    def read_raw(entries: Entries, module: str, config: dict[str, Any]) -> Raw:
        """exllamav3's layout: int16 `[in / 16, out / 16, 16 * bits]` between float16 scales of both sides."""
        trellis = read_array(entries[f"{module}.trellis"], "I16")
        scales = [read_array(entries[f"{module}.{name}"], "F16") for name in ("suh", "svh")]
        sides = tuple(16 * tiles for tiles in trellis.shape[:2])
        if trellis.ndim != 3 or trellis.shape[2] not in range(16, 129, 16):
            raise ValueError(f"a trellis of {trellis.shape}")
        if any(scale.shape != (side,) for scale, side in zip(scales, sides, strict=True)):
            raise ValueError(
                f"scales of {scales[0].shape} and {scales[1].shape} do not fit {sides}"
            )
        problems = [
            f"has {side} channels, no whole blocks of 128" for side in sides if side % _BLOCK
        ]
        for name, multiplier in _MULTIPLIERS.items():
            mark = entries.get(f"{module}.{name}")
            if mark is not None and int(read_array(mark, "I32").reshape(())) != multiplier:
                problems.append(f"has another multiplier than {name}'s {multiplier:#x}")
        stored = (config.get("tensor_storage") or {}).get(module) or {}
        declared_bits = stored.get("bits_per_weight", trellis.shape[2] // 16)
        if declared_bits != trellis.shape[2] // 16:
            problems.append(
                f"has {trellis.shape[2] // 16} bits a weight, and {declared_bits} in the config"
            )
        parts: dict[str, Array] = {"trellis": trellis, "suh": scales[0], "svh": scales[1]}
        numbers = {name: parts[name].astype(np.float32) for name in ("suh", "svh")}
        return Raw(parts, numbers, (sides[1], sides[0]), tuple(problems))


def _header(entry: Entry) -> dict[str, Any]:
    """One tensor as exllamav3 records it (`dtype`), and as GPTQModel reads it (`torch_dtype`)."""
    dtype = _DTYPES[entry.dtype]
    sizes = {"shape": list(entry.shape), "n_bytes": entry.nbytes}
    return sizes | {"dtype": f"torch.{dtype}", "torch_dtype": dtype}


_BLOCK = 128
_MULTIPLIERS = {"mcg": 0xCBAC1FED, "mul1": 0x83DCD12D}

STORAGE = Storage(formats=(Exl3Format(),))
