"""Online calibration: statistics measured while the model is quantized layer by layer.

`OnlineCalibration` runs each float layer on the outputs of the quantized layers before it (as in GPTQ), so
that later layers are calibrated on their real inputs; the quantized layer's outputs go to the next layer.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import torch
from safetensors.torch import load_file

from ..base.atomic_io import layout_of, write_tensors
from ..base.errors import BadInput
from ..calibration.calibration import Calibration
from ..methods.base import InputStatistics
from ..request.selection import HEAD
from ..stream.kv_scales import KvRanges
from ..stream.layer_stream import TOKENS_PER_BATCH, LayerStream
from .quantized_layer import LayerStatistics, QuantizedLayer


class Source(Protocol):
    """A source of calibration statistics, layer by layer."""

    def measure(self, index: int, tensors: dict[str, torch.Tensor]) -> LayerStatistics:
        """Input statistics of layer `index`; `tensors` are its weights."""
        ...

    def weights(self, index: int, linears: tuple[str, ...]) -> dict[str, torch.Tensor] | None:
        """The float32 weights of the layer that was measured, if they are in memory."""
        ...

    def finish(self, index: int, work: QuantizedLayer) -> KvRanges | None:
        """Advance past the quantized layer; returns its key and value ranges, if known."""
        ...

    def measure_head(self) -> LayerStatistics:
        """Input statistics of the output projection."""
        ...

    def save(self, path: Path) -> None:
        """Write the state that a resumed run needs for bit-identical results."""
        ...


class OnlineCalibration:
    """Statistics from the hidden states after the quantized layers, measured on demand."""

    def __init__(
        self,
        stream: LayerStream,
        calibration: Calibration,
        saved: Path | None,
        *,
        sequential: bool,
        kv: bool,
    ):
        """Start at the embedding, or after the layers finished when `saved` was written.

        Args:
            sequential: whether the method requests each linear's statistics itself (true-sequential).
            kv: whether to measure the ranges of keys and values.
        """
        self._sequential, self._kv = sequential, kv
        self._stream = stream
        stream.prepare(calibration.token_ids)
        if saved is None:
            self._hidden = stream.embed(calibration.token_ids)
            self._held_out = stream.embed(calibration.held_out)
        else:
            state = load_file(saved)
            self._hidden, self._held_out = state["hidden"].clone(), state["held_out"].clone()

    def measure(self, index: int, tensors: dict[str, torch.Tensor]) -> LayerStatistics:
        stream, hidden = self._stream, self._hidden
        stream.load(index, tensors)
        return LayerStatistics(
            statistics={} if self._sequential else stream.measure(index, hidden),
            held_out=stream.measure(index, self._held_out) if len(self._held_out) else {},
            remeasure=lambda replaced, only: stream.remeasure(index, hidden, replaced, only),
        )

    def weights(self, index: int, linears: tuple[str, ...]) -> dict[str, torch.Tensor]:
        return self._stream.weights(index, linears)

    def finish(self, index: int, work: QuantizedLayer) -> KvRanges | None:
        for name, quantized in work.result.weights.items():
            self._stream.substitute(index, {name: quantized.dequantize()})
        self._stream.substitute(index, work.result.norms | work.result.routers)
        ranges = KvRanges() if self._kv else None
        cache = {"past_key_values": ranges} if self._kv else {}
        for hidden in (self._hidden, self._held_out):
            self._stream.run(index, hidden, out=hidden, **cache)
        self._stream.unload(index)
        if not all(map(_finite, (self._hidden, self._held_out))):
            raise BadInput(
                f"{work.prefix} gives NaN or infinite outputs: the checkpoint is damaged"
            )
        return ranges

    def measure_head(self) -> LayerStatistics:
        held_out = {HEAD: head_statistics(self._stream, self._held_out)}
        return LayerStatistics(
            statistics={HEAD: head_statistics(self._stream, self._hidden)},
            held_out=held_out if len(self._held_out) else {},
        )

    def save(self, path: Path) -> None:
        state = {"hidden": self._hidden, "held_out": self._held_out}
        write_tensors(path, state, layout_of(state))


def _finite(tensor: torch.Tensor) -> bool:
    """Whether all values are finite; checks minimum and maximum, which takes no copy."""
    return not tensor.numel() or bool(torch.isfinite(torch.stack(torch.aminmax(tensor))).all())


def head_statistics(stream: LayerStream, hidden: torch.Tensor) -> InputStatistics:
    """Input statistics of the output projection, from `[samples, length, hidden]` states."""
    record = InputStatistics(hidden.shape[-1])
    batch = max(1, TOKENS_PER_BATCH // max(1, hidden.shape[1]))
    for start in range(0, hidden.shape[0], batch):
        record.add(stream.final_norm(hidden[start : start + batch]))
    return record
