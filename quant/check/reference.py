"""A quantized checkpoint against its plain original: the linears whose weights are not the original's.

A weight is off if its relative error is several times that of rounding the original to the same scheme.
Methods fold scales into the weights (AWQ, SmoothQuant) or rotate the heads' values (R2): where most linears
of a kind are off as they are, a factor of each row and column, and a rotation of each head, are fitted first.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from ..kinds.base.kind import kind_of
from ..kinds.base.tensor import QuantizedTensor
from ..kinds.ggml.scheme import GgufScheme
from ..model.checkpoint import Checkpoint, kind_name
from .findings import Finding

_TIMES_ROUNDING = 3.0
_LEAST, _MOST = 0.05, 0.9  # relative errors that are never, and always, off
_FITS = 3
_COMPARED_ROWS = 64  # for the search of the linear that a weight belongs to


@dataclass(frozen=True, slots=True)
class _Compared:
    """One linear: relative errors as it is and after the fit, and the error from which it is off."""

    module: str
    error: float
    fitted: float
    limit: float
    found_as: str


class Comparison:
    """The comparison of one linear after another, of which none is kept."""

    def __init__(self, reference: Checkpoint) -> None:
        self._reference = reference
        config = reference.text_config
        heads = config.get("num_attention_heads") or 1
        self._head = int(config.get("head_dim") or config.get("hidden_size", 0) // heads or 1)
        self._families: dict[str, list[_Compared]] = defaultdict(list)
        self._named: dict[str, list[str]] = defaultdict(list)
        for name in reference.names:
            self._named[kind_name(name)].append(name)

    def add(self, module: str, tensor: QuantizedTensor) -> Iterator[Finding]:
        """Compare a linear; findings for one that the reference does not have in this shape."""
        name, values = f"{module}.weight", tensor.dequantize()
        if name not in self._reference or self._reference.shape(name) != tuple(values.shape):
            yield Finding(
                "not-in-reference",
                module,
                f"the reference has no {name} of shape {list(values.shape)}: give the checkpoint that was "
                "quantized",
            )
            return
        weight = self._reference.tensor(name).to(torch.float32)
        error = fitted = _relative(values, weight)
        limit, found_as = _MOST, ""
        if error > _LEAST:
            limit = min(_MOST, max(_LEAST, _TIMES_ROUNDING * _rounding_error(weight, tensor)))
        if error > limit:
            fitted = _relative(values, self._fit(module, values, weight))
            if fitted > limit:
                found_as = self._found_as(module, values, weight, limit)
        self._families[kind_name(module)].append(_Compared(module, error, fitted, limit, found_as))
        self._reference.release()

    def findings(self) -> Iterator[Finding]:
        for family in self._families.values():
            off = sum(linear.error > linear.limit for linear in family)
            folded = 2 * off > len(family)
            for linear in family:
                error = linear.fitted if folded else linear.error
                if error > linear.limit:
                    yield Finding(
                        "off-reference",
                        linear.module,
                        f"its weights differ from the reference by {error:.2f} of their norm, where up to "
                        f"{linear.limit:.2f} is usual for the scheme{linear.found_as}: quantize it again",
                    )

    def _fit(self, module: str, values: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """The reference with rows and columns scaled, and heads rotated where values pass, to be nearest."""
        fitted = _scaled(values, weight)
        leaf = module.rpartition(".")[2]
        if leaf not in ("v_proj", "o_proj") or _relative(values, fitted) < _LEAST:
            return fitted
        turned = values.T if leaf == "o_proj" else values
        if turned.shape[0] % self._head:
            return fitted
        rotated = weight.T if leaf == "o_proj" else weight
        for _ in range(_FITS):
            rotated = _scaled(turned, _rotated(turned, rotated, self._head))
        rotated = rotated.T if leaf == "o_proj" else rotated
        return min(fitted, rotated, key=lambda candidate: _relative(values, candidate))

    def _found_as(
        self, module: str, values: torch.Tensor, weight: torch.Tensor, limit: float
    ) -> str:
        """Where the weight belongs, for the message; empty where no linear of its kind is it."""
        if weight.shape[0] == weight.shape[1] and _relative(values.T, weight) <= limit:
            return "; it is transposed"
        layer = module.partition(".experts.")[0] if ".experts." in module else ""
        for name in self._named[kind_name(f"{module}.weight")]:
            if not name.startswith(layer) or name == f"{module}.weight":
                continue
            if self._reference.shape(name) != tuple(values.shape):
                continue
            other = self._reference.tensor(name)[:_COMPARED_ROWS].to(torch.float32)
            if _relative(values[:_COMPARED_ROWS], other) <= limit:
                return f"; it holds those of {name.removesuffix('.weight')}"
        return ""


def _relative(values: torch.Tensor, weight: torch.Tensor) -> float:
    norm = float(weight.norm())
    error = float((values - weight).norm()) / norm if norm else float(values.norm() > 0)
    return error if error == error else float("inf")  # NaN


def _rounding_error(weight: torch.Tensor, tensor: QuantizedTensor) -> float:
    """Relative error of rounding to the scheme; where a search takes long, about that of its bits."""
    scheme = tensor.scheme
    kind = kind_of(scheme)
    if kind.search_operations or isinstance(scheme, GgufScheme):
        return 1.2 * 2.0**-scheme.bits
    given = getattr(tensor, "input_scale", None)
    rounded = kind.round(weight, torch.float32, input_scale=given)
    return _relative(rounded.dequantize(), weight)


def _scaled(values: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The weight with a factor for each row and column, by alternating least squares."""
    for _ in range(_FITS):
        for dimension in (0, 1):
            energy = weight.square().sum(dim=dimension, keepdim=True)
            along = (values * weight).sum(dim=dimension, keepdim=True)
            weight = weight * torch.where(energy > 0, along / energy, 0.0)
    return weight


def _rotated(values: torch.Tensor, weight: torch.Tensor, head: int) -> torch.Tensor:
    """The weight with the rows of each head rotated to be nearest (orthogonal Procrustes)."""
    theirs, ours = (part.unflatten(0, (-1, head)) for part in (weight, values))
    left, _, right = torch.linalg.svd(ours @ theirs.transpose(1, 2))
    return (left @ right @ theirs).flatten(0, 1)
