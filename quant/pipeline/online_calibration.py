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
from ..methods.base import InputStatistics, LayerResult, in_lanes
from ..methods.sign_descent import TunableBlock
from ..plan.selection import HEAD
from ..stream.calibration import Calibration
from ..stream.calls import KvRanges, States, write_states
from ..stream.final_submodules import Finals
from ..stream.layer_stream import LayerStream
from .quantized_layer import LayerStatistics

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

    def finish(self, index: int, result: LayerResult) -> KvRanges | None:
        """Advance past the quantized layer; returns its key and value ranges, if they are measured now."""
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
        unchanged: bool = False,
    ):
        """Start at the embedding, or after the layers finished when `saved` was written. A `sequential`
        method asks for each linear's statistics itself; an `asymmetric` one (GPTAQ) and one with `tuning`
        take the states of the float model along. Layers that stay `unchanged` run on from what was measured.
        """
        self._stream, self._tuning, self._asymmetric = stream, tuning, asymmetric
        self._sequential, self._kv, self._unchanged = sequential, kv, unchanged
        samples, held_out = calibration.samples, calibration.held_out_samples
        stream.prepare(*samples)
        splits = {_CALIBRATION: samples, _HELD_OUT: held_out}
        splits |= {_FLOAT: samples} if asymmetric or tuning is not None else {}
        self._shares = stream.shares(splits)
        self._states = stream.begin(splits, self._shares, saved)
        self._has_held_out = bool(len(held_out[0]))
        self._finals = Finals()

    def measure(self, index: int, tensors: dict[str, torch.Tensor]) -> LayerStatistics:
        stream, states, share = self._stream, self._states[_CALIBRATION], self._shares[_CALIBRATION]
        # Those of a tuning alone are its targets, and after the layer by the time that it is measured.
        floats = self._states[_FLOAT] if self._asymmetric else None
        samples = len(states) if share is None else share.samples  # of all workers
        stream.load(index, tensors)
        if self._unchanged and not self._kv:
            # The pass that measures keeps the inputs of last linears, which the next one begins with.
            self._finals = Finals(stream.final_submodules(index, states))
        statistics, held_out = {}, {}
        if not self._sequential:
            linears = stream.family(index).linears
            statistics = stream.measure(
                index, states, finals=self._finals, final=linears, share=share
            )
        if self._has_held_out:
            held_out = stream.measure(index, self._states[_HELD_OUT], share=self._shares[_HELD_OUT])
        return LayerStatistics(
            statistics=statistics,
            held_out=held_out,
            remeasure=lambda replaced, only: stream.measure(
                index,
                states,
                only,
                replaced=replaced,
                floats=floats,
                finals=self._kept(index, states, floats),
                share=share,
            ),
            block=self._block(index),
            layer_error=self._layer_error(index) if samples and stream.called(index) else None,
        )

    def _layer_error(self, index: int) -> Callable[[Mapping[str, torch.Tensor]], float]:
        """Squared error of the loaded layer's output on some samples with some weights replaced."""
        stream, states, share = self._stream, self._states[_CALIBRATION], self._shares[_CALIBRATION]
        own = slice(0, len(states)) if share is None else share.own
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

    def _kept(self, index: int, states: States, floats: States | None) -> Finals:
        """Submodules that passes of this layer share, made where it is first measured after its linears."""
        if self._finals == Finals():
            self._finals = Finals(
                self._stream.final_submodules(index, states),
                None if floats is None else self._stream.final_submodules(index, floats),
            )
        return self._finals

    def _block(self, index: int) -> TunableBlock | None:
        """The layer to be tuned towards the float model's states after it; None: it is not."""
        if self._tuning is None or not self._stream.called(index):
            return None
        # GPTAQ reads the float model's states before the layer too, until the layer is done.
        targets = self._stream.run(index, self._states[_FLOAT], in_place=not self._asymmetric)
        if not self._asymmetric:
            self._states[_FLOAT] = targets
        inputs, share = self._states[_CALIBRATION], self._shares[_CALIBRATION]
        seed = self._tuning.seed * _LAYERS + index
        return StreamedBlock(self._stream, index, inputs, targets, seed, self._tuning.status, share)

    def weights(self, index: int, linears: Collection[str]) -> dict[str, torch.Tensor]:
        return self._stream.weights(index, linears)

    def finish(self, index: int, result: LayerResult) -> KvRanges | None:
        """Raises BadInput where outputs are not finite."""
        stream, states = self._stream, self._states
        (behind, of_floats), self._finals = self._finals, Finals()
        if self._asymmetric:
            states[_FLOAT] = stream.run(index, states[_FLOAT], in_place=True, finals=of_floats)
        for name, quantized in result.weights.items():
            stream.substitute(index, {name: quantized.dequantize()})
        stream.substitute(index, result.norms | result.routers)
        stream.substitute(index, result.norm_biases, "bias")
        # What was kept of the layer holds if it was of the weights that the method ended with.
        changed = self._kv or result.norms or result.routers or result.norm_biases
        if behind and (changed or not behind.holds_for(stream.weights(index, result.weights))):
            behind = None
        ranges = KvRanges(stream.is_latent) if self._kv else None
        cache: dict[str, Any] = {"past_key_values": ranges} if self._kv else {}
        try:
            for name, finals in ((_CALIBRATION, behind), (_HELD_OUT, None)):
                states[name] = stream.run(
                    index, states[name], in_place=True, finals=finals, **cache
                )
        except AttributeError as error:  # a layer that asks more of a cache than to be updated
            if not self._kv:
                raise
            raise BadInput(
                f"--kv-cache: {stream.prefix(index)} keeps another kind of cache: {error}"
            ) from error
        ranges = None if ranges is None else ranges.of_all_workers()
        is_finite = states[_CALIBRATION].finite() and states[_HELD_OUT].finite()
        if not all(workers.gathered(is_finite)):
            raise BadInput(
                f"{stream.prefix(index)} gives NaN or infinite outputs: the checkpoint is damaged"
            )
        stream.unload(index)
        return ranges

    def measure_head(self) -> LayerStatistics:
        held_out = {HEAD: self._head_inputs(_HELD_OUT)} if self._has_held_out else {}
        return LayerStatistics({HEAD: self._head_inputs(_CALIBRATION)}, held_out)

    def _head_inputs(self, name: str) -> InputStatistics:
        stream, states = self._stream, self._states[name]
        record = InputStatistics(stream.hidden_size, stream.device)
        batches = zip(stream.batches(states), stream.head_inputs(states), strict=True)
        for _, inputs in in_lanes(batches, [record], self._shares[name]):
            record.add(inputs)
        return record

    def save(self, path: Path) -> None:
        write_states(path, self._states, self._shares)


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
