"""`Kind`, `Storage` and `LoaderRules`: everything that a scheme's folder answers beside the scheme itself.

`kind_of(scheme)` has grids, rounding and blank weights (`KIND` in `kind.py`), `storage_of(scheme)` formats,
raw readers and loaders' rules (`STORAGE` in `formats.py`); no caller names a kind.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from typing import Any, Generic, TypeVar

import torch

from ....base.errors import BadInput
from ...base.scheme import Scheme
from .containers import BitsAndBytesCodes, CompressedLayouts, ModelOptAlgorithms
from .format import WeightFormat
from .grid import Grid
from .tensor import QuantizedTensor, require_finite, require_scales

EXPERTS = ".experts."
# Split over ranks along the inputs; all other linears along the outputs.
_ROW_PARALLEL = ("o_proj", "down_proj", "w2", "out_proj", "dense", "fc2")


@dataclass(frozen=True, slots=True)
class RankMatrix:
    """A matrix on one of vLLM's ranks: fused linears, of which `parts` are there, split over `ranks`."""

    module: str
    parts: tuple[int, ...]
    in_features: int
    ranks: int

    @classmethod
    def of(cls, module: str, outputs: Collection[int], in_features: int, ranks: int) -> RankMatrix:
        """The part of one of `ranks`; a width that they do not divide is one that no group divides either."""
        if module.endswith(_ROW_PARALLEL):
            part = in_features // ranks if in_features % ranks == 0 else 1
            return cls(module, tuple(outputs), part, ranks)
        parts = tuple(out // ranks if out % ranks == 0 else 1 for out in outputs)
        return cls(module, parts, in_features, ranks)

    @property
    def row_parallel(self) -> bool:
        return self.module.endswith(_ROW_PARALLEL)

    @property
    def out_features(self) -> int:
        return sum(self.parts)


class LoaderRules:
    """The rules of other loaders for one kind; here those of a kind that no other loader reads."""

    merges_without_codes: bool = False
    """True if transformers keeps weights without codes that it merges with others."""

    def vllm_kernel(self, scheme: Any, matrix: RankMatrix, format_name: str) -> tuple[bool, str]:
        """Answer if vLLM has a kernel for a matrix, with its name or the violated rule."""
        return False, f"no kernel for such codes in the format {format_name}"

    def vllm_tried(self, scheme: Any, format_name: str) -> bool:
        """True if vLLM for CPU loaded a language model of such weights."""
        return False

    def vllm_tried_with_images(self, scheme: Any) -> bool:
        """True if it loaded an image-text model of such weights in compressed-tensors."""
        return False

    def merged_right(self, scheme: Any) -> bool:
        """True if transformers dequantizes such a weight before it merges it with others."""
        return False

    def transformers_needs(self, scheme: Any) -> str:
        """Needs of its reader of compressed-tensors for such weights, as text; empty: none."""
        return ""


SchemeT = TypeVar("SchemeT", bound=Scheme)


@dataclass(frozen=True, slots=True)
class Rounding:
    """Everything that codes may depend on next to the weight and the scheme.

    Attributes:
        scale_dtype: the dtype that the format stores scales in, if the kind leaves it open.
        input_scale: float32 `[1]`, for a scheme with static activations.
        largest: the largest magnitude that one scale of the whole weight must cover, where the scheme fuses
            scales; None: that of the weight, but a grid needs it.
        importance: weight of each channel's squared error, float32 `[in]`, where the scheme searches ranges.
        mse: True to search integer ranges for the least `sum |w - w'|**2.4`.
    """

    scale_dtype: torch.dtype
    name: str = "weight"
    input_scale: torch.Tensor | None = None
    largest: torch.Tensor | None = None
    importance: torch.Tensor | None = None
    mse: bool = False


class Kind(ABC, Generic[SchemeT]):
    """The codes of one scheme: how weights are rounded to them, by a solver or to nearest."""

    def __init__(self, scheme: SchemeT):
        self.scheme = scheme

    @property
    def search_operations(self) -> float:
        """Operations that finding the code of one weight takes, where they count."""
        return 0.0

    @abstractmethod
    def blank(
        self, out_features: int, in_features: int, scale_dtype: torch.dtype
    ) -> QuantizedTensor:
        """A weight whose every code is 0, to measure the packed size of a format."""

    def rounded(self, weight: torch.Tensor, how: Rounding) -> QuantizedTensor:
        weight = weight.to(torch.float32)
        tensor = self.grid_for(weight.shape, how).nearest(weight, how.importance)
        try:
            require_scales(tensor, how.name)
        except BadInput:
            require_finite(weight, how.name)
            raise
        return tensor

    def grid_for(self, shape: tuple[int, ...], how: Rounding) -> Grid:
        raise BadInput(f"{self.scheme.label} weights have no grid apart from a weight")

    def round(self, weight: torch.Tensor, scale_dtype: torch.dtype, **how: Any) -> QuantizedTensor:
        """Round a weight `[out, in]` to nearest (RTN), by fields of `Rounding`. BadInput: it does not fit."""
        return self.rounded(weight, Rounding(scale_dtype, **how))

    @property
    def refuses_solver(self) -> str | None:
        """Why no solver but nearest goes to the scheme; None: it has a `Grid`."""
        return None

    def noisy(self, weight: torch.Tensor, name: str) -> torch.Tensor | None:
        """The weight with noise like that of its rounding; None: rounding is cheap enough to do it."""
        return None


@dataclass(frozen=True, slots=True)
class Storage:
    """How weights of a kind are stored: formats, parts of shared ones (None: not there), loaders' rules."""

    formats: Sequence[WeightFormat] = ()
    compressed_tensors: CompressedLayouts | None = None
    modelopt: ModelOptAlgorithms | None = None
    bitsandbytes: BitsAndBytesCodes | None = None
    rules: LoaderRules = field(default_factory=LoaderRules)


def kind_of(scheme: Scheme) -> Kind[Any]:
    return _module_of(type(scheme), "kind").KIND(scheme)


def storage_of(scheme: Scheme | type[Scheme]) -> Storage:
    scheme_class = scheme if isinstance(scheme, type) else type(scheme)
    return _module_of(scheme_class, "formats").STORAGE


@cache
def _module_of(scheme_class: type[Scheme], module: str) -> Any:
    return import_module(f".{module}", scheme_class.__module__.rpartition(".")[0])
