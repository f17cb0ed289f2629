"""Captured decode step on a CPU: inputs from the step before, layers, LM head and argmax in one call of C."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch

from ..kernels.common.launch import Launch, replay_launches
from ..kernels.graphs.advance_step import AdvanceCall, native_advance
from ..kernels.graphs.cpu_graph import CpuGraph, NotCapturable
from ..kernels.sampling.argmax import argmax_rows
from ..scheduling.step_plan import DecodeRows
from .decode_inputs import DecodeInputs
from .graph_setting import SteppedModel


class DecodeForward(NamedTuple):
    """A captured decode step whose inputs are in place.

    Attributes:
        run: the logits [rows, vocab], valid until the next step, of whatever size.
        tokens: the argmax of each row once it has run; None: it gives logits alone.
    """

    run: Callable[[], torch.Tensor]
    tokens: Iterable[int] | None = None


class DecodeStep:
    """A CPU graph of the layers on `inputs`, with the LM head of its result, captured behind it.

    The logits of all sizes share their memory, as one of them runs at a time.
    Where both are kernel launches alone, a step is one call of C. One of greedy rows takes its tokens and
    positions from the step before it, if that was computed here: the host then writes nothing but new blocks.

    Attributes:
        launches: of its kernels, in order; none where torch has a part in it.
    """

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
        self._advance: AdvanceCall | None = None
        # Not of the graph's memory, which layers overwrite: the next step reads them.
        self._tokens = torch.empty(size, dtype=torch.int64) if takes_largest else None
        self.launches: list[Launch] = []
        hidden = graph.result

        def call() -> torch.Tensor:
            # Free at once: memory of the pool that holds the logits of every size, whichever comes first.
            torch.empty(inputs.most_rows, model.vocab_size)
            logits = model.logits(hidden)
            if self._tokens is not None:
                argmax_rows(logits, self._tokens)
            return logits

        self._forward = DecodeForward(lambda: model.logits(graph.replay()))
        try:
            head = capture(call)
        except NotCapturable:
            return
        if not head.is_native:  # each replay would copy the logits that torch makes
            return
        tokens = None
        if self._tokens is not None:
            tokens = (ctypes.c_int64 * size).from_address(self._tokens.data_ptr())
        head.share_result()
        self._graphs = graph, head  # keep alive what their launches point at
        self._forward = DecodeForward(self._captured(graph, head), tokens)

    def prepare(self, rows: DecodeRows, adapter_slots: Sequence[int] = ()) -> DecodeForward:
        """The step, with the inputs of `rows` in place."""
        if self._advance is None:
            self._inputs.fill_batch(rows, self._size, None, adapter_slots)
        else:
            self._advance.follows = self._inputs.follow_batch(rows, self._size, adapter_slots)
        return self._forward

    def _captured(self, graph: CpuGraph, head: CpuGraph) -> Callable[[], torch.Tensor]:
        """Runs both; in one call of C, if torch has no part in it."""
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
