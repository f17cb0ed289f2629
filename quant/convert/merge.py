"""Merging of LoRA and DoRA adapters into a checkpoint, tensor by tensor.

LoRA adds `scale · B·A` to a weight. DoRA (Liu et al., arXiv:2402.09353, section 4) gives each output channel
of that sum the learned magnitude: `m · (W + scale · B·A) / ‖W + scale · B·A‖`, norms over the input channels.
A quantized base is dequantized first (QLoRA, Dettmers et al., arXiv:2305.14314): the adapter learned on top
of those values, so they are what it is added to. Everything is computed in float32.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from ..base.atomic_io import atomic_folder, write_atomically
from ..base.errors import BadInput
from ..base.progress import Progress, Silent
from ..formats.registry import quantized_modules
from ..model.checkpoint import Checkpoint
from ..models import short_name
from ..plan.journal import sha256_of_file, weight_digests
from ..plan.manifest import to_json
from .adapter import WEIGHTS_NAME, AdapterWeights, LoraSettings
from .plain import DTYPES, plain_tensors, write_plain

RECORD_NAME = "merge.json"
_UNFINISHED = ".merging"
_FROM_LAYER = re.compile(r"(?:^|\.)(layers\.\d+\..+|h\.\d+\..+)$")


@dataclass(frozen=True, slots=True)
class WeightedAdapter:
    """An adapter folder and the factor of its change."""

    folder: Path
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class Merged:
    """A merged checkpoint.

    Attributes:
        modules: the linears that changed, each with the norm of its change over that of its weight.
        kept: the least share of a change that rounding to the dtype of the file left, 1 in float32.
    """

    output: Path
    dtype: str
    modules: dict[str, float]
    kept: float


def merge(
    base: Checkpoint,
    adapters: Sequence[WeightedAdapter],
    output: Path,
    *,
    dtype: str = "auto",
    progress: Progress | None = None,
) -> Merged:
    """Write `base` with the adapters in its weights as a plain checkpoint, one shard in memory at a time.

    Args:
        output: folder to create; it appears atomically, once everything is written.
        dtype: of the floating-point tensors; `auto` keeps that of each, and writes dequantized ones in the
            dtype of the config.

    Raises:
        BadInput: `output` exists, a damaged base or adapter, or adapters that do not fit the base or each
            other.
    """
    if dtype not in ("auto", *DTYPES):
        raise BadInput(f"--dtype {dtype!r}: choose auto, {', '.join(DTYPES)}")
    job = _Merge(base, [_Adapter(adapter) for adapter in adapters], dtype, progress or Silent())
    job.check()
    with atomic_folder(output, _UNFINISHED) as work:
        job.write(work)
        write_atomically(work / RECORD_NAME, to_json(job.record()))
    return Merged(output, dtype, job.changes, job.kept)


class _Adapter:
    """An opened adapter."""

    def __init__(self, given: WeightedAdapter) -> None:
        self.folder, self.weight = given.folder, given.weight
        self.settings = LoraSettings.read(given.folder)
        self.weights = AdapterWeights(given.folder, self.settings)

    def change(self, module: str, weight: torch.Tensor) -> torch.Tensor:
        """Change that the adapter adds to a module's `weight`, float32 [out, in]."""
        pair = self.weights.pair(module, *weight.shape)
        change = pair.up @ pair.down
        if not self.settings.is_dora:
            return self.weight * change
        directed = weight + change
        magnitude = self.weights.magnitude(module, len(weight))
        scale = magnitude / torch.linalg.vector_norm(directed, dim=1)
        return scale[:, None] * directed - weight


class _Merge:
    """An unfinished merge: which adapter changes which tensor, and what was changed so far."""

    def __init__(
        self, base: Checkpoint, adapters: Sequence[_Adapter], dtype: str, progress: Progress
    ) -> None:
        self._base = base
        self._adapters = adapters
        self._dtype = DTYPES.get(dtype)
        self._progress = progress
        self._quantized = quantized_modules(base)
        self.changes: dict[str, float] = {}
        self.kept = 1.0

    def check(self) -> None:
        """Find every module of every adapter, and check its shapes, before anything is written.

        Raises:
            BadInput: see `merge`.
        """
        for adapter in self._adapters:
            if adapter.settings.is_dora and (len(self._adapters) > 1 or adapter.weight != 1.0):
                raise BadInput(
                    f"{adapter.folder}: a DoRA adapter sets the magnitude of the weights: merge it alone, "
                    "with the weight 1"
                )
        for module, changes in self._targets.items():
            if module in self._quantized:
                continue
            shape = self._base.shape(f"{module}.weight")
            if len(shape) != 2:
                raise BadInput(f"{self._base.folder}: {module}.weight is {shape}, not a matrix")
            for adapter, name in changes:
                adapter.weights.pair(name, *_upright(shape, adapter))

    @cached_property
    def _targets(self) -> dict[str, list[tuple[_Adapter, str]]]:
        """The adapters of every linear of the base, each with its name for it."""
        targets: dict[str, list[tuple[_Adapter, str]]] = {}
        for adapter in self._adapters:
            for name in adapter.weights.modules:
                targets.setdefault(self._module_of(adapter, name), []).append((adapter, name))
        return targets

    @cached_property
    def _linears(self) -> set[str]:
        plain = {n.removesuffix(".weight") for n in self._base.names if n.endswith(".weight")}
        return plain | self._quantized

    def _module_of(self, adapter: _Adapter, name: str) -> str:
        """The linear of the base that an adapter calls `name`: so, or with another prefix of its layers."""
        if name in self._linears:
            return name
        if in_layer := _FROM_LAYER.search(name):
            ending = f".{in_layer[1]}"
            same = [linear for linear in self._linears if f".{linear}".endswith(ending)]
            if len(same) == 1:
                return same[0]
        tied = self._base.config.get("tie_word_embeddings") and name == "lm_head"
        why = "is tied to the embeddings" if tied else "is no linear of it"
        raise BadInput(f"{adapter.weights.path}: {name} {why}: {self._base.folder} is not its base")

    def write(self, work: Path) -> None:
        """Write the plain checkpoint, one shard in memory at a time."""
        tensors = plain_tensors(
            self._base,
            self._dtype,
            self._merged,
            edited=self._targets,
            progress=self._progress,
            what="merging",
        )
        write_plain(work, self._base, tensors, self._dtype)

    def _merged(self, module: str, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        change = torch.zeros_like(weight)
        for adapter, name in self._targets.get(module, ()):
            if adapter.settings.is_transposed:
                change += adapter.change(name, weight.T).T
            else:
                change += adapter.change(name, weight)
        merged = (weight + change).to(dtype)
        if module in self._targets:
            norm = float(change.norm())
            self.changes[module] = norm / max(float(weight.norm()), 1e-30)
            if norm:
                stored = merged.float() - weight.to(dtype).float()
                self.kept = min(self.kept, float((stored * change).sum()) / norm**2)
        return merged.contiguous()

    def record(self) -> dict[str, Any]:
        """Record of what was merged, with the digests of the base and of every adapter."""
        return {
            "llmopt": version("llmopt"),
            "base": short_name(self._base.path),
            "base_sha256": weight_digests(self._base),
            "adapters": [
                {
                    "name": adapter.folder.resolve().name,
                    "sha256": sha256_of_file(adapter.folder / WEIGHTS_NAME),
                    "weight": adapter.weight,
                    "rank": adapter.settings.rank,
                    "dora": adapter.settings.is_dora,
                }
                for adapter in self._adapters
            ],
            "changes": self.changes,
        }


def _upright(shape: Sequence[int], adapter: _Adapter) -> tuple[int, int]:
    """(outputs, inputs) of a weight of this shape."""
    out_features, in_features = shape
    return (
        (in_features, out_features)
        if adapter.settings.is_transposed
        else (out_features, in_features)
    )
