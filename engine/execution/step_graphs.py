"""Graph capture and replay of decode steps: CUDA graphs on a GPU, a CPU graph on a CPU.

A step with one token per sequence is the same operations each time, on other values. So it is captured once
for each batch size, on static input tensors, to which later steps copy their values. A step whose batch size
was not captured is padded to the next larger one, with rows that write to the null block.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch

from ...quant.base.errors import first_line
from ..cache.step_inputs import Run
from ..kernels.attention.step_plans import StepPlans
from ..kernels.common.runtime import refuses_triton
from ..kernels.graphs.cpu_graph import CpuGraph, GraphMemoryPool, NotCapturable
from ..kernels.graphs.cuda_graph import CudaGraph
from ..model.layers.adapter_slots import SlotMask
from ..model.layers.attention import LayerCache, StepInputs
from ..model.open import CausalModel
from ..scheduling.block_pool import NULL_BLOCK
from ..scheduling.step_plan import DecodeRows
from .decode_inputs import DecodeInputs, is_plain_decode
from .decode_step import DecodeForward, DecodeStep

_log = logging.getLogger(__name__)

CPU_SIZES = tuple(range(1, 33))
"""Batch sizes captured on a CPU: beyond, Python's overhead is a small part of a step."""
CUDA_SIZES = (1, 2, 4, *range(8, 257, 8), *range(272, 513, 16))
"""Batch sizes captured on a GPU, close enough that few rows are padding."""


class Graph(Protocol):
    """A captured call."""

    def replay(self) -> torch.Tensor:
        """The result, which the next replay overwrites."""
        ...


Capture = Callable[[Callable[[], torch.Tensor]], Graph]
"""Captures a call as a graph; it may run the call."""


class Forward(NamedTuple):
    """A forward pass whose inputs are in place.

    Attributes:
        run: the model's `forward`; the result of a graph is valid until the next step.
        is_replay: whether it replays a captured graph.
    """

    run: Callable[[], torch.Tensor]
    is_replay: bool


class _Kind(NamedTuple):
    """What tells captured decode steps apart; `adapters`: whether rows may have some."""

    size: int
    sink_length: int = 0
    aux_hidden_state_layers: tuple[int, ...] = ()
    adapters: bool = False


class StepGraphs:
    """Forward passes of a model: decode steps of one token per sequence replayed from graphs, others eager.

    Args:
        model: the model.
        caches: the KV caches of its layers.
        block_size: tokens per KV block.
        max_blocks: blocks of a sequence.
        sizes: batch sizes to capture, ascending; none: every step is eager.
    """

    def __init__(
        self,
        model: CausalModel,
        caches: Sequence[LayerCache],
        block_size: int,
        max_blocks: int,
        sizes: Sequence[int],
        capture: Capture,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self._model, self._caches = model, caches
        self._sizes = tuple(sizes) if model.is_capturable else ()
        self._capture = capture
        self._all_early = device.type == "cuda"
        rows = max(self._sizes, default=0)
        self._static = DecodeInputs(rows, max_blocks, block_size, device, dtype)
        self._graphs: dict[_Kind, Graph] = {}
        self._plans: dict[_Kind, StepPlans] = {}
        self._decode_steps: dict[tuple[_Kind, bool], DecodeStep] = {}
        self.gave_up = False
        """Whether capturing failed, so that every step is eager."""

    @torch.inference_mode()
    def capture_all(self, aux_hidden_state_layers: tuple[int, ...] = ()) -> None:
        """Capture the sizes now, the largest first, whose memory the others reuse.

        On a CPU the largest and powers of two; others at their first use, which takes a step's time or
        two, where all of them would be a second of every start.
        """

        def capture() -> None:
            for place, size in enumerate(reversed(self._sizes)):
                if self._all_early or place == 0 or size.bit_count() == 1:
                    for adapters in with_and_without_adapters(self._model):
                        self._graph(_Kind(size, 0, aux_hidden_state_layers, adapters))

        if not succeeds(capture, "decode steps"):
            self.give_up()

    def give_up(self) -> None:
        """Leave every step eager."""
        self._sizes, self.gave_up = (), True
        self._graphs.clear()
        self._plans.clear()

    def prepare(self, inputs: StepInputs, adapter_slots: Sequence[int] | None = ()) -> Forward:
        """Choose a graph and fill its static inputs with a step's values, or leave the step eager.

        `adapter_slots`: of each row, none where no row has an adapter; None: some adapter is in no slot.
        """
        group = inputs.batch.decode
        eager = Forward(partial(self._model.forward, inputs, self._caches), is_replay=False)
        if inputs.batch.spans or group is None or adapter_slots is None or inputs.scored:
            return eager
        if inputs.embedded is not None:
            return eager  # a chunk of one token, of an image; it may have three positions
        rows = len(inputs.token_ids)
        size = self._size_of(rows)
        if size is None:
            return eager
        self._static.fill(inputs, group, rows, size, adapter_slots)
        aux = inputs.aux_hidden_state_layers
        return self._replay(rows, _Kind(size, group.sink_length, aux, bool(adapter_slots)))

    def prepare_decode(
        self, runs: Sequence[Run], adapter_slots: Sequence[int] = ()
    ) -> Forward | None:
        """Fill a captured decode step from its runs, without input tensors; None: it is not captured, or
        not a plain one. What else `StepInputs` tells is the caller's to know."""
        size = self._size_of(len(runs)) if self._static.takes_runs else None
        if size is None or not is_plain_decode(runs):
            return None
        self._static.fill_runs(runs, size, adapter_slots)
        return self._replay(len(runs), _Kind(size, adapters=bool(adapter_slots)))

    def prepare_batch(
        self,
        rows: DecodeRows,
        sampled: torch.Tensor | None = None,
        adapter_slots: Sequence[int] = (),
    ) -> DecodeForward | None:
        """Fill a captured decode step, in place where it follows another; None: it is not captured.

        `sampled` are the tokens [rows] of rows with placeholders, on the device.
        """
        count = len(rows)
        size = self._size_of(count)
        if size is None:
            return None
        kind = _Kind(size, adapters=bool(adapter_slots))
        is_whole = size == count and sampled is None and self._static.takes_runs
        key = kind, rows.batch.takes_largest
        if is_whole and (step := self._decode_steps.get(key)) is not None:
            return step.prepare(rows, adapter_slots)
        # Before a capture, whose torch operations write to the slots that the inputs hold.
        with torch.inference_mode():
            self._static.fill_batch(rows, size, sampled, adapter_slots)
        graph = self._captured(kind)
        if not (is_whole and isinstance(graph, CpuGraph)):
            return DecodeForward(lambda: self._model.logits(graph.replay()[:count]))
        capture: Any = self._capture  # of a CPU, since the graph is
        step = self._decode_steps[key] = DecodeStep(
            self._model, graph, self._static, size, capture, takes_largest=key[1]
        )
        return step.prepare(rows, adapter_slots)

    def _size_of(self, rows: int) -> int | None:
        """The smallest size that holds so many rows."""
        place = bisect_left(self._sizes, rows)
        return self._sizes[place] if place < len(self._sizes) else None

    def _replay(self, rows: int, kind: _Kind) -> Forward:
        graph = self._captured(kind)
        return Forward(lambda: graph.replay()[:rows], is_replay=True)

    def _captured(self, kind: _Kind) -> Graph:
        """The graph of a kind, captured now if it was not, and planned for the static inputs."""
        graph = self._graphs.get(kind) or self._graph(kind)
        if plans := self._plans[kind]:
            plans.renew(self._static.num_held(kind.size))
        return graph

    def _graph(self, kind: _Kind) -> Graph:
        """Capture a step on the static inputs."""
        inputs: StepInputs
        plans = self._plans[kind] = StepPlans(self._static.num_held(kind.size))

        def call() -> torch.Tensor:
            # New for each call, because a kernel computes the batch's layout on first use; and kept alive,
            # because the graph may point to it.
            nonlocal inputs
            inputs = self._static.step(*kind[:3], plans)
            if kind.adapters:
                rows = self._static.adapter_slots[: kind.size]
                inputs = replace(inputs, adapters=slot_mask(self._model, rows))
            return self._model.forward(inputs, self._caches)

        graph = self._graphs[kind] = self._capture(call)
        # Capturing wrote meaningless values to the null block; padding in a table is read, with weight 0.
        for cache in self._caches:
            for part in cache.parts:
                part[NULL_BLOCK].zero_()
        return graph


def with_and_without_adapters(model: CausalModel) -> tuple[bool, ...]:
    """Whether steps are captured without adapters, which then cost nothing, and with them."""
    has_slots = model.lora_bank is not None and model.lora_bank.has_slots
    return (False, True) if has_slots else (False,)


def slot_mask(model: CausalModel, slots: torch.Tensor) -> SlotMask:
    """The mask of the adapters in these slots, int64 [rows]."""
    assert model.lora_bank is not None
    return model.lora_bank.mask(slots)


class EagerGraph:
    """No capture: calls the function on every replay."""

    def __init__(self, call: Callable[[], torch.Tensor]) -> None:
        self._call = call

    def replay(self) -> torch.Tensor:
        return self._call()


def graph_sizes(device: torch.device, max_rows: int) -> tuple[int, ...]:
    """Batch sizes to capture on a device, for steps of up to `max_rows`; none where steps are eager."""
    if device.type == "mps":
        return ()  # torch records no graphs of Metal
    sizes = CPU_SIZES if device.type == "cpu" else CUDA_SIZES
    return sizes[: bisect_left(sizes, max_rows) + 1]


def succeeds(capture: Callable[[], None], steps: str) -> bool:
    """Whether `capture` succeeds; of what fails unexpectedly, one warning line tells for which steps."""
    try:
        capture()
    except NotCapturable:
        # Some linear has data-dependent control flow, as those with outliers (LLM.int8) do.
        return False
    except Exception as error:
        # A kernel that waits for the device, a driver that refuses, memory that does not suffice.
        reason = f"{type(error).__name__}: {first_line(error)}"
        _log.warning("%s run without graphs, as capturing them failed: %s", steps, reason)
        return False
    return True


def capture_on(device: torch.device) -> Capture:
    """The capture function of a device; its graphs share a memory pool."""
    if device.type == "cuda":
        memory = torch.cuda.graph_pool_handle()
        return lambda call: CudaGraph(call, memory)
    if refuses_triton("cpu") is not None:
        pool = GraphMemoryPool()
        return lambda call: CpuGraph(call, pool)
    return EagerGraph  # Triton's interpreter launches no kernels to capture
