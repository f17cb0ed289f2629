"""Estimates of a run: peak memory and operations from the sizes of its layers, and time by one that is timed.

The timed layer is quantized on little text and thrown away. Its time has a part that grows with the
calibration tokens, the passes of the layer over them, and a part that does not: choosing the codes, and
packing them. Both grow with the layer's weights.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import ContextDecorator
from dataclasses import dataclass, fields, replace
from operator import add
from typing import Self

import torch

from ...base.atomic_io import entry_bytes
from ...base.progress import Progress
from ..base.device import HOST
from ..families.layer_map import LayerMap
from ..kinds.base.kind import kind_of
from ..methods.gptq import execution_stages
from ..methods.registry import METHODS
from ..plan.plan import QuantizePlan
from ..plan.selection import HEAD, Shapes, matrix_shape
from ..smoothing.patterns import expert_number
from ..stream.layer_stream import KEPT_BYTES, TOKENS_PER_BATCH
from ..stream.sources import CPU_SAMPLES, CPU_SEQ_LEN
from .online_calibration import TUNED_PER_BATCH, NoCalibration
from .quantized_layer import HEAD_FAMILY, quantize_tensors
from .stages import Session, online

_FLOAT = 4
# Code and buffers of libraries loaded by the first layer; measured, independent of the model.
_LIBRARY_BYTES = 16 * 2**20
_SHIFT = 3  # the shift of a weight by its input's cross term, in Gram matrices of the widest
# Activations kept for the gradients of a layer, in hidden states and widest activations of a token; measured.
_SAVED_HIDDEN, _SAVED_WIDEST = 24, 8
_GRADIENT_LIBRARY_BYTES = 16 * 2**20  # code of torch's backward pass
_ROUNDING_COPIES = 4  # of the rows that are rounded to ggml's blocks; measured
_HOLES = 1.5  # heap fragmentation factor of activations; measured


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """Resident bytes beyond the start of the process, at one moment of a layer's quantization.

    Attributes:
        libraries: code and buffers loaded by the first use of torch's operations.
        hidden: hidden states of all calibration tokens, float32; with AutoRound those of the float model too.
        layer: the layer as it is stored (mapped pages), and its float32 copy.
        grams: Gram matrices of held-out inputs, and of calibration inputs so far.
        codes: codes of the linears so far, one byte per weight.
        work: the method's copies of weights and, with GPTQ, of Gram matrices; AutoRound's parameters.
        activations: activations of one batch inside the layer, while it runs; freed afterwards.
        images: pixels of the calibration samples, and the vision tower in float32.
        kept: outputs that passes of one layer share (`FinalSubmodules`).
    """

    libraries: int
    hidden: int = 0
    layer: int = 0
    grams: int = 0
    codes: int = 0
    work: int = 0
    activations: int = 0
    images: int = 0
    kept: int = 0

    @property
    def bytes(self) -> int:
        return sum(getattr(self, field.name) for field in fields(self))


def estimate_memory(
    plan: QuantizePlan,
    hidden_size: int,
    tokens: int,
    *,
    held_out: bool,
    measured_now: bool,
    lanes: int | None = None,
) -> MemoryEstimate:
    """Peak memory of a run, or of one of its workers: the maximum over layers and moments.

    Args:
        tokens: tokens of the calibration and held-out samples.
        measured_now: True if statistics are measured while layers are quantized, and not cached.
        lanes: lanes of the worker's calibration samples; None: one process, which sums over them in order.
    """
    blockwise, sums = plan.blockwise, max(1, (lanes or 1).bit_length())
    # The float model's states are carried too where they are compared, and those after the layer where it is
    # tuned towards them.
    hidden = (1 + bool(plan.options.asymmetric) + blockwise) * tokens * hidden_size * _FLOAT
    batch = min(tokens, TOKENS_PER_BATCH)
    of_layers = _sequential_moments if measured_now and plan.sequential else _moments
    staged = measured_now and plan.feeds_back and plan.options.true_sequential
    parts = [(_decoder_layer(plan, index), of_layers) for index in _distinct_layers(plan)]
    if plan.lm_head:
        parts.append((_head(plan), _moments))
    moments = [_publishing(plan, _LIBRARY_BYTES if tokens else 0)]
    for layer, moments_of in parts:
        cross = layer.cross if plan.options.asymmetric else 0
        usual = MemoryEstimate(
            libraries=_LIBRARY_BYTES,
            hidden=hidden,
            layer=layer.bytes,
            kept=_kept(plan, layer, hidden_size, tokens) if staged else 0,
        )
        activations = int(_HOLES * batch * (4 * hidden_size + 3 * layer.widest) * _FLOAT)
        moments += [
            replace(
                usual,
                grams=grams,
                codes=codes,
                work=int(work) + cross,
                activations=activations if running else 0,
            )
            for grams, codes, work, running in moments_of(layer, plan, held_out, sums)
        ]
        if blockwise:
            weights, width = layer.weights(layer.chosen), plan.compute.itemsize
            # Bytes a weight: its offset and the best one (of trellis codes: the codes between transforms, and
            # a product with them), the weight itself and its gradient; of a worker also the sums of gradients
            # over the samples of a batch.
            tuned = 2 * _FLOAT + 2 * width
            tuned += 0 if lanes is None else plan.options.batch_size.bit_length() * width
            values = _SAVED_HIDDEN * hidden_size + _SAVED_WIDEST * layer.widest
            moments.append(
                replace(
                    usual,
                    libraries=_LIBRARY_BYTES + _GRADIENT_LIBRARY_BYTES,
                    grams=layer.grams * (1 + held_out),
                    codes=weights,
                    work=weights * tuned + cross,
                    activations=int(min(tokens, TUNED_PER_BATCH) * values * _FLOAT),
                )
            )
    return max(moments, key=lambda moment: moment.bytes)


def _publishing(plan: QuantizePlan, libraries: int) -> MemoryEstimate:
    """The end of the run, at the largest tensor outside of the layers: mapped, or dequantized from a GGUF
    file; for a GGUF file a part of its rows is rounded. Layers that ran have left `libraries` bytes."""
    checkpoint = plan.checkpoint
    entries = [
        checkpoint.entry(name)
        for name in checkpoint.names
        if name.removesuffix(".weight") not in plan.modules
    ]
    largest = max(entries, key=entry_bytes)
    stored = entry_bytes(largest)
    if checkpoint.source_type is not None:
        stored += entry_bytes(("F32", largest[1]))
    rows = 0
    if any(weight_format.name == "gguf" for weight_format in plan.formats):
        from ..gguf.assemble import ROWS_AT_ONCE

        rows = min(ROWS_AT_ONCE, largest[1][0])
    work = _ROUNDING_COPIES * rows * largest[1][-1] * _FLOAT
    return MemoryEstimate(libraries=libraries, layer=stored, work=work)


def _kept(plan: QuantizePlan, layer: _Layer, hidden_size: int, tokens: int) -> int:
    """Bytes of attention's outputs and of the last linears' inputs, which passes of one layer share."""
    if plan.device != HOST:
        return 0
    stages = execution_stages(layer.family, layer.chosen)
    alone = [stage[0][0] for stage in stages if len(stage) == len(stage[0]) == 1]
    # A stage's inputs give way to its submodule's outputs, and the last has inputs alone.
    outputs = [min(number + 1, len(alone) - 1) * hidden_size for number in range(len(alone))]
    inputs = [layer.shapes[name][1] for name in alone]
    width = max(map(add, outputs, inputs), default=0)
    most = max(KEPT_BYTES, tokens * hidden_size * _FLOAT)
    return min(most, tokens * width * plan.compute.itemsize) * (1 + bool(plan.options.asymmetric))


@dataclass(frozen=True, slots=True)
class _Layer:
    """Sizes of one layer: bytes of all tensors as stored and in float32, shapes of its linears by relative
    name, the `chosen` ones, values of the widest activation, and bytes of the routers' Gram matrices."""

    bytes: int
    family: LayerMap
    shapes: Shapes
    chosen: tuple[str, ...]
    widest: int
    routers: int = 0

    def square(self, linear: str) -> int:
        return self.shapes[linear][1] ** 2 * _FLOAT

    def weights(self, linears: Iterable[str]) -> int:
        return sum(self.shapes[name][0] * self.shapes[name][1] for name in linears)

    @property
    def grams(self) -> int:
        return self.routers + sum(self.square(group[0]) for group in self.family.shared_inputs)

    @property
    def cross(self) -> int:
        """Bytes of the cross terms of all inputs, each expert's its own, and of the shift of one weight."""
        shift = _SHIFT * max((self.square(name) for name in self.chosen), default=0)
        return self.grams - self.routers + shift


def _decoder_layer(plan: QuantizePlan, index: int) -> _Layer:
    checkpoint, family = plan.checkpoint, plan.architecture.layers[index]
    start = plan.architecture.layer_prefix(index) + "."
    stored = floats = 0
    for name in checkpoint.names:
        if name.startswith(start):
            dtype, shape = entry = checkpoint.entry(name)
            stored += entry_bytes(entry)
            floats += 0 if dtype == "F32" else entry_bytes(("F32", shape))
    shapes = {name: matrix_shape(checkpoint, start + name) for name in family.linears}
    widths = [checkpoint.shape(f"{start}{name}.weight")[-1] for name in family.routers]
    return _Layer(
        bytes=stored + floats,
        family=family,
        shapes=shapes,
        chosen=tuple(name for name in shapes if start + name in plan.modules),
        widest=max((max(shape) for shape in shapes.values()), default=0),
        routers=sum(width**2 for width in widths) * _FLOAT,
    )


def _head(plan: QuantizePlan) -> _Layer:
    """The output projection, as a layer of one linear."""
    rows, width = plan.modules[HEAD]
    stored = entry_bytes(plan.checkpoint.entry(f"{HEAD}.weight"))
    return _Layer(
        bytes=stored + rows * width * _FLOAT,
        family=HEAD_FAMILY,
        shapes={HEAD: (rows, width)},
        chosen=(HEAD,),
        widest=width,  # it is not run: its statistics are those of the final norm's outputs
    )


_Moment = tuple[int, int, float, bool]
"""Bytes of grams, codes and work, and whether the layer's forward is running."""


def _moments(layer: _Layer, plan: QuantizePlan, held_out: bool, sums: int) -> Iterator[_Moment]:
    """Candidate peaks, where everything is measured before quantizing; a worker holds `sums` of lanes."""
    grams = layer.grams * (1 + held_out)
    yield layer.grams * (sums + held_out), 0, 0, True
    method, solver = plan.method, plan.options.solver
    codes = layer.weights(layer.chosen)
    if method.module == "gptq":
        for stage in execution_stages(layer.family, layer.chosen):
            yield grams, codes, max(_solving(layer, group) for group in stage), False
        return
    if method.codes == "smoothed" and solver == "gptq":
        # Beside scaled copies of all weights and Gram matrices.
        stages = execution_stages(layer.family, layer.chosen)
        solving = max((_solving(layer, group) for stage in stages for group in stage), default=0)
        scaled = grams + _FLOAT * layer.weights(layer.chosen)
        yield grams, 2 * codes, scaled + solving, False
        if method.searches_scales:  # it is measured again, after its first linears
            yield grams, 2 * codes, scaled + _FLOAT * layer.weights(layer.chosen), True
    largest = max((layer.weights((name,)) for name in layer.chosen), default=0)
    kept = codes * (1 if solver == "gptq" else method.code_bytes)
    yield grams, kept, method.copies * largest * _FLOAT, False


def _sequential_moments(
    layer: _Layer, plan: QuantizePlan, held_out: bool, sums: int
) -> Iterator[_Moment]:
    """Candidate peaks of GPTQ that measures each stage after the quantized ones."""
    grams = layer.grams * held_out
    yield grams * sums, 0, 0, True
    done = 0
    for stage in execution_stages(layer.family, layer.chosen):
        measured = sum(layer.square(group[0]) for group in stage)
        grams += measured
        # The layer runs with dequantized weights.
        yield grams + (sums - 1) * measured, done, done * _FLOAT, True
        done += sum(layer.weights(group) for group in stage)
        yield grams, done, max(_solving(layer, group) for group in stage), False


def _solving(layer: _Layer, group: tuple[str, ...]) -> float:
    """GPTQ's working bytes for linears that share an input: the Hessian's factor, and copies."""
    square, weights = layer.square(group[0]), layer.weights(group) * _FLOAT
    copies = METHODS["gptq"].copies + (len(group) > 1)  # concatenated in one matrix
    shrunk = square * bool(layer.family.routers)  # of experts' Gram matrices
    return shrunk + max(2 * square, square + copies * weights)


def _distinct_layers(plan: QuantizePlan) -> list[int]:
    seen: dict[tuple[tuple[str, tuple[int, int] | None], ...], int] = {}
    for index, family in enumerate(plan.architecture.layers):
        start = plan.architecture.layer_prefix(index)
        shapes = tuple((name, plan.modules.get(f"{start}.{name}")) for name in family.linears)
        seen.setdefault(shapes, index)
    return list(seen.values())


def solvers_of(plan: QuantizePlan, index: int, workers: int) -> int:
    """Workers that solve linears of a layer at a time: groups with one input, or the only group's linears."""
    chosen = _chosen(plan, index)
    if not plan.feeds_back:
        return min(workers, max(1, len(chosen)))
    stages = execution_stages(plan.architecture.layers[index], chosen)
    tasks = [len(stage if len(stage) > 1 else stage[0]) for stage in stages]
    return min(workers, max(tasks, default=1))


def _chosen(plan: QuantizePlan, index: int) -> list[str]:
    start, family = plan.architecture.layer_prefix(index), plan.architecture.layers[index]
    return [name for name in family.linears if f"{start}.{name}" in plan.modules]


def estimate_operations(plan: QuantizePlan, tokens: int, workers: int = 1) -> float:
    """Operations of a run, or of its busiest worker with so many tokens, at the rate of large GEMMs."""
    solvers: dict[str, int] = {}
    routed: dict[str, float] = {}
    for index in range(plan.num_layers):
        chosen, start = _chosen(plan, index), plan.architecture.layer_prefix(index)
        experts = {expert_number(name) for name in chosen} - {-1}
        routed_to = plan.checkpoint.text_config.get("num_experts_per_tok")
        share = 1.0  # of the tokens that each expert is given
        if isinstance(routed_to, int) and experts:
            share = min(1.0, routed_to / len(experts))
        number = solvers_of(plan, index, workers)
        solvers |= {f"{start}.{name}": number for name in chosen}
        routed |= {f"{start}.{name}": share for name in chosen if expert_number(name) >= 0}
    # Stages after quantized linears share what is final; GPTAQ runs the float model's layers too.
    passes = 2.0 + bool(plan.options.asymmetric)
    passed = solved = searches = 0.0
    for module, (out_features, in_features) in plan.modules.items():
        square, share, number = in_features**2, routed.get(module, 1.0), solvers.get(module, 1)
        kind = kind_of(plan.schemes[module])
        searches += kind.search_operations * out_features * in_features / number
        passed += passes * 2 * share * tokens * out_features * in_features  # the layer itself
        passed += passes / 2 * 2 * share * tokens * square / 2  # Grams, shared by two or three
        solved += 4 * out_features * square / number  # the errors in the report
        if plan.feeds_back:
            solved += (2 * out_features * square + 2 * square * in_features) / number
        if plan.blockwise:
            seen = min(plan.options.batch_size * plan.seq_len / workers, tokens) * share
            steps = plan.options.finetune_steps or plan.options.iters
            passed += 3 * steps * 2 * seen * out_features * in_features
        if plan.method.searches_scales:
            solved += 30 * out_features * square / workers  # scales are tried by all
    return searches + 2 * (passed + solved)  # everything else, and less efficient GEMM shapes


# Tokens of the timed layer: few for a large one, so that its passes take seconds.
_LEAST_TOKENS, _MOST_TOKENS, _WEIGHTS_TIMES_TOKENS = 512, 16_384, 60e9
_HELD_OUT = 8  # calibration samples for each held-out one, as by default
QUICK_TOKENS = (CPU_SAMPLES + CPU_SAMPLES // _HELD_OUT) * CPU_SEQ_LEN


@dataclass(frozen=True, slots=True)
class LayerTime:
    """Seconds of a layer: choosing and packing codes, and passes over `tokens`, held-out ones included."""

    solving: float
    passes: float
    tokens: int
    weights: int

    def seconds(self, weights: int, tokens: float, solvers: int = 1) -> float:
        per_layer = self.solving / solvers + self.passes * tokens / max(1, self.tokens)
        return per_layer * weights / self.weights


def weights_of(plan: QuantizePlan, prefix: str = "") -> int:
    return sum(
        out * width for name, (out, width) in plan.modules.items() if name.startswith(prefix)
    )


class Stopwatch(ContextDecorator):
    """Seconds within its contexts, or calls that it decorates: by a clock, or by a processor where that is
    less, because other programs took it for the rest. A GPU's work takes none."""

    def __init__(self, device: torch.device = HOST) -> None:
        self.seconds, self._device = 0.0, device

    def __enter__(self) -> Self:
        self._began, self._used = time.perf_counter(), time.process_time()
        return self

    def __exit__(self, *_: object) -> None:
        passed, used = time.perf_counter() - self._began, time.process_time() - self._used
        self.seconds += min(passed, used) if self._device == HOST else passed


def time_layer(session: Session, progress: Progress) -> LayerTime | None:
    """Quantize the first layer on little text; None where images would be cut, or nothing is quantized."""
    plan, stream, calibration = session.plan, session.stream, session.calibration
    prefix = f"{stream.prefix(0)}."
    weights = weights_of(plan, prefix)
    if calibration.num_images or not weights:
        return None
    progress.start("timing one layer", 0, "")
    # A few samples, cut where one alone is too long.
    most = int(min(_MOST_TOKENS, max(_LEAST_TOKENS, _WEIGHTS_TIMES_TOKENS / weights)))
    samples, length = calibration.token_ids.shape
    length = min(length, most)
    count = min(samples, max(1, most // max(1, length)))
    text = replace(
        calibration,
        token_ids=calibration.token_ids[:count, :length],
        held_out=calibration.held_out[: -(-count // _HELD_OUT), :length],
    )
    source = NoCalibration()
    if session.request.errors:
        source = online(session, stream, text, None, progress, kv=plan.kv_cache is not None)
    # Passes include those that the method makes itself.
    passes = Stopwatch(plan.device)
    with Stopwatch(plan.device) as whole:
        tensors = stream.tensors(0)
        measured = passes(source.measure)(0, tensors)
        if measured.remeasure is not None:
            measured = replace(measured, remeasure=passes(measured.remeasure))
        work = quantize_tensors(
            plan,
            stream.family(0),
            stream.prefix(0),
            tensors,
            source.weights(0, stream.family(0).linears),
            measured,
            revert_worse=session.request.revert_worse,
            allow_fallback=session.request.allow_fallback,
        )
        passes(source.finish)(0, work.result)
        for weight_format in plan.formats:
            work.packed(plan, weight_format)
    plan.checkpoint.release()
    progress.finish()
    return LayerTime(whole.seconds - passes.seconds, passes.seconds, text.num_tokens, weights)
