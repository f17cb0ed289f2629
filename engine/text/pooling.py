"""Pooling of hidden states to embeddings, as a sentence-transformers checkpoint configures it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ...quant.base.errors import BadInput
from ...quant.model.checkpoint import read_json

_MODES = {
    "lasttoken": lambda hidden: hidden[-1],
    "mean": lambda hidden: hidden.mean(dim=0),
    "cls": lambda hidden: hidden[0],
    "max": lambda hidden: hidden.amax(dim=0),
}
_FLAGS = {
    "pooling_mode_lasttoken": "lasttoken",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
}


@dataclass(frozen=True, slots=True)
class Pooling:
    """Pooling mode and normalization, of `modules.json` and the pooling module's config.

    Raises:
        BadInput: an unsupported mode.
    """

    mode: str
    normalize: bool

    def __post_init__(self) -> None:
        if self.mode not in _MODES:
            raise BadInput(f"pooling {self.mode!r}: known are {', '.join(_MODES)}")

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """A vector, float32 [hidden], of the final normed hidden states [tokens, hidden] of a text."""
        vector = _MODES[self.mode](hidden.float())
        return torch.nn.functional.normalize(vector, dim=0) if self.normalize else vector


def read_pooling(folder: Path) -> Pooling | None:
    """The pooling of a checkpoint; None if it is not an embedding model.

    Raises:
        BadInput: an unsupported pooling mode or module.
    """
    listing = folder / "modules.json"
    default = folder / "1_Pooling" / "config.json"
    if not listing.is_file():
        return _pooling(read_json(default), normalize=False) if default.is_file() else None
    try:
        modules: Any = json.loads(listing.read_text(encoding="utf-8"))
        kinds = {
            str(module["type"]).rpartition(".")[2]: folder / module["path"] for module in modules
        }
    except (ValueError, TypeError, KeyError) as error:
        raise BadInput(f"{listing} is not a list of modules: {error}") from error
    if strange := kinds.keys() - {"Transformer", "Pooling", "Normalize"}:
        raise BadInput(f"{listing}: module {min(strange)!r} is not supported")
    if "Pooling" not in kinds:
        return None
    return _pooling(read_json(kinds["Pooling"] / "config.json"), normalize="Normalize" in kinds)


def _pooling(config: dict[str, Any], *, normalize: bool) -> Pooling:
    """Newer configs name the mode, older ones have a flag per mode."""
    flags = [name for name, value in config.items() if name.startswith("pooling_mode_") and value]
    modes = config.get("pooling_mode") or [_FLAGS.get(name, name) for name in flags]
    modes = [modes] if isinstance(modes, str) else modes
    if len(modes) != 1:
        raise BadInput(f"pooling by {' and '.join(modes) or 'nothing'}: need one way")
    return Pooling(modes[0], normalize)
