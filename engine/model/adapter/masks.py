"""Attention masks that a model's own code makes, read back as the rules of paged attention."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

_ATTRIBUTE = "llmopt_mask"
MaskFunction = Callable[[Any, Any, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class LayerMask:
    """Causal mask of a layer; with a sliding `window` or a `chunk`, in tokens, as in `AttentionRule`."""

    window: int | None = None
    chunk: int | None = None

    def visible(self, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        """Which key positions a query position attends to."""
        visible = key <= query
        if self.window is not None:
            visible = visible & (key > query - self.window)
        if self.chunk is not None:
            visible = visible & (key // self.chunk == query // self.chunk)
        return visible


def recorded_mask(
    *_: Any,
    mask_function: MaskFunction,
    device: torch.device,
    local_size: int | None = None,
    **__: Any,
) -> torch.Tensor:
    """Mask function for transformers: an empty tensor that carries the rule for `layer_mask` to read."""
    mask = torch.empty(1, 1, 1, 1, device=device)
    setattr(mask, _ATTRIBUTE, (mask_function, local_size))
    return mask


def layer_mask(mask: torch.Tensor | None, sliding_window: int | None) -> LayerMask:
    """The rule of a layer that is given `mask`; without one it is causal, with the layer's own window.

    Raises:
        ValueError: the model made the mask itself, or it is of another kind.
    """
    if mask is None:
        return LayerMask(window=sliding_window)
    function, size = getattr(mask, _ATTRIBUTE, (None, None))
    if function is None:
        raise ValueError("its attention needs a mask of its own")
    candidates = [LayerMask()]
    if size is not None:
        candidates = [LayerMask(window=size), LayerMask(chunk=size), LayerMask()]
    positions = _positions(size or 16, mask.device)
    query, key = positions[:, None], positions[None, :]
    allowed = function(0, 0, query, key)
    for candidate in candidates:
        if torch.equal(allowed.expand(len(positions), -1), candidate.visible(query, key)):
            return candidate
    raise ValueError("its attention has a mask other than causal, sliding-window or chunked")


def _positions(size: int, device: torch.device) -> torch.Tensor:
    """Positions at and around the first multiples of `size`, where the kinds of masks differ."""
    at = {size * k + d for k in range(4) for d in (-1, 0, 1, size // 2)}
    return torch.tensor(sorted(p for p in at if p >= 0), device=device)
