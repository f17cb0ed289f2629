"""Graph capture and replay of decode steps: CUDA graphs on a GPU, a CPU graph on a CPU.

A step with one token per sequence is captured for each batch size, on static inputs; others are padded to the
next larger size, with rows that write to the null block.
"""

from __future__ import annotations

import ctypes
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch

from ..kernels.attention.flashinfer_plans import CapturedPlans
from ..kernels.common.graphs import CpuGraph, Launch, NotCapturable, replay_launches
from ..kernels.elementwise.native_rows import argmax_rows, native_advance
from ..model.layers.attention import StepInputs
from ..scheduling.request import NULL_SLOT
from ..scheduling.step_plan import DecodeRows
from .decode_inputs import DecodeInputs
from .graph_setting import Forward, Graph, GraphName, GraphSetting, SteppedModel, try_capture

CPU_SIZES = tuple(range(1, 33))
"""Batch sizes captured on a CPU: beyond, Python's overhead is a small part of a step."""
CUDA_SIZES = (1, 2, 4, *range(8, 257, 8), *range(272, 513, 16))
"""Batch sizes captured on a GPU, close enough that few rows are padding."""


class StepKind(NamedTuple):
    """Key of a captured step; with `adapters` rows or sequences may have some."""

    size: int
    sink_length: int = 0
    aux_hidden_state_layers: tuple[int, ...] = ()
    adapters: bool = False


class StepGraphs:
    """Decode steps of a model captured as graphs of the batch `sizes`, ascending; other steps are eager."""

    def __init__(self, setting: GraphSetting, sizes: Sequence[int]) -> None:
        self._setting, self._model = setting, setting.model
        self._sizes = tuple(sizes) if setting.model.is_capturable else ()
        device = setting.device
        self._all_early = device.type == "cuda"
        rows = max(self._sizes, default=0)
        self._static = DecodeInputs(
            rows, setting.max_blocks, setting.block_size, device, setting.dtype
        )
        self._graphs: dict[StepKind, Graph] = {}
        self._plans: dict[StepKind, CapturedPlans] = {}
        self._decode_steps: dict[tuple[StepKind, bool], DecodeStep] = {}
        self.gave_up = False
        """Capturing failed, so every step is eager."""

    @torch.inference_mode()
    def capture_all(self, aux_hidden_state_layers: tuple[int, ...] = ()) -> None:
        """Capture the sizes now, the largest first, whose memory others reuse; on a CPU only extremes."""

        def capture() -> None:
            early = self._sizes if self._all_early else {*self._sizes[:1], *self._sizes[-1:]}
            for size in sorted(early, reverse=True):
                for adapters in self._setting.with_and_without_adapters:
                    self._graph(StepKind(size, 0, aux_hidden_state_layers, adapters))

        if not try_capture(capture, "decode steps"):
            self.give_up()

    def give_up(self) -> None:
        self._sizes, self.gave_up = (), True
        self._graphs.clear()
        self._plans.clear()
        self._decode_steps.clear()
        self._setting.give_up("decode")

    def prepare(
        self,
        step: DecodeRows | StepInputs,
        sampled: torch.Tensor | None = None,
        adapter_slots: Sequence[int] = (),
    ) -> Forward | None:
        """Fill a captured step with decode rows, for logits, or input tensors, for hidden states; or None.
        `sampled` are tokens [rows] on the device for placeholders; `adapter_slots` has a slot a row, or is
        empty."""
        if isinstance(step, StepInputs):
            return self._prepare_inputs(step, adapter_slots)
        rows = len(step)
        size = self._size_of(rows)
        if size is None:
            return None
        kind = StepKind(size, adapters=bool(adapter_slots))
        is_whole = size == rows and sampled is None and self._static.on_host
        key = kind, step.batch.takes_largest
        if is_whole and (captured := self._decode_steps.get(key)) is not None:
            return captured.prepare(step, adapter_slots)
        # Before a capture, whose torch operations write to the slots that the inputs hold.
        with torch.inference_mode():
            self._static.fill_host(step, size, sampled, adapter_slots)
        graph = self.captured(kind)
        if graph is None:
            return None
        if not (is_whole and isinstance(graph, CpuGraph)):
            return Forward(lambda: self._setting.logits(graph, rows))
        capture: Any = self._setting.capture  # of a CPU, since the graph is
        captured = self._decode_steps[key] = DecodeStep(
            self._model, graph, self._static, size, capture, takes_largest=key[1]
        )
        return captured.prepare(step, adapter_slots)

    def _prepare_inputs(self, inputs: StepInputs, adapter_slots: Sequence[int]) -> Forward | None:
        group = inputs.batch.decode
        if inputs.batch.spans or group is None or inputs.scored:
            return None
        if inputs.embedded is not None:
            return None  # a chunk of one token, of an image; it may have three positions
        rows = len(inputs.token_ids)
        size = self._size_of(rows)
        if size is None:
            return None
        self._static.fill_device(inputs, group, rows, size, adapter_slots)
        aux = inputs.aux_hidden_state_layers
        kind = StepKind(size, group.sink_length, aux, bool(adapter_slots))
        graph = self.captured(kind)
        return None if graph is None else Forward(lambda: graph.replay()[:rows])

    def _size_of(self, rows: int) -> int | None:
        index = bisect_left(self._sizes, rows)
        return self._sizes[index] if index < len(self._sizes) else None

    def captured(self, kind: StepKind) -> Graph | None:
        """Graph of a kind, captured now if it was not, and planned for the static inputs; None if capturing
        it failed: every step is eager from now on."""
        if kind not in self._graphs and not try_capture(lambda: self._graph(kind), "decode steps"):
            self.give_up()
            return None
        if plans := self._plans.get(kind):
            plans.renew(self._static.num_held(kind.size))
        return self._graphs[kind]

    def capture_padding(self, kind: StepKind) -> None:
        self._static.clear()
        self._graph(kind)

    def static(self, kind: StepKind) -> DecodeInputs:
        return self._static

    def _graph(self, kind: StepKind) -> Graph:
        # With several ranks only rank 0 knows how many tokens sequences have.
        if not (self._setting.follows or self._setting.ranks):
            self._plans[kind] = CapturedPlans(self._static.num_held(kind.size))
        inputs, slots = partial(self._inputs, kind), self._static.state_slots
        before = slots.clone()
        slots.fill_(NULL_SLOT)  # a capture runs steps, which change the states
        try:
            graph = self._setting.graph(GraphName("decode", kind), self._static, inputs)
        finally:
            slots.copy_(before)
        self._graphs[kind] = graph
        return graph

    def _inputs(self, kind: StepKind) -> StepInputs:
        inputs = self._static.step(*kind[:3], self._plans.get(kind), self._setting.states)
        if not kind.adapters:
            return inputs
        slots = self._static.adapter_slots[: kind.size]
        return replace(inputs, adapters=self._setting.slot_mask(slots))


def graph_sizes(device: torch.device, max_rows: int) -> tuple[int, ...]:
    """Batch sizes to capture on a device, for steps of up to `max_rows`; none where steps are eager."""
    if device.type == "mps":
        return ()  # torch records no graphs of Metal
    sizes = CPU_SIZES if device.type == "cpu" else CUDA_SIZES
    return sizes[: bisect_left(sizes, max_rows) + 1]


class DecodeStep:
    """CPU graph of the layers on `inputs`, then of the LM head; sizes share the logits' memory. If both are
    kernel launches only, the forward pass is one call of C, and the argmax of greedy rows another. These take
    tokens and positions from the step before: the host writes nothing but new blocks."""

    @torch.inference_mode()
    def __init__(
        self,
        model: SteppedModel,
        graph: CpuGraph,
        inputs: DecodeInputs,
        size: int,
        capture: Callable[[Callable[[], torch.Tensor]], CpuGraph],
        *,
        takes_largest: bool,
    ) -> None:
        self._inputs, self._size = inputs, size
        self._advance: ctypes.Structure | None = None
        # Outside the graph's memory, which layers overwrite: the next step reads these tokens.
        self._tokens = torch.empty(size, dtype=torch.int64) if takes_largest else None
        self.launches: list[Launch] = []
        hidden = graph.result

        def call() -> torch.Tensor:
            # Free at once: memory of the pool that holds the logits of every size, whichever comes first.
            torch.empty(inputs.most_rows, model.vocab_size)
            return model.logits(hidden)

        self._forward = Forward(lambda: model.logits(graph.replay()))
        try:
            head = capture(call)
        except NotCapturable:
            return
        if not head.is_native:  # each replay would copy the logits that torch makes
            return
        head.share_result()
        self._graphs = graph, head  # keep alive what their launches point at
        sample: Callable[[], Iterable[int]] | None = None
        if self._tokens is not None:
            sample = _captured_argmax(head.result, self._tokens, capture)
        self._forward = Forward(self._captured(graph, head), sample)

    def prepare(self, rows: DecodeRows, adapter_slots: Sequence[int] = ()) -> Forward:
        advance = self._advance
        follows = self._inputs.fill_host(
            rows, self._size, None, adapter_slots, advances=advance is not None
        )
        if advance is not None:
            advance.follows = follows
        return self._forward

    def _captured(self, graph: CpuGraph, head: CpuGraph) -> Callable[[], torch.Tensor]:
        """Function that runs both; in one call of C, if torch has no part in it."""
        library = native_advance().library
        first: list[Launch] = []
        if self._tokens is not None and library is not None:
            self._advance = self._inputs.advance_call(self._size, self._tokens)
            first = [(library.llmopt_advance_step, self._advance)]
        if not graph.is_native:
            advance = replay_launches(first)

            def run_in_turn() -> torch.Tensor:
                advance()
                graph.replay()
                return head.replay()

            return run_in_turn
        logits = head.result
        self.launches = [*first, *graph.launches, *head.launches]
        replay = replay_launches(self.launches)

        def run() -> torch.Tensor:
            replay()
            return logits

        return run


def _captured_argmax(
    logits: torch.Tensor,
    tokens: torch.Tensor,
    capture: Callable[[Callable[[], torch.Tensor]], CpuGraph],
) -> Callable[[], Iterable[int]]:
    """A function that writes the argmax of each row to `tokens` [rows] and returns them as a host view."""
    argmax = capture(lambda: argmax_rows(logits, tokens))
    on_host = (ctypes.c_int64 * len(tokens)).from_address(tokens.data_ptr())

    def sample() -> Iterable[int]:
        argmax.replay()
        return on_host

    return sample
