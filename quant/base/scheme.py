"""Quantization schemes: bits, granularity of the scales, and activation quantization.

One frozen dataclass per kind of grid. How codes are chosen is up to the method, how they are stored is up
to the format.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

from .e8p_scheme import E8pScheme
from .errors import BadInput

SUPPORTED_BITS = (2, 3, 4, 5, 6, 8)
PER_CHANNEL = -1
_INPUT_GRANULARITIES = ("token", "group128", "tensor")
# FP4 inputs have the groups of FP4 weights; NVFP4's have a calibrated global scale too.
_FP4_INPUTS = {"nvfp4": ("group16", False), "mxfp4": ("group32", True)}
_FLOAT_GRANULARITIES = ("tensor", "channel", "block")
CODEBOOK_BLOCKS = (32, 64, 128, 256, 512, 1024, 2048, 4096)


@dataclass(frozen=True, slots=True)
class Activations:
    """Activation quantization: how a linear's input is quantized before the GEMM.

    Attributes:
        kind: int8 (symmetric, `round(x / scale)` in -128..127), fp8 (e4m3), nvfp4 or mxfp4 (`Fp4Scheme`).
        granularity: per token, per group of channels of a token (group-wise), or per tensor.
        dynamic: whether scales are computed from the input at run time; else they are calibrated. NVFP4
            inputs have both: dynamic group scales in units of a calibrated global scale.
    """

    kind: Literal["int8", "fp8", "nvfp4", "mxfp4"]
    granularity: Literal["token", "group128", "tensor", "group16", "group32"] = "token"
    dynamic: bool = True

    def __post_init__(self) -> None:
        if self.kind in _FP4_INPUTS:
            if (self.granularity, self.dynamic) != _FP4_INPUTS[self.kind]:
                raise BadInput(
                    f"activations in {self.kind} by {self.granularity} mean nothing: their groups are "
                    f"{_FP4_INPUTS[self.kind][0]}"
                )
            return
        if self.kind not in ("int8", "fp8") or self.granularity not in _INPUT_GRANULARITIES:
            raise BadInput(
                f"activations in {self.kind} by {self.granularity} mean nothing: int8 or fp8, "
                f"by {', '.join(_INPUT_GRANULARITIES)}"
            )
        if not self.dynamic and self.granularity != "tensor":
            raise BadInput("a static activation scale is one scale for the whole input")

    @property
    def label(self) -> str:
        """Short form, such as `a-int8-token`."""
        return f"a-{self.kind}-{self.granularity}" + ("" if self.dynamic else "-static")


@dataclass(frozen=True, slots=True)
class IntScheme:
    """Integer weights of one width with one scale per group of input channels.

    Attributes:
        bits: Width of a code.
        group_size: Consecutive input channels that share a scale; -1 is one group per output channel.
        symmetric: Whether the zero code is fixed at the middle, `2**(bits-1)`.
        activations: None: 16-bit activations (weight-only quantization).
        permuted: Whether group membership is stored per input channel (`g_idx` of dynamic act-order).

    Raises:
        BadInput: a width or a group size that no method here can produce.
    """

    bits: int
    group_size: int
    symmetric: bool
    activations: Activations | None = None
    permuted: bool = False

    def __post_init__(self) -> None:
        if self.bits not in SUPPORTED_BITS:
            widths = ", ".join(str(bits) for bits in SUPPORTED_BITS)
            raise BadInput(f"{self.bits}-bit weights are not supported: choose one of {widths}")
        if self.group_size != PER_CHANNEL and self.group_size < 1:
            raise BadInput(
                f"a group size of {self.group_size} means nothing: give a positive number, "
                "or -1 for one scale per output channel"
            )

    @property
    def max_code(self) -> int:
        """The largest code; the smallest is 0."""
        return 2**self.bits - 1

    @property
    def middle(self) -> int:
        """The zero code of the symmetric form."""
        return 2 ** (self.bits - 1)

    def divides(self, in_features: int) -> bool:
        """Whether rows of this width split into whole groups."""
        return self.group_size == PER_CHANNEL or in_features % self.group_size == 0

    def num_groups(self, in_features: int) -> int:
        """Groups in one row of `in_features` weights."""
        if not self.divides(in_features):
            raise BadInput(f"group size {self.group_size} does not divide {in_features} inputs")
        return 1 if self.group_size == PER_CHANNEL else in_features // self.group_size

    def bits_per_weight(self, out_features: int, in_features: int) -> float:
        """Bits of codes, 16-bit scales and zero codes over the number of weights."""
        zero_bits = 0 if self.symmetric else self.bits
        return self.bits + (16 + zero_bits) * self.num_groups(in_features) / in_features

    @property
    def label(self) -> str:
        """Short form for tables, such as `int4 g128 asym`."""
        group = "channel" if self.group_size == PER_CHANNEL else f"g{self.group_size}"
        text = f"int{self.bits} {group} {'sym' if self.symmetric else 'asym'}"
        if self.permuted:
            text += " act-order"
        return text if self.activations is None else f"{text} {self.activations.label}"


@dataclass(frozen=True, slots=True)
class FloatScheme:
    """8-bit floating-point weights (e4m3, largest value 448).

    Attributes:
        granularity: one scale for the weight, for an output channel, or for a 128 × 128 block.
        activations: None: 16-bit activations (weight-only quantization).
    """

    granularity: Literal["tensor", "channel", "block"]
    activations: Activations | None = None
    bits: int = 8

    def __post_init__(self) -> None:
        if self.granularity not in _FLOAT_GRANULARITIES:
            raise BadInput(
                f"an fp8 scale for each {self.granularity} means nothing: "
                f"choose one of {', '.join(_FLOAT_GRANULARITIES)}"
            )

    def scale_shape(self, out_features: int, in_features: int) -> tuple[int, int]:
        """Shape of the scales of a weight; blocks at the edge may be smaller than 128."""
        if self.granularity == "tensor":
            return 1, 1
        if self.granularity == "channel":
            return out_features, 1
        return -(-out_features // 128), -(-in_features // 128)

    def bits_per_weight(self, out_features: int, in_features: int) -> float:
        """Bits of values and float32 scales over the number of weights."""
        rows, columns = self.scale_shape(out_features, in_features)
        return 8 + 32 * rows * columns / (out_features * in_features)

    @property
    def label(self) -> str:
        """Short form, such as `fp8 block a-fp8-group128`."""
        text = f"fp8 {self.granularity}"
        return text if self.activations is None else f"{text} {self.activations.label}"


@dataclass(frozen=True, slots=True)
class CodebookScheme:
    """4-bit codes into one fixed codebook of 16 values, one absmax per block of weights (bitsandbytes).

    Attributes:
        kind: which codebook: `nf4` (quantiles of a normal distribution) or `fp4`.
        block_size: consecutive weights, in row-major order across rows, that share an absmax.
        double_quant: whether the absmax values are themselves quantized to 8 bits.
    """

    kind: Literal["nf4", "fp4"]
    block_size: int = 64
    double_quant: bool = False
    bits: int = 4

    def __post_init__(self) -> None:
        if self.kind not in ("nf4", "fp4"):
            raise BadInput(f"there is no table {self.kind!r}: choose nf4 or fp4")
        if self.block_size not in CODEBOOK_BLOCKS:
            sizes = ", ".join(str(size) for size in CODEBOOK_BLOCKS)
            raise BadInput(f"blocks of {self.block_size} weights are none of {sizes}")

    @property
    def activations(self) -> None:
        """None: activations stay in 16 bits."""
        return None

    def bits_per_weight(self, out_features: int, in_features: int) -> float:
        """Bits of codes and absmax values over the number of weights."""
        per_block = 8 + 32 / 256 if self.double_quant else 32
        return 4 + per_block / self.block_size

    @property
    def label(self) -> str:
        """Short form, such as `nf4 b64 double`."""
        return f"{self.kind} b{self.block_size}" + (" double" if self.double_quant else "")


@dataclass(frozen=True, slots=True)
class Fp4Scheme:
    """4-bit floats (e2m1) with one scale for each small block of input channels.

    Attributes:
        kind: `nvfp4`: blocks of 16, e4m3 scales in units of one float32 scale of the whole weight (NVIDIA);
            `mxfp4`: blocks of 32, scales that are powers of two (OCP Microscaling Formats 1.0).
        activations: None: 16-bit activations (W4A16); else inputs of the same kind (W4A4).
    """

    kind: Literal["nvfp4", "mxfp4"]
    activations: Activations | None = None
    bits: int = 4

    def __post_init__(self) -> None:
        if self.kind not in FP4_BLOCKS:
            raise BadInput(f"there are no {self.kind!r} weights: choose {' or '.join(FP4_BLOCKS)}")
        if self.activations is not None and self.activations.kind != self.kind:
            raise BadInput(
                f"{self.kind} weights go with inputs in {self.kind} or 16 bits, not "
                f"{self.activations.kind}"
            )

    @property
    def block_size(self) -> int:
        """Consecutive input channels that share a scale."""
        return FP4_BLOCKS[self.kind]

    def bits_per_weight(self, out_features: int, in_features: int) -> float:
        """Bits of codes and scales over the number of weights."""
        whole = 32 / (out_features * in_features) if self.kind == "nvfp4" else 0
        return 4 + 8 / self.block_size + whole

    @property
    def label(self) -> str:
        """Short form, such as `nvfp4 a-nvfp4-group16-static`."""
        return self.kind if self.activations is None else f"{self.kind} {self.activations.label}"


FP4_BLOCKS = {"nvfp4": 16, "mxfp4": 32}


@dataclass(frozen=True, slots=True)
class VectorwiseScheme:
    """LLM.int8(): row-wise int8; input channels with an outlier beyond `threshold` are computed in 16 bits.

    Dettmers et al., "LLM.int8()", NeurIPS 2022 (arXiv:2208.07339).
    """

    threshold: float = 6.0
    bits: int = 8

    @property
    def activations(self) -> Activations:
        """Inputs below the threshold are quantized per token."""
        return Activations("int8")

    def bits_per_weight(self, out_features: int, in_features: int) -> float:
        """Bits of codes and float32 absmax of the rows over the number of weights."""
        return 8 + 32 / in_features

    @property
    def label(self) -> str:
        """Short form."""
        return f"llm.int8 t{self.threshold:g}"


@dataclass(frozen=True, slots=True)
class LookupScheme:
    """Non-uniform quantization: a lookup table per output channel, and a sparse matrix of float weights.

    Kim et al., "SqueezeLLM: Dense-and-Sparse Quantization", ICML 2024 (arXiv:2306.07629).

    Attributes:
        bits: width of a code; a table has `2**bits` values.
        sparse_fraction: fraction of the weights that are kept in 16 bits in the sparse matrix.
    """

    bits: int
    sparse_fraction: float = 0.0

    def __post_init__(self) -> None:
        if self.bits not in (2, 3, 4, 8):
            raise BadInput(f"{self.bits}-bit tables are not supported: choose 2, 3, 4 or 8")
        if not 0 <= self.sparse_fraction < 0.5:
            raise BadInput(
                f"a sparse fraction of {self.sparse_fraction} means nothing: give 0 to 0.5"
            )

    @property
    def activations(self) -> None:
        """None: activations stay in 16 bits."""
        return None

    def bits_per_weight(self, out_features: int, in_features: int) -> float:
        """Bits of codes, 16-bit tables and sparse values (16-bit value, 32-bit column)."""
        return self.bits + 16 * 2**self.bits / in_features + 48 * self.sparse_fraction

    @property
    def label(self) -> str:
        """Short form, such as `lookup4 s0.45%`."""
        sparse = f" s{self.sparse_fraction:.2%}" if self.sparse_fraction else ""
        return f"lookup{self.bits}{sparse}"


@dataclass(frozen=True, slots=True)
class GgufScheme:
    """One of ggml's block quantization types.

    Attributes:
        type: ggml's name in capitals, such as `Q4_K`.
    """

    type: str

    def __post_init__(self) -> None:
        if self.type not in GGUF_BLOCKS:
            raise BadInput(
                f"GGUF type {self.type!r} is not supported: choose one of {', '.join(GGUF_BLOCKS)}"
            )

    @property
    def activations(self) -> None:
        """None: activations stay in 16 bits."""
        return None

    @property
    def block(self) -> tuple[int, int]:
        """Weights per block and bytes per block."""
        return GGUF_BLOCKS[self.type]

    @property
    def bits(self) -> int:
        """Bits per code: the first digit of the name."""
        return next(int(letter) for letter in self.type if letter.isdigit())

    def bits_per_weight(self, out_features: int, in_features: int) -> float:
        """Bits of a block over its weights."""
        weights, num_bytes = self.block
        return num_bytes * 8 / weights

    @property
    def label(self) -> str:
        """Short form: the type's name."""
        return self.type


# Weights in a block and its bytes, from ggml's block structs.
GGUF_BLOCKS = {
    "Q4_0": (32, 18),
    "Q4_1": (32, 20),
    "Q5_0": (32, 22),
    "Q5_1": (32, 24),
    "Q8_0": (32, 34),
    "Q2_K": (256, 84),
    "Q3_K": (256, 110),
    "Q4_K": (256, 144),
    "Q5_K": (256, 176),
    "Q6_K": (256, 210),
    "IQ1_S": (256, 50),
    "IQ1_M": (256, 56),
    "IQ2_XXS": (256, 66),
    "IQ2_XS": (256, 74),
    "IQ2_S": (256, 82),
    "IQ3_XXS": (256, 98),
    "IQ3_S": (256, 110),
    "IQ4_NL": (32, 18),
    "IQ4_XS": (256, 136),
    "MXFP4": (32, 17),
}


@dataclass(frozen=True, slots=True)
class TrellisScheme:
    """Trellis codes of weights between Hadamard transforms (QTIP, in EXL3's form), with float16 scales.

    Tseng et al., "QTIP: Quantization with Trellises and Incoherence Processing", NeurIPS 2024
    (arXiv:2406.11235).

    Attributes:
        bits: that a weight adds to the state of its tile's trellis.
        codebook: how the value of a state is computed: `3inst`, `mcg` or `mul1`.
    """

    bits: int
    codebook: str = "mul1"

    def __post_init__(self) -> None:
        if self.bits not in range(1, 9):
            raise BadInput(f"{self.bits}-bit trellises are not supported: choose 1 to 8")
        if self.codebook not in TRELLIS_CODEBOOKS:
            raise BadInput(
                f"there is no codebook {self.codebook!r}: choose {', '.join(TRELLIS_CODEBOOKS)}"
            )

    @property
    def activations(self) -> None:
        """None: activations stay in 16 bits."""
        return None

    def bits_per_weight(self, out_features: int, in_features: int) -> float:
        """Bits of states and of the 16-bit scales of inputs and outputs."""
        return self.bits + 16 / out_features + 16 / in_features

    @property
    def label(self) -> str:
        """Short form, such as `trellis2 mul1`."""
        return f"trellis{self.bits} {self.codebook}"


TRELLIS_CODEBOOKS = ("3inst", "mcg", "mul1")


Scheme = (
    IntScheme
    | FloatScheme
    | CodebookScheme
    | Fp4Scheme
    | VectorwiseScheme
    | LookupScheme
    | GgufScheme
    | TrellisScheme
    | E8pScheme
)

_KINDS: dict[str, type[Scheme]] = {
    "int": IntScheme,
    "float": FloatScheme,
    "codebook": CodebookScheme,
    "fp4": Fp4Scheme,
    "vectorwise": VectorwiseScheme,
    "lookup": LookupScheme,
    "gguf": GgufScheme,
    "trellis": TrellisScheme,
    "e8p": E8pScheme,
}


def scheme_record(scheme: Scheme) -> dict[str, Any]:
    """A scheme for JSON; `read_scheme` undoes it."""
    kind = next(name for name, cls in _KINDS.items() if type(scheme) is cls)
    return {"grid": kind, **asdict(scheme)}


def read_scheme(record: dict[str, Any]) -> Scheme:
    """The scheme that `scheme_record` wrote.

    Raises:
        BadInput: no such kind, or fields that it does not have.
    """
    fields = dict(record)
    cls = _KINDS.get(fields.pop("grid", "int"))
    try:
        if cls is None:
            raise TypeError("unknown grid")
        if fields.get("activations"):
            fields["activations"] = Activations(**fields["activations"])
        return cls(**fields)
    except TypeError as error:
        raise BadInput(f"no scheme can be made of {record}: {error}") from error
