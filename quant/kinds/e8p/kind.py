"""E8P lattice codes between Hadamard transforms (QuIP#): tensor, the grid of one weight, kind, and files.

The grid has vectors of 8 transformed weights, each the nearest point of the codebook; error feedback over
it is QuIP#'s block LDLQ. A point and its residual cannot be told from their sum.

QuIP# format (`quant_method: QUiP`) of QuIP-for-all: E8P codes between Hadamard transforms.

Per linear `P`:

    P.Qidxs      int16    [out, in/8]        2 bits: codes, see `quant/kinds/e8p/codebook.py`
                 int32    [out, in*b/32]     3 and 4 bits: with a residual, see `quant/kinds/e8p/codebook.py`
    P.SU         float16  [in]               signs and scales of inputs
    P.SV         float16  [out]              of outputs
    P.Wscale     float32  [] or [out]        of the codes, here 1
    P.had_left   float32  [m, m]             where `in` is `m` times a power of two, `m` odd and above 1
    P.had_right  float32  [m, m]             the same of `out`

`quantization_config.json` repeats the `quantization_config`. Layout and names are those of QuIP-for-all
(`qlinear.py`, `quantizer.py`), of which Aphrodite took the 2 bits; both cast the factors to their own
dtype. QuIP#'s own files have q, k and v as one matrix, permuted for its CUDA kernels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
import torch

from ...base.errors import BadInput
from ...base.scheme import Scheme
from ..base.format import (
    SCALE_DTYPES,
    Config,
    Stored,
    TensorSource,
    WeightFormat,
    held_scheme,
    only_scheme,
)
from ..base.grid import Parameters
from ..base.incoherence import (
    HadamardTransform,
    Incoherence,
    TransformedGrid,
    TransformedKind,
    TransformedTensor,
    seed_of,
    spread_evenly,
    whole_width,
)
from ..base.kind import Storage
from ..base.raw import Array, Entries, Floats, Raw, read_array, read_numbers
from ..base.tensor import QuantizedTensor
from .codebook import (
    DIM,
    MULTIPLE,
    RESIDUAL_STEPS,
    Codes,
    nearest,
    pack_codes,
    search_operations,
    unpack_codes,
    values_of,
    words_of,
)
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
            raise BadInput(
                f"{module}.Wscale has shape {tuple(scale.shape)}, but the format has () or "
                f"({len(sv)},)"
            )
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
            raise BadInput(
                f"{stored.module}.{ending} has shape {tuple(vector.shape)}, but the format has a "
                "vector there"
            )
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
            raise BadInput(
                f"{stored.module}.{ending} has shape {tuple(factor.shape)}, but {width} channels "
                f"imply ({odd}, {odd})"
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

    def config_files(self, config: dict[str, Any]) -> dict[str, dict[str, Any]]:
        return {"quantization_config.json": config}


_BYTES = {"E8P12": 2, "E8P12RVQ3B": 3, "E8P12RVQ4B": 4}


def read_quip(entries: Entries, module: str, config: dict[str, Any]) -> Raw:
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
    octets = np.frombuffer(words.tobytes(), dtype=np.uint8).reshape(outputs, inputs // 8, length)
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


STORAGE = Storage(formats=(QuipFormat(),), readers={"quip": read_quip})


@dataclass(frozen=True, slots=True)
class E8pTensor(TransformedTensor):
    """`w = diag(sv) V (scale Q) Uᵀ diag(su)`, `Q` `[out, in]` the points of the codes, `U` and `V` Hadamard.

    Attributes:
        codes: int16 `[out, in / 8]`, of E8P.
        su: float16 `[in]`, signs and scales of inputs.
        sv: float16 `[out]`, of outputs.
        scale: float32, of the whole weight `[]` or of each row of `Q` `[out]`.
        scheme: bits.
        residual: `[out, in / 8]`, of what E8P leaves over: uint8 with 3 bits, int16 with 4, None with 2.
        left, right: float32, the odd factors of `U` and `V`; None where a width is a power of two.
    """

    codes: torch.Tensor
    su: torch.Tensor
    sv: torch.Tensor
    scale: torch.Tensor
    scheme: E8pScheme
    residual: torch.Tensor | None = None
    left: torch.Tensor | None = None
    right: torch.Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.sv), len(self.su)

    @property
    def transforms(self) -> Incoherence:
        return Incoherence(
            self.su.float(),
            self.sv.float(),
            HadamardTransform(self.in_features, self.left),
            HadamardTransform(self.out_features, self.right),
        )

    def inner(self, rows: slice = slice(None)) -> torch.Tensor:
        """The points of some rows of codes, scaled: float32 `[rows, in]`."""
        residual = None if self.residual is None else self.residual[rows].flatten()
        stored = Codes(self.codes[rows].flatten(), residual)
        values = values_of(stored, self.scheme.bits).view(-1, self.in_features)
        scale = self.scale if self.scale.dim() == 0 else self.scale[rows, None]
        return values.mul_(scale)

    def with_scales(self, inputs: torch.Tensor, outputs: torch.Tensor) -> E8pTensor:
        return replace(self, su=inputs.half(), sv=outputs.half())

    def rows(self, rows: slice) -> E8pTensor:
        """All, or BadInput: a Hadamard transform mixes all outputs."""
        if rows.indices(self.out_features) != (0, self.out_features, 1):
            raise BadInput(
                f"{self.scheme.label} weights cannot be divided along their outputs, which one Hadamard "
                "transform mixes: choose another method"
            )
        return self


# Standard deviation of a normal source that has the least error, by bits (`opt_scale` in QuIP#; that of 4
# bits is 1.03 there, which has a tenth more error behind the exact search).
_DEVIATIONS = {2: 1.03, 3: 0.98, 4: 0.94}


class E8pGrid(TransformedGrid[E8pScheme, E8pTensor]):
    """The points of E8P, for a weight whose inputs are transformed as a whole, and so are its outputs."""

    vector = DIM

    def __init__(self, scheme: E8pScheme, transforms: Incoherence):
        super().__init__(scheme, transforms)
        inputs, outputs = len(transforms.inputs), len(transforms.outputs)
        self.codes = torch.zeros(inputs // DIM, outputs, dtype=torch.int32)
        self.residual = torch.zeros_like(self.codes)

    @classmethod
    def of(cls, weight: torch.Tensor, scheme: E8pScheme, name: str) -> Self:
        outputs, inputs = weight.shape
        if inputs % MULTIPLE:
            raise BadInput(
                f"{name} has {inputs} inputs: E8P codes need a multiple of {MULTIPLE}; --ignore it, or "
                "choose another method"
            )
        turns = whole_width(inputs), whole_width(outputs)
        deviation = _DEVIATIONS[scheme.bits]
        return cls(scheme, spread_evenly(weight, deviation, seed_of(name), *turns))

    def tensor(self, values: torch.Tensor, parameters: Parameters) -> E8pTensor:
        bits, sides = self.scheme.bits, self.transforms
        stored = {3: torch.uint8, 4: torch.int16}
        turns = sides.turn_inputs, sides.turn_outputs
        left, right = (turn.factor for turn in turns if isinstance(turn, HadamardTransform))
        return E8pTensor(
            self.codes.T.contiguous().to(torch.int16),
            sides.inputs.half(),
            sides.outputs.half(),
            torch.ones(()),
            self.scheme,
            None if bits == 2 else self.residual.T.contiguous().to(stored[bits]),
            left,
            right,
        )

    def nearest_values(self, targets: torch.Tensor, first: int) -> torch.Tensor:
        vectors = targets.unflatten(0, (-1, DIM)).transpose(1, 2).reshape(-1, DIM)
        found = nearest(vectors, self.scheme.bits)
        places = slice(first // DIM, (first + len(targets)) // DIM)
        for kept, codes in zip((self.codes, self.residual), found, strict=True):
            if codes is not None:
                kept[places] = codes.view(-1, targets.shape[1]).to(kept.device)
        values = values_of(Codes(*found), self.scheme.bits)
        return values.view(-1, targets.shape[1], DIM).transpose(1, 2).flatten(0, 1)


class E8pKind(TransformedKind[E8pScheme]):
    """Points of E8P."""

    @property
    def search_operations(self) -> float:
        return 2 * search_operations(
            self.scheme.bits
        )  # with feedback, and without it for the report

    def blank(self, out_features: int, in_features: int, scale_dtype: torch.dtype) -> E8pTensor:
        codes = torch.zeros(out_features, in_features // DIM, dtype=torch.int16)
        residual = {2: None, 3: codes.to(torch.uint8), 4: codes}[self.scheme.bits]
        su, sv = (torch.ones(size).half() for size in (in_features, out_features))
        left, right = (whole_width(size).factor for size in (in_features, out_features))
        return E8pTensor(codes, su, sv, torch.ones(()), self.scheme, residual, left, right)

    def grid_of(self, weight: torch.Tensor, name: str) -> E8pGrid:
        return E8pGrid.of(weight, self.scheme, name)


KIND = E8pKind
