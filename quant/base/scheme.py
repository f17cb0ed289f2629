"""`Scheme`: bits, granularity of the scales, and activation quantization of one linear's weight.

Each kind has a frozen dataclass in its `scheme.py`, without torch: plans read schemes before anything heavy
is loaded. `kind_of` (`quant/kinds/base/kind.py`) finds the rest of a kind.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from ...base.errors import BadInput

SUPPORTED_BITS = (2, 3, 4, 5, 6, 8)
PER_CHANNEL = -1
_INPUT_GRANULARITIES = ("token", "group128", "tensor")
# FP4 inputs have the groups of FP4 weights; NVFP4's have a calibrated global scale too.
_FP4_INPUTS = {"nvfp4": ("group16", False), "mxfp4": ("group32", True)}
E4M3_MAX = 448.0
# The largest magnitude of each KV-cache dtype whose scales servers read from a checkpoint. vLLM refuses a
# stored int8 scheme (`validate_kv_cache_scheme`) and measures its int8 scales itself, per token and head.
LARGEST = {"fp8": E4M3_MAX}
INT8_CACHE = "int8"
KvStrategy = Literal["tensor", "attn_head"]  # as compressed-tensors calls them


@dataclass(frozen=True, slots=True)
class Activations:
    """Activation quantization: how a linear's input is quantized before the GEMM.

    Attributes:
        kind: int8 (symmetric, `round(x / scale)` in -128..127), fp8 (e4m3), nvfp4 or mxfp4 (`Fp4Scheme`).
        granularity: per token, per group of channels of a token (group-wise), or per tensor.
        dynamic: True if scales are computed from the input at run time; else they are calibrated. NVFP4
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
        return f"a-{self.kind}-{self.granularity}" + ("" if self.dynamic else "-static")


class Scheme(ABC):
    """How the weight `[out, in]` of a linear is quantized; a subclass is a frozen dataclass.

    Attributes:
        kind_name: name of the kind, as manifests record it and as kernels register for it.
        activations: quantization of inputs; None: 16-bit activations (weight-only quantization).
        permuted: True if group membership is stored per input channel (`g_idx` of dynamic act-order).
        searches_ranges: True if ranges of groups may be searched for; else the format's owner fixes them.
        fuses_scales: True if linears that servers fuse share one scale of the whole weight.
        searched_widths: bits that a search over widths tries: first those that servers have fast kernels for,
            then, where these take too many bytes, all; empty: it tries none.
    """

    __slots__ = ()
    kind_name: ClassVar[str]
    searches_ranges: ClassVar[bool] = False
    fuses_scales: ClassVar[bool] = False

    searched_widths: ClassVar[tuple[tuple[int, ...], ...]] = ()

    bits: int
    activations: Activations | None = None
    permuted: bool = False

    @property
    @abstractmethod
    def label(self) -> str:
        """Short form for tables, such as `int4 g128 asym`."""

    @abstractmethod
    def bits_per_weight(self, out_features: int, in_features: int) -> float:
        """Bits of codes, scales and all else that is stored, over the number of weights."""

    @property
    def has_static_inputs(self) -> bool:
        return self.activations is not None and not self.activations.dynamic

    @property
    def asymmetric(self) -> bool:
        return False

    @property
    def scale_group(self) -> int:
        return 0

    def run_length(self, in_features: int) -> int:
        """Weights of a row of `in_features` that have one range."""
        return in_features

    @property
    def outlier_threshold(self) -> float | None:
        """Magnitude from which inputs stay floats beside quantized ones (LLM.int8()); None: none do."""
        return None

    @property
    def has_float8(self) -> bool:
        return False

    @property
    def ggml_type(self) -> str | None:
        """ggml's block type that stores such weights without loss; None: there is none."""
        return None

    def at_width(self, bits: int, group_size: int) -> Scheme:
        raise BadInput(f"{self.label} weights have no other widths")

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Scheme | None:
        """Scheme of most linears by `quantization_config` for the planner; None: the config does not tell."""
        return None

    @classmethod
    def nearest_to(cls, other: Scheme) -> Iterator[tuple[int, Scheme]]:
        """Schemes of this kind for requantizing, by rank: 0 errs least, 1 about as many bits, 2 others."""
        return iter(())

    def rank_near(self, other: Scheme) -> int:
        """The rank of `nearest_to` by the bits alone: at most 4, or more."""
        return 1 if (self.bits <= 4) == (other.bits <= 4) else 2
