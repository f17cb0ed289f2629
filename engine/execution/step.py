"""A step on its way through the runner: phases and their timer, layout of the batch, and results.

Sampled tokens are on the device at once, and on the host once the step is done.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal, NamedTuple

import torch

from ..base.device import packed
from ..cache.step_inputs import Run
from ..scheduling.outputs import TokenLogprobs
from ..scheduling.step_plan import DecodeBatch, ScheduledRow
from ..speculation.proposer import DraftTokens, TargetStates

Phase = Literal[
    "schedule",  # planning the step, and allocating its blocks
    "prepare_inputs",  # copying blocks; token ids, positions, slot mapping and block tables
    "draft",  # proposing draft tokens, and keeping the KV of the accepted ones
    "forward",  # the model's layers and LM head: eager, or replayed from a graph
    "sample",  # sampling tokens from the logits
    "fetch_tokens",  # copying them to the host
    "update",  # appending them to their requests
    "detokenize",  # tokens to text, and the outputs
]
"""A phase of a step. Phases do not overlap; some time between them belongs to none."""

StepHook = Callable[[Phase | Literal["step"], float], None]
"""Called with the seconds of each phase, and of each `Engine.step`, at its end; its own time counts too."""


class PhaseTimer:
    """Measures phases in wall-clock time, with a `gpu` synchronized, and calls `hook` after each."""

    __slots__ = ("_begun", "_gpu", "_hook", "_phase", "seconds")

    def __init__(self, gpu: torch.device | None, hook: StepHook | None) -> None:
        self.seconds: dict[Phase, float] = {}
        self._gpu = gpu
        self._hook = hook
        self._phase: Phase = "schedule"
        self._begun = 0.0

    def __call__(self, phase: Phase) -> PhaseTimer:
        self._phase = phase
        return self

    def __enter__(self) -> None:
        self._begun = self._now()

    def __exit__(self, error: object, *_: object) -> None:
        if error is not None:
            return
        spent = self._now() - self._begun
        if self._hook is not None:
            self._hook(self._phase, spent)
            spent = time.perf_counter() - self._begun
        self.seconds[self._phase] = self.seconds.get(self._phase, 0.0) + spent

    def _now(self) -> float:
        if self._gpu is not None:
            torch.cuda.synchronize(self._gpu)
        return time.perf_counter()


class _Untimed:
    seconds: Mapping[Phase, float] = MappingProxyType({})

    def __call__(self, phase: Phase) -> _Untimed:
        return self

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


StepTimer = PhaseTimer | _Untimed
"""Measures the phases of one step, summed over repeated ones: `with timer("forward"): ...`."""

UNTIMED: StepTimer = _Untimed()


@dataclass(slots=True)
class SpeculativeRow:
    """Row, its draft tokens from index `first` on, and the accepted ones, from the tree's root."""

    row: ScheduledRow
    draft: DraftTokens
    first: int
    accepted: list[int] = field(default_factory=list)

    @property
    def path(self) -> list[int]:
        return [self.draft.token_ids[index] for index in self.accepted]

    def accept(self, token_id: int) -> bool:
        """Accept the child in the tree with the sampled `token_id`; False if there is none."""
        parent = self.accepted[-1] if self.accepted else -1
        child_index = self.draft.tree.child(parent, token_id, self.draft.token_ids)
        if child_index is not None:
            self.accepted.append(child_index)
        return child_index is not None

    def moved_slots(self, block_size: int) -> list[tuple[int, int]]:
        """KV slots to compact: (source, target) of the accepted tokens of a tree."""
        end, blocks = self.row.end, self.row.block_ids
        places = [(end + index, to) for to, index in enumerate(self.accepted, end)]
        slots = [[blocks[p // block_size] * block_size + p % block_size for p in q] for q in places]
        return [(source, target) for source, target in slots if source != target]

    def states(self, hidden: torch.Tensor) -> torch.Tensor:
        """Rows of `hidden` [tokens, hidden] of the row's tokens and the accepted draft tokens."""
        begin = self.first - self.row.num_tokens
        if self.accepted == list(range(len(self.accepted))):
            return hidden[begin : self.first + len(self.accepted)]
        known = torch.arange(begin, self.first, device=hidden.device)
        accepted = packed([self.accepted], hidden.device)[0] + self.first
        return hidden.index_select(0, torch.cat([known, accepted]))


@dataclass(frozen=True, slots=True)
class StepLayout:
    """Rows in the flattened tokens of a step: first `begins`, `runs` with draft tokens, speculative rows."""

    rows: Sequence[ScheduledRow]
    begins: Sequence[int]
    runs: Sequence[Run]
    speculative: Mapping[str, SpeculativeRow]

    @classmethod
    def of(cls, rows: Sequence[ScheduledRow], drafts: Mapping[str, DraftTokens]) -> StepLayout:
        """Layout of `rows`, the ones in `drafts` followed by their draft tokens."""
        begins: list[int] = []
        runs: list[Run] = []
        speculative: dict[str, SpeculativeRow] = {}
        begin = 0
        for row in rows:
            run = Run(
                row.start - row.num_evicted,
                row.token_ids,
                row.block_ids,
                state_slot=row.state_slot,
                num_evicted=row.num_evicted,
                images=row.images,
                rope_positions=row.rope_positions,
                bidirectional_images=row.bidirectional_images,
            )
            draft = drafts.get(row.sequence_id)
            if draft is not None:
                run = run._replace(token_ids=[*row.token_ids, *draft.token_ids], tree=draft.tree)
                speculative[row.sequence_id] = SpeculativeRow(row, draft, begin + row.num_tokens)
            begins.append(begin)
            runs.append(run)
            begin += len(run.token_ids)
        return cls(rows, begins, runs, speculative)

    @property
    def num_tokens(self) -> int:
        return self.begins[-1] + len(self.runs[-1].token_ids) if self.runs else 0

    @property
    def sampled_rows(self) -> list[ScheduledRow]:
        return [row for row in self.rows if row.num_samples]

    @property
    def placeholders(self) -> dict[str, int]:
        placed = zip(self.rows, self.begins, strict=True)
        return {
            row.sequence_id: begin + row.num_tokens - 1
            for row, begin in placed
            if row.has_placeholder
        }

    @property
    def ends(self) -> list[int]:
        """Indices of the tokens whose logits are needed: once per sample, and once per draft token."""
        ends: list[int] = []
        for row, begin in zip(self.rows, self.begins, strict=True):
            ends += [begin + row.num_tokens - 1] * row.num_samples
            if (verified := self.speculative.get(row.sequence_id)) is not None:
                ends += range(verified.first, verified.first + len(verified.draft.token_ids))
        return ends

    def target_states(self, hidden: torch.Tensor, result: StepResult) -> list[TargetStates]:
        """Target hidden states, from `hidden` [tokens, hidden], and next token ids of generating rows."""
        states: list[TargetStates] = []
        for row, begin in zip(self.rows, self.begins, strict=True):
            if row.pooling is not None:
                continue
            sampled = result.tokens.get(row.sequence_id) or [row.tokens[row.end]]
            following = row.tokens[row.start + 1 : row.end]
            if (verified := self.speculative.get(row.sequence_id)) is not None:
                states.append(TargetStates(row, verified.states(hidden), [*following, *sampled]))
            else:
                row_hidden = hidden[begin : begin + row.num_tokens]
                states.append(TargetStates(row, row_hidden, [*following, sampled[0]]))
        return states


@dataclass(slots=True)
class StepResult:
    """Sampled tokens of a step, by sequence.

    Attributes:
        tokens: `num_samples` tokens of the row, or its accepted draft tokens and the bonus token.
        logprobs: an entry per token; None where the request needs no logprobs.
        prompt_logprobs: (position, logprobs) of prompt tokens that this step scored.
        pooled: shares of the vectors of pooled prompts.
        replayed: True if the forward pass replayed a captured graph.
    """

    tokens: dict[str, list[int]] = field(default_factory=dict)
    logprobs: dict[str, list[TokenLogprobs | None]] = field(default_factory=dict)
    prompt_logprobs: dict[str, list[tuple[int, TokenLogprobs]]] = field(default_factory=dict)
    pooled: dict[str, list[float]] = field(default_factory=dict)
    num_draft_tokens: dict[str, int] = field(default_factory=dict)
    draft_depths: dict[str, int] = field(default_factory=dict)
    replayed: bool = False

    def add_samples(
        self,
        rows: Sequence[ScheduledRow],
        tokens: Sequence[int],
        logprobs: Sequence[TokenLogprobs | None],
    ) -> None:
        """Add the samples of rows, `num_samples` of each in the rows' order."""
        begin = 0
        for row in rows:
            samples = slice(begin, begin + row.num_samples)
            self.tokens[row.sequence_id] = [*tokens[samples]]
            self.logprobs[row.sequence_id] = [*logprobs[samples]]
            begin += row.num_samples


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """Sampled tokens on the device, int64, which the next step reads; `indices`: of each sequence's first."""

    token_ids: torch.Tensor
    indices: Mapping[str, int]

    def of(self, batch: DecodeBatch) -> torch.Tensor:
        if self.indices is batch.places:
            return self.token_ids
        sources = [self.indices[name] for name in batch.names]
        return self.token_ids.index_select(0, packed([sources], self.token_ids.device)[0])

    def fill_placeholders(self, token_ids: torch.Tensor, placeholders: Mapping[str, int]) -> None:
        """Write the tokens to `token_ids` [tokens] at the index of each sequence's output placeholder."""
        sources = [self.indices[name] for name in placeholders]
        to, source = packed([list(placeholders.values()), sources], token_ids.device)
        token_ids.index_copy_(0, to, self.token_ids.index_select(0, source))


class LaunchedStep(NamedTuple):
    """Step whose kernels are launched; `wait` for its result. `sampled`: tokens that only the device has."""

    wait: Callable[[], StepResult]
    sampled: SampledTokens | None = None
