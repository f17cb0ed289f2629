"""Calibration sources: statistics measured while the model is quantized layer by layer, or none.

`OnlineCalibration` runs each float layer on the outputs of the quantized layers before it (as in GPTQ), so
that later layers are calibrated on their real inputs; the quantized layer's outputs go to the next layer.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from ...base.errors import BadInput
from ..base import workers
from ..base.lanes import Share
from ..methods.base import InputStatistics, in_lanes
from ..methods.sign_descent import TunableBlock
from ..plan.selection import HEAD
from ..stream.calibration import Calibration
from ..stream.calls import KvRanges, States, write_states
from ..stream.final_submodules import Finals, FinalSubmodules
from ..stream.layer_stream import LayerStream
from .quantized_layer import LayerStatistics, QuantizedLayer

_CALIBRATION, _HELD_OUT, _FLOAT = "calibration", "held_out", "float"  # in the file of the states
TUNED_PER_BATCH = 2048  # tokens of a pass with gradients: less time than with 1,024, more memory
_JUDGED_SAMPLES = 16  # with which `awq --judge layer` runs a layer
_LAYERS = 2**16  # more than any model has: seeds of layers do not meet


class NoCalibration:
    """A source of calibration statistics, layer by layer; this one has no statistics and no hidden states."""

    def measure(self, index: int, tensors: dict[str, torch.Tensor]) -> LayerStatistics:
        return LayerStatistics({})

    def weights(self, index: int, linears: Collection[str]) -> dict[str, torch.Tensor] | None:
        return None

    def finish(self, index: int, work: QuantizedLayer) -> KvRanges | None:
        """Advance past the quantized layer; returns its key and value ranges, if known."""
        return None

    def measure_head(self) -> LayerStatistics:
        return LayerStatistics({})

    def save(self, path: Path) -> None:
        """Write the state that a resumed run needs for bit-identical results, if there is any."""


class Tuning(NamedTuple):
    """Needs of a method that tunes layers: a seed, and where to say how far it is."""

    seed: int
    status: Callable[[str], None]


class OnlineCalibration(NoCalibration):
    """Statistics from the hidden states after the quantized layers, measured on demand."""

    def __init__(
        self,
        stream: LayerStream,
        calibration: Calibration,
        saved: Path | None,
        *,
        sequential: bool,
        kv: bool,
        asymmetric: bool = False,
        tuning: Tuning | None = None,
    ):
        """Start at the embedding, or after the layers finished when `saved` was written. A `sequential`
        method asks for each linear's statistics itself; an `asymmetric` one (GPTAQ) and one with `tuning`
        take the states of the float model along."""
        self._tuning, self._asymmetric = tuning, asymmetric
        carries_floats = asymmetric or tuning is not None
        self._sequential, self._kv = sequential, kv
        self._stream = stream
        samples, held_out = calibration.samples, calibration.held_out_samples
        stream.prepare(*samples)
        splits = {_CALIBRATION: samples, _HELD_OUT: held_out}
        splits |= {_FLOAT: samples} if carries_floats else {}
        self._shares = stream.shares(splits)
        states = stream.begin(splits, self._shares, saved)
        self._states, self._held_out = states[_CALIBRATION], states[_HELD_OUT]
        self._floats = states.get(_FLOAT)
        self._share, self._held_out_share = self._shares[_CALIBRATION], self._shares[_HELD_OUT]
        self._has_held_out = bool(len(held_out[0]))
        self._finals = Finals()

    def measure(self, index: int, tensors: dict[str, torch.Tensor]) -> LayerStatistics:
        stream, states = self._stream, self._states
        # Those of a tuning alone are its targets, and after the layer by the time that it is measured.
        floats = self._floats if self._asymmetric else None
        samples = len(states) if self._share is None else self._share.samples  # of all workers
        stream.load(index, tensors)
        return LayerStatistics(
            statistics={} if self._sequential else stream.measure(index, states, share=self._share),
            held_out=stream.measure(index, self._held_out, share=self._held_out_share)
            if self._has_held_out
            else {},
            remeasure=lambda replaced, only: stream.measure(
                index,
                states,
                only,
                replaced=replaced,
                floats=floats,
                finals=self._kept(index),
                share=self._share,
            ),
            block=self._block(index),
            layer_error=self._layer_error(index) if samples and stream.called(index) else None,
        )

    def _layer_error(self, index: int) -> Callable[[Mapping[str, torch.Tensor]], float]:
        """Squared error of the loaded layer's output on some samples with some weights replaced."""
        stream, states = self._stream, self._states
        own = slice(0, len(states)) if self._share is None else self._share.own
        samples = torch.arange(max(0, min(_JUDGED_SAMPLES, own.stop) - own.start))
        batches = samples.split(stream.rows(states.token_ids)) if len(samples) else ()
        wanted: list[dict[str, torch.Tensor]] = []

        def outputs() -> list[dict[str, torch.Tensor]]:
            return [stream.outputs(index, states, batch) for batch in batches]

        def error(replaced: Mapping[str, torch.Tensor]) -> float:
            wanted.extend([] if wanted else outputs())
            with stream.substituted(index, replaced):
                given = outputs()
            errors = [
                float((part.to(torch.float32) - other[name]).square().sum())
                for output, other in zip(given, wanted, strict=True)
                for name, part in output.items()
                if part.is_floating_point()
            ]
            return sum(error for worker in workers.gathered(errors) for error in worker)

        return error

    def _kept(self, index: int) -> Finals:
        """Submodules that passes of this layer share, made where it is first measured after its linears."""
        if self._finals == Finals():
            floats = self._floats if self._asymmetric else None
            self._finals = Finals(
                self._stream.final_submodules(index, self._states),
                None if floats is None else self._stream.final_submodules(index, floats),
            )
        return self._finals

    def _block(self, index: int) -> TunableBlock | None:
        """The layer to be tuned towards the float model's states after it; None: it is not."""
        if self._tuning is None or not self._stream.called(index):
            return None
        assert self._floats is not None
        # GPTAQ reads the float model's states before the layer too, until the layer is done.
        targets = self._stream.run(index, self._floats, in_place=not self._asymmetric)
        if not self._asymmetric:
            self._floats = targets
        seed = self._tuning.seed * _LAYERS + index
        return StreamedBlock(
            self._stream, index, self._states, targets, seed, self._tuning.status, self._share
        )

    def weights(self, index: int, linears: Collection[str]) -> dict[str, torch.Tensor]:
        return self._stream.weights(index, linears)

    def finish(self, index: int, work: QuantizedLayer) -> KvRanges | None:
        finals, self._finals = self._finals, Finals()
        if self._floats is not None and (self._asymmetric or self._tuning is None):
            self._floats = self._stream.run(
                index, self._floats, in_place=True, finals=finals.floats
            )
        for name, quantized in work.result.weights.items():
            self._stream.substitute(index, {name: quantized.dequantize()})
        self._stream.substitute(index, work.result.norms | work.result.routers)
        self._stream.substitute(index, work.result.norm_biases, "bias")
        # What was kept of the layer holds if it was of the weights that the method ended with.
        behind = finals.behind
        changed = work.result.norms or work.result.routers or work.result.norm_biases
        if behind is not None and (
            self._kv
            or changed
            or not behind.holds_for(self._stream.weights(index, work.result.weights))
        ):
            behind = None
        states = {_CALIBRATION: self._states, _HELD_OUT: self._held_out}
        following, ranges = run_parts(self._stream, index, states, kv=self._kv, finals=behind)
        self._states, self._held_out = following.values()
        self._stream.unload(index)
        return ranges

    def measure_head(self) -> LayerStatistics:
        held_out = {HEAD: head_statistics(self._stream, self._held_out, self._held_out_share)}
        return LayerStatistics(
            statistics={HEAD: head_statistics(self._stream, self._states, self._share)},
            held_out=held_out if self._has_held_out else {},
        )

    def save(self, path: Path) -> None:
        states = {_CALIBRATION: self._states, _HELD_OUT: self._held_out}
        states |= {} if self._floats is None else {_FLOAT: self._floats}
        write_states(path, states, self._shares)


def run_parts(
    stream: LayerStream,
    index: int,
    parts: Mapping[str, States],
    *,
    kv: bool,
    finals: FinalSubmodules | None = None,
) -> tuple[dict[str, States], KvRanges | None]:
    """The states of each part after a loaded layer, the first part's with submodules that were kept, and the
    ranges of keys and values; BadInput where outputs are not finite."""
    ranges = KvRanges(stream.is_latent) if kv else None
    cache: dict[str, Any] = {"past_key_values": ranges} if kv else {}
    following: dict[str, States] = {}
    try:
        for name, part in parts.items():
            kept = None if following else finals
            following[name] = stream.run(index, part, in_place=True, finals=kept, **cache)
    except AttributeError as error:  # a layer that asks more of a cache than to be updated
        if not kv:
            raise
        raise BadInput(
            f"--kv-cache: {stream.prefix(index)} keeps another kind of cache: {error}"
        ) from error
    ranges = None if ranges is None else ranges.of_all_workers()
    if not all(workers.gathered(all(part.finite() for part in following.values()))):
        raise BadInput(
            f"{stream.prefix(index)} gives NaN or infinite outputs: the checkpoint is damaged"
        )
    return following, ranges


def head_statistics(stream: LayerStream, states: States, share: Share | None) -> InputStatistics:
    """Input statistics of the output projection, from the states after the last layer."""
    record = InputStatistics(stream.hidden_size, stream.device)
    batches = zip(stream.batches(states), stream.head_inputs(states), strict=True)
    for _, inputs in in_lanes(batches, [record], share):
        record.add(inputs)
    return record


class StreamedBlock:
    """A `TunableBlock`: a layer of the stream, the states before it, and the float model's after it."""

    def __init__(
        self,
        stream: LayerStream,
        index: int,
        inputs: States,
        targets: States,
        seed: int,
        status: Callable[[str], None],
        share: Share | None = None,
    ):
        self._share = share
        self.num_samples = len(inputs) if share is None else share.samples
        self.seed = seed
        self.compute = stream.compute
        self.status = status
        self._stream, self._index = stream, index
        self._inputs, self._targets = inputs, targets
        self._weights = {
            name: self._weight(target)
            for name, target in targets.tensors.items()
            if target.is_floating_point()
        }

    def tuned(self, weights: Mapping[str, nn.Parameter]) -> AbstractContextManager[None]:
        return self._stream.replaced(self._index, weights)

    def batches(self, samples: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
        if self._share is None:
            rows = self._stream.rows(self._inputs.token_ids, TUNED_PER_BATCH)
            yield from enumerate(samples.split(rows))
            return
        own = self._share.own
        for index, sample in enumerate(samples.split(1)):
            if own.start <= int(sample) < own.stop:
                yield index, sample - own.start

    def losses(self, samples: torch.Tensor) -> torch.Tensor:
        total = torch.zeros(len(samples), device=self._stream.device)
        for name, output in self._stream.outputs(self._index, self._inputs, samples).items():
            if output.is_floating_point():
                target = self._targets.tensors[name][samples].to(output.device)
                error = (output.to(torch.float32) - target).square().flatten(1).sum(dim=1)
                total = total + error * self._weights[name]
        self._stream.step()
        return total

    def _weight(self, target: torch.Tensor) -> float:
        """1 for the only output; of several, each is measured by its mean square."""
        if len(self._targets.tensors) == 1:
            return 1.0
        if self._share is None:
            square = float(target.to(torch.float32).square().mean())
        else:
            own = [float(sample.to(torch.float32).square().mean()) for sample in target]
            every = [square for part in workers.gathered(own) for square in part]
            square = sum(every) / len(every)
        return 1 / square if square else 0.0
