"""Pooling of hidden states to embeddings, as a sentence-transformers checkpoint configures it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...quant.base.errors import BadInput
from ...quant.model.checkpoint import read_json
from ..base.pooling_params import PoolingParams

_FLAGS = {
    "pooling_mode_lasttoken": "last",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
}
_MODES = {"lasttoken": "last"}

Vector = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Pooling:
    """Pooling, normalization, and the lengths to which vectors may be cut.

    Attributes:
        dimensions: the lengths that a Matryoshka model was trained for; empty where the config names none.

    Raises:
        BadInput: an unsupported mode.
    """

    params: PoolingParams
    normalize: bool
    dimensions: tuple[int, ...] = ()

    def embedding(self, pooled: Sequence[float], dimensions: int | None = None) -> Vector:
        """The embedding, float32, of a pooled vector; cut to its first `dimensions`, it is normalized again
        (Matryoshka representations, arXiv:2205.13147).

        Raises:
            BadInput: more dimensions than the vector has, or a number that the model was not trained for.
        """
        vector = np.asarray(pooled, dtype=np.float32)
        if dimensions is not None:
            if dimensions > len(vector):
                raise BadInput(f"dimensions = {dimensions}: this model has {len(vector)}")
            if self.dimensions and dimensions not in (len(vector), *self.dimensions):
                trained = ", ".join(map(str, self.dimensions))
                raise BadInput(f"dimensions = {dimensions}: this model was trained for {trained}")
            vector = vector[:dimensions]
        return normalized(vector) if self.normalize else vector


def normalized(vector: Vector) -> Vector:
    """The vector at length 1; zero stays zero."""
    return vector / np.maximum(np.linalg.norm(vector), np.float32(1e-12))


def read_pooling(folder: Path) -> Pooling | None:
    """The pooling of a checkpoint; None if it is not an embedding model.

    Raises:
        BadInput: an unsupported pooling mode or module.
    """
    modules = read_modules(folder)
    default = folder / "1_Pooling"
    if not modules:
        has_default = (default / "config.json").is_file()
        return _pooling(folder, default, normalize=False) if has_default else None
    if strange := modules.keys() - {"Transformer", "Pooling", "Normalize"}:
        raise BadInput(f"{folder / 'modules.json'}: module {min(strange)!r} is not supported")
    if "Pooling" not in modules:
        return None
    return _pooling(folder, modules["Pooling"], normalize="Normalize" in modules)


def read_modules(folder: Path) -> dict[str, Path]:
    """The folders of a sentence-transformers checkpoint's modules by their class; empty without modules.json.

    Raises:
        BadInput: modules.json is not a list of modules.
    """
    listing = folder / "modules.json"
    if not listing.is_file():
        return {}
    try:
        modules: Any = json.loads(listing.read_text(encoding="utf-8"))
        return {
            str(module["type"]).rpartition(".")[2]: folder / module["path"] for module in modules
        }
    except (ValueError, TypeError, KeyError) as error:
        raise BadInput(f"{listing} is not a list of modules: {error}") from error


def _pooling(folder: Path, module: Path, *, normalize: bool) -> Pooling:
    """Newer configs name the mode, older ones have a flag per mode."""
    config = read_json(module / "config.json")
    flags = [name for name, value in config.items() if name.startswith("pooling_mode_") and value]
    modes = config.get("pooling_mode") or [_FLAGS.get(name, name) for name in flags]
    modes = [modes] if isinstance(modes, str) else modes
    if len(modes) != 1:
        raise BadInput(f"pooling by {' and '.join(modes) or 'nothing'}: need one way")
    trained = read_json(folder / "config.json").get("matryoshka_dimensions") or ()
    params = PoolingParams(_MODES.get(modes[0], modes[0]))
    return Pooling(params, normalize, tuple(int(size) for size in trained))
