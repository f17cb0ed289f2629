"""Graph capture and replay of decode steps: CUDA graphs on a GPU, a CPU graph on a CPU.

A step with one token per sequence is the same operations each time, on other values. So it is captured once
for each batch size, on static input tensors, to which later steps copy their values. A step whose batch size
was not captured is padded to the next larger one, with rows that write to the null block.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, Protocol

import torch

from ..kernels.attention.paged_attention import AttentionBatch, DecodeGroup
from ..kernels.common.runtime import refuses_triton
from ..kernels.graphs.cpu_graph import CpuGraph, GraphMemoryPool, NotCapturable
from ..kernels.graphs.cuda_graph import CudaGraph
from ..model.layers.attention import LayerCache, StepInputs
from ..model.open import CausalModel
from ..scheduling.block_pool import NULL_BLOCK

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
        self._block_size, self._dtype = block_size, dtype
        rows = max(self._sizes, default=0)

        def zeros(count: int) -> torch.Tensor:
            return torch.zeros(count, dtype=torch.int64, device=device)

        self._token_ids, self._positions, self._slots = zeros(rows), zeros(rows), zeros(rows)
        self._rows = torch.arange(rows, device=device)
        self._lengths, self._evicted_spans = zeros(rows) + 1, zeros(rows)
        self._tables = torch.full((rows, max_blocks), NULL_BLOCK, device=device)
        self._graphs: dict[tuple[int, int, tuple[int, ...]], Graph] = {}

    @torch.inference_mode()
    def capture_all(self, aux_hidden_state_layers: tuple[int, ...] = ()) -> None:
        """Capture every size now, the largest first, whose memory the others reuse."""
        try:
            for size in reversed(self._sizes):
                self._graph(size, 0, aux_hidden_state_layers)
        except NotCapturable:
            # Some linear has data-dependent control flow, as those with outliers (LLM.int8) do.
            self._sizes = ()
        # Capturing wrote meaningless values to the null block; padding in a table is read, with weight 0.
        for cache in self._caches:
            for part in cache.parts:
                part[NULL_BLOCK].zero_()

    def prepare(self, inputs: StepInputs) -> Forward:
        """Choose a graph and fill its static inputs with a step's values, or leave the step eager."""
        group = inputs.batch.decode
        eager = Forward(partial(self._model.forward, inputs, self._caches), is_replay=False)
        if inputs.batch.spans or group is None or inputs.adapters or inputs.scored:
            return eager
        if inputs.embedded is not None:
            return eager  # a chunk of one token, of an image; it may have three positions
        rows = len(inputs.token_ids)
        size = next((size for size in self._sizes if size >= rows), None)
        if size is None:
            return eager
        self._fill(inputs, group, rows, size)
        key = size, group.sink_length, inputs.aux_hidden_state_layers
        graph = self._graphs.get(key) or self._graph(*key)
        return Forward(lambda: graph.replay()[:rows], is_replay=True)

    def _graph(
        self, size: int, sink_length: int, aux_hidden_state_layers: tuple[int, ...]
    ) -> Graph:
        """Capture a step on the static inputs."""
        inputs: StepInputs

        def call() -> torch.Tensor:
            # New for each call, because a kernel computes the batch's layout on first use; and kept alive,
            # because the graph may point to it.
            nonlocal inputs
            inputs = self._inputs(size, sink_length, aux_hidden_state_layers)
            return self._model.forward(inputs, self._caches)

        graph = self._graphs[size, sink_length, aux_hidden_state_layers] = self._capture(call)
        return graph

    def _fill(self, inputs: StepInputs, group: DecodeGroup, rows: int, size: int) -> None:
        """Copy the values of a step; the padding rows see one token, of the null block."""
        self._token_ids[:rows] = inputs.token_ids
        self._positions[:rows] = inputs.positions
        self._slots[:rows] = inputs.slots
        self._lengths[:rows] = group.lengths
        self._evicted_spans[:rows] = group.evicted_spans
        tables = group.block_ids.view(rows, -1)
        self._tables[:rows, : tables.shape[1]] = tables
        if rows < size:
            self._token_ids[rows:size] = 0
            self._positions[rows:size] = 0
            self._slots[rows:size] = NULL_BLOCK * self._block_size
            self._lengths[rows:size] = 1
            self._evicted_spans[rows:size] = 0
            self._tables[rows:size, 0] = NULL_BLOCK

    def _inputs(
        self, size: int, sink_length: int, aux_hidden_state_layers: tuple[int, ...]
    ) -> StepInputs:
        """A step of `size` rows on the static inputs."""
        group = DecodeGroup(
            self._rows[:size],
            self._tables[:size].view(-1),
            self._lengths[:size],
            self._evicted_spans[:size],
            sink_length,
        )
        batch = AttentionBatch([], group, self._block_size, self._dtype)
        rows = self._token_ids[:size], self._positions[:size], self._slots[:size]
        return StepInputs(*rows, batch, aux_hidden_state_layers=aux_hidden_state_layers)


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


def capture_on(device: torch.device) -> Capture:
    """The capture function of a device; its graphs share a memory pool."""
    if device.type == "cuda":
        memory = torch.cuda.graph_pool_handle()
        return lambda call: CudaGraph(call, memory)
    if refuses_triton("cpu") is not None:
        pool = GraphMemoryPool()
        return lambda call: CpuGraph(call, pool)
    return EagerGraph  # Triton's interpreter launches no kernels to capture
