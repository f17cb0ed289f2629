"""Graph capture and replay of steps of few tokens: verification, drafting, chunks with decodes.

One graph serves every step of up to so many tokens, of any sequences. Longer steps are eager: there the
launches take less time than the work.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from ..cache.step_inputs import Run, step_inputs
from ..kernels.attention.batch import AttentionBatch
from ..model.layers.attention import LayerCache, StepInputs
from ..scheduling.block_pool import NULL_BLOCK
from ..speculation.eagle import EagleHead
from ..speculation.proposer import CachedProposer, DraftForward
from .decode_graphs import StepGraphs, StepKind
from .graph_setting import Forward, Graph, GraphName, GraphSetting, try_capture

TOKEN_SIZES = (16, 32, 64, 96, 128, 192, 256)
"""Tokens of the captured steps, one of them padding: with more, the GPU is busy for longer than a launch."""


def is_plain(run: Run) -> bool:
    """True if a run is text at its plain positions, without a tree, of a sequence with all its blocks."""
    return (
        (run.tree is None or run.tree.is_chain)
        and not run.num_evicted
        and NULL_BLOCK not in run.block_ids
        and run.rope_positions is None
        and not run.bidirectional_images
        and all(image.offset + image.num_tokens <= run.start for image in run.images)
    )


class TokenGraphs:
    """Forward passes of steps of up to `sizes[-1] - 1` tokens; with no sizes, none is captured."""

    def __init__(self, setting: GraphSetting, sizes: Sequence[int]) -> None:
        self._setting = setting
        self._sizes = tuple(sizes) if setting.model.captures_any_step else ()
        self._block_size, max_blocks = setting.block_size, setting.max_blocks
        self._graphs: dict[StepKind, Graph] = {}
        self._buffers: dict[int, Any] = {}
        if self._sizes:
            from ..kernels.attention.triton_metadata import StaticBuffer

            capacity = StaticBuffer.capacity(self._sizes[-1], max_blocks)
            # Shared: one step runs at a time.
            memory = torch.zeros(capacity, dtype=torch.int64, device=setting.device)
            self._buffers = {
                size: StaticBuffer(size, max_blocks, memory, NULL_BLOCK) for size in self._sizes
            }

    @torch.inference_mode()
    def capture_all(self, aux_hidden_state_layers: tuple[int, ...] = ()) -> None:
        """Capture the sizes now, the largest first, so that the others reuse its memory."""

        def capture() -> None:
            for size in reversed(self._sizes):
                for adapters in self._setting.with_and_without_adapters:
                    self.capture_padding(StepKind(size, 0, aux_hidden_state_layers, adapters))

        if not try_capture(capture, "steps of several tokens"):
            self.give_up()

    def give_up(self) -> None:
        self._sizes = ()
        self._graphs.clear()
        self._setting.give_up("tokens")

    def prepare(
        self,
        runs: Sequence[Run],
        aux_hidden_state_layers: tuple[int, ...] = (),
        fill_placeholders: Callable[[torch.Tensor], object] | None = None,
        adapter_slots: Sequence[int] = (),
    ) -> Forward | None:
        """Fill the static inputs with a step's values; None if the step is not one that is captured.
        `fill_placeholders` writes token ids that only the device knows. `adapter_slots` has a slot for each
        run, or is empty. The caller checks the rest of `StepInputs`."""
        rows = sum(len(run.token_ids) for run in runs)
        index = bisect_left(self._sizes, rows + 1)
        if index == len(self._sizes) or not all(map(is_plain, runs)):
            return None
        kind = StepKind(self._sizes[index], 0, aux_hidden_state_layers, bool(adapter_slots))
        # Before the inputs are filled: a capture runs on a step of padding.
        if kind not in self._graphs and not try_capture(
            lambda: self.capture_padding(kind), "steps of several tokens"
        ):
            self.give_up()
            return None
        buffer = self._buffers[kind.size]
        buffer.fill(*self._values(runs, adapter_slots))
        if fill_placeholders is not None:
            fill_placeholders(buffer.column(0)[:rows])
        replay = self._graphs[kind].replay
        return Forward(lambda: replay()[:rows])

    def _values(
        self, runs: Sequence[Run], adapter_slots: Sequence[int]
    ) -> tuple[list[list[int]], list[Any]]:
        """Columns (token ids, positions, slots, slots of adapters) and segments of a step."""
        from ..kernels.attention.triton_metadata import Segment

        token_ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        segments: list[Segment] = []
        size = self._block_size
        for run in runs:
            begin, end = len(token_ids), run.start + len(run.token_ids)
            token_ids += run.token_ids
            positions += range(run.start, end)
            blocks = run.block_ids
            slots += [blocks[p // size] * size + p % size for p in range(run.start, end)]
            used = blocks[: -(-end // size)]
            segments.append(Segment(begin, len(run.token_ids), end, used))
        counted = zip(adapter_slots, runs, strict=True) if adapter_slots else ()
        adapters = [slot for slot, run in counted for _ in run.token_ids]
        return [token_ids, positions, slots, adapters], segments

    def captured(self, kind: StepKind) -> Graph:
        return self._graphs[kind]

    def static(self, kind: StepKind) -> Any:
        return self._buffers[kind.size]

    def capture_padding(self, kind: StepKind) -> None:
        buffer = self._buffers[kind.size]
        buffer.fill([[]] * buffer.columns, ())
        inputs = partial(self._inputs, kind, buffer)
        self._graphs[kind] = self._setting.graph(GraphName("tokens", kind), buffer, inputs)

    def _inputs(self, kind: StepKind, buffer: Any) -> StepInputs:
        from ..kernels.attention.triton_metadata import StaticMetadata

        metadata = StaticMetadata(buffer, self._block_size)
        batch = AttentionBatch([], None, self._block_size, self._setting.dtype, metadata)
        token_ids, positions, slots, rows = map(buffer.column, range(buffer.columns))
        given = token_ids, positions, slots, batch
        inputs = StepInputs(*given, aux_hidden_state_layers=kind.aux_hidden_state_layers)
        if not kind.adapters:
            return inputs
        return replace(inputs, adapters=self._setting.slot_mask(rows))


def token_graph_sizes(device: torch.device, max_tokens: int) -> tuple[int, ...]:
    """Token counts to capture on a device, for steps of up to `max_tokens`; none: they are eager."""
    if device.type != "cuda" or not max_tokens:
        return ()
    return TOKEN_SIZES[: bisect_left(TOKEN_SIZES, max_tokens) + 1]


def capture_all(
    decodes: StepGraphs, tokens: TokenGraphs | None, aux_hidden_state_layers: tuple[int, ...] = ()
) -> None:
    decodes.capture_all(aux_hidden_state_layers)
    if tokens is not None:
        if decodes.gave_up:  # these would fail too
            tokens.give_up()
        else:
            tokens.capture_all(aux_hidden_state_layers)


class DraftGraphs:
    """`DraftForward` of captured steps, of heads from static `before`; `eager` serves the others."""

    def __init__(
        self,
        setting: GraphSetting,
        eager: DraftForward,
        sizes: Sequence[int],
        token_sizes: Sequence[int],
        before: torch.Tensor | None,
    ) -> None:
        self._setting, self._eager, self._before = setting, eager, before
        self._decodes = StepGraphs(setting, sizes)
        self._steps = TokenGraphs(setting, token_sizes)

    def capture_all(self) -> None:
        capture_all(self._decodes, self._steps)

    def __call__(
        self, runs: Sequence[Run], token_ids: torch.Tensor | None, before: torch.Tensor | None
    ) -> torch.Tensor:
        forward = self._prepare(runs, token_ids)
        if forward is None:
            return self._eager(runs, token_ids, before)
        if before is not None and self._before is not None:
            self._before[: len(before)].copy_(before)
        return forward.run()

    def _prepare(self, runs: Sequence[Run], token_ids: torch.Tensor | None) -> Forward | None:
        """Put the inputs of a pass in place; None if it is not captured."""
        if any(len(run.token_ids) > 1 for run in runs):
            fill = None if token_ids is None else lambda to: to.copy_(token_ids)
            return self._steps.prepare(runs, (), fill)
        setting = self._setting
        inputs = step_inputs(runs, setting.block_size, setting.device, setting.dtype)
        if token_ids is not None:
            inputs.token_ids.copy_(token_ids)
        return self._decodes.prepare(inputs)


class _HeadSteps:
    """EAGLE head as a model of captured steps; the hidden states that it starts from are static inputs."""

    lora_bank = None

    def __init__(self, head: EagleHead, vocab_size: int, before: torch.Tensor) -> None:
        self._head, self.vocab_size, self._before = head, vocab_size, before
        self.is_capturable, self.captures_any_step = head.is_capturable, head.captures_any_step
        self.logits = head.logits

    def forward(self, inputs: StepInputs, caches: Sequence[LayerCache]) -> torch.Tensor:
        return self._head.forward(inputs, caches, self._before[: len(inputs.token_ids)])


def replay_drafts(
    proposer: CachedProposer,
    setting: GraphSetting,
    sizes: Sequence[int],
    token_sizes: Sequence[int],
) -> None:
    """Let a draft model or head replay its steps, captured with the `setting` of the model."""
    (cache,), model, before = proposer.caches, proposer.model, None
    if isinstance(model, EagleHead):
        rows = max((*sizes, *token_sizes), default=0)
        before = torch.zeros(rows, model.hidden_size, dtype=setting.dtype, device=setting.device)
        model = _HeadSteps(model, setting.model.vocab_size, before)
    own = replace(setting, model=model, caches=cache.layers, ranks=None, states=())
    graphs = DraftGraphs(own, proposer.forward, sizes, token_sizes, before)
    proposer.forward, proposer.capture_all = graphs, graphs.capture_all
