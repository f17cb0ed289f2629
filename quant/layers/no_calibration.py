"""No calibration: layers are quantized without being run, by data-free methods without errors."""

from __future__ import annotations

from pathlib import Path

import torch

from ..stream.kv_scales import KvRanges
from .quantized_layer import LayerStatistics, QuantizedLayer


class NoCalibration:
    """A `Source` without statistics and without hidden states."""

    def measure(self, index: int, tensors: dict[str, torch.Tensor]) -> LayerStatistics:
        return LayerStatistics({})

    def weights(self, index: int, linears: tuple[str, ...]) -> dict[str, torch.Tensor] | None:
        return None

    def finish(self, index: int, work: QuantizedLayer) -> KvRanges | None:
        return None

    def measure_head(self) -> LayerStatistics:
        return LayerStatistics({})

    def save(self, path: Path) -> None:
        """No-op: there is no state."""
