"""A scheduler with a fake model, whose outputs and KV slots are all predictable."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from llmopt.engine.base.sampling_params import SamplingParams
from llmopt.engine.scheduling.block_pool import BlockPool, PrefixCache, Window
from llmopt.engine.scheduling.draft_length import DraftLength, Tree
from llmopt.engine.scheduling.extensions import SwapSpace
from llmopt.engine.scheduling.kv_eviction import KvEviction
from llmopt.engine.scheduling.request import Request, RequestTimes, Token
from llmopt.engine.scheduling.scheduler import Scheduler
from llmopt.engine.scheduling.scheduler_config import SchedulerConfig
from llmopt.engine.scheduling.state_pool import StatePool
from llmopt.engine.scheduling.step_plan import Compaction, Copies, ScheduledRow, StepPlan

EOS = 0
VOCAB = 7

Past = tuple[bytes | int, ...]
"""Of a token: the salt of its sequence, and the tokens up to it."""


def next_token(history: Sequence[int], seed: int, salt: bytes = b"") -> int:
    """The fake model's next token after `history`; another salt is another model."""
    return hash((tuple(history), seed, len(salt))) % VOCAB


def draft_of(row: ScheduledRow, salt: bytes, width: int) -> tuple[list[int], Tree]:
    """Some draft tokens for a row, `width` per position, with the right one among them for two of three positions,
    and not always as many as there are slots for."""
    tokens: list[int] = []
    parents: list[int] = []
    at = -1
    for _ in range(row.num_draft_tokens // width):
        history = [*row.history, *path_of(tokens, Tree(tuple(parents)), at)]
        chance = hash((tuple(history), row.seed, "draft")) % 12
        if chance == 11:
            break
        right, place = next_token(history, row.seed, salt), chance % width
        parents += [at] * width
        at = len(tokens) + place
        wrong = width * (chance > 7)
        tokens += [(right + wrong + i - place) % VOCAB for i in range(width)]
    return tokens, Tree(tuple(parents))


def path_of(draft: Sequence[int], tree: Tree, index: int) -> list[int]:
    """The tokens that lead to a draft token, itself included."""
    return [draft[i] for i in tree.path(index)]


Loop = Literal["serial", "early", "late"]
"""Whether a step is scheduled before its predecessor is settled, and if so when it is computed: as soon as it
is scheduled, or when somebody waits for it, which is the span that a thread has."""


def num_tokens_of(plan: StepPlan) -> dict[str, int]:
    return {row.sequence_id: row.num_tokens for row in plan.rows}


@dataclass(slots=True)
class _InFlight:
    """A scheduled step, its predecessor, and its sampled tokens once it is computed."""

    plan: StepPlan
    before: _InFlight | None = None
    sampled: dict[str, list[int]] = field(default_factory=dict)
    draft_depths: dict[str, int] = field(default_factory=dict)
    is_computed: bool = False


class World:
    """Runs steps and keeps, for each KV slot, the whole prefix of the token cached there.

    Attention reads every slot of a sequence up to the current token, or those within the window. So before
    each token is sampled, every slot must hold exactly that sequence's prefix and salt; a block that was
    shared, copied, freed or reused wrongly fails at once. Draft tokens are written too, right and wrong ones.

    With an `eviction` rule a compacted sequence must hold what it kept, and everything since.

    With `num_states` each sequence has a state as well, which is the prefix that its tokens have updated it by.
    """

    def __init__(
        self,
        num_blocks: int = 9,
        block_size: int = 4,
        caching: bool = True,
        policy: str = "priority",
        drafting: int = 0,
        width: int = 1,
        loop: Loop = "serial",
        num_host_blocks: int = 0,
        num_states: int = 0,
        num_checkpoints: int = 0,
        eviction: KvEviction | None = None,
        **limits: int,
    ) -> None:
        self.block_size = block_size
        self._width = width
        self.loop = loop
        self._in_flight: _InFlight | None = None
        sinks = limits.pop("sinks", 0)
        window = Window(limits.pop("window"), sinks) if "window" in limits else None
        pool = BlockPool(num_blocks)
        self.scheduler = Scheduler(
            SchedulerConfig(
                max_num_batched_tokens=limits.pop("max_num_batched_tokens", 8),
                max_num_seqs=limits.pop("max_num_seqs", 3),
                block_size=block_size,
                max_model_len=limits.pop("max_model_len", 32),
                policy=policy,
                drafting=DraftLength(drafting, 0.1, width) if drafting else None,
                window=window,
                eviction=eviction,
                **limits,
            ),
            pool,
            PrefixCache(pool, block_size, enabled=caching),
            SwapSpace(num_host_blocks, block_size),
            StatePool(num_states, num_checkpoints, block_size),
        )
        self._kept: dict[str, list[Past]] = {}
        self.host: dict[tuple[int, int], Past] = {}
        self.slots: dict[tuple[int, int], Past] = {}
        self.states: dict[int, Past] = {}
        self.num_restored = 0
        self._salts: dict[str, bytes] = {}
        self.num_accepted = 0
        self.num_moved = 0
        self.finished: dict[str, Request] = {}
        self._order = 0

    def add(
        self,
        request_id: str,
        prompt: list[int],
        max_tokens: int,
        n: int = 1,
        priority: int = 0,
        salt: bytes = b"",
        images: tuple[range, ...] = (),
        **params,
    ) -> Request:
        request = Request(
            sequence_id=f"{request_id}/0",
            request_id=request_id,
            index=0,
            token_ids=list(prompt),
            num_prompt_tokens=len(prompt),
            max_tokens=max_tokens,
            params=SamplingParams(max_tokens=max_tokens, n=n, **params),
            seed=100 * self._order,
            order=self._order,
            times=RequestTimes(0.0),
            priority=priority,
            num_completions=n,
            cache_salt=salt,
            bidirectional_images=images,
        )
        self.scheduler.add(request)
        self._salts[request_id] = salt
        self._order += n
        return request

    def step(self) -> tuple[StepPlan, list[Token]]:
        """One step of the loop; returns the outputs processed in it."""
        before = self._in_flight
        if before is not None and before.plan.blocks_next_step:
            self._in_flight = None
            return self._finish_step(before)
        plan = self.scheduler.schedule()
        step = _InFlight(plan, before) if plan.rows else None
        if step is not None and self.loop == "early":
            self._compute(step)
        if self.loop != "serial":
            self._in_flight, step = step, before
        return (StepPlan(()), []) if step is None else self._finish_step(step)

    def _finish_step(self, step: _InFlight) -> tuple[StepPlan, list[Token]]:
        if not step.is_computed:
            self._compute(step)
        tokens = self.scheduler.update(
            step.plan, step.sampled, frozenset({EOS}), 0.0, step.draft_depths
        )
        for token in tokens:
            if token.request.finish_reason is not None:
                self.finished[token.request.sequence_id] = token.request
        self.scheduler.check_integrity()
        return step.plan, tokens

    def _compute(self, step: _InFlight) -> None:
        plan, config = step.plan, self.scheduler.config
        if plan.has_placeholders:
            assert step.before is not None and step.before.is_computed
            plan = plan.resolved(step.before.sampled)
        step.before = None
        assert plan.num_tokens <= config.max_num_batched_tokens
        assert len(plan.rows) <= config.max_num_seqs
        for compaction in plan.compactions:
            self._compact(compaction)
        self._copy(self.slots, self.slots, plan.copies.within)
        self._copy(self.slots, self.host, plan.copies.to_host)
        self._copy(self.host, self.slots, plan.copies.from_host)
        self._copy_states(plan.copies.states)
        salts = {row.sequence_id: self._salts[row.sequence_id.split("/")[0]] for row in plan.rows}
        drafts = {
            row.sequence_id: draft_of(row, salts[row.sequence_id], self._width) for row in plan.rows
        }
        num_draft_slots = sum(row.num_draft_tokens for row in plan.rows)
        assert plan.num_tokens + num_draft_slots <= config.max_num_batched_tokens
        written: dict[tuple[int, int], Past] = {}
        for row in plan.rows:
            assert row.num_tokens >= 1
            last = row.num_prompt_tokens + (row.params.max_tokens or 0) - 1
            places = -(-row.num_draft_tokens // self._width)
            assert row.end + places <= last, "a sequence's last token is computed"
            known, salt = row.history[: row.end], salts[row.sequence_id]
            draft, tree = drafts[row.sequence_id]
            pasts: list[Past] = [(salt, *known[: i + 1]) for i in range(row.start, row.end)]
            pasts += [(salt, *known, *path_of(draft, tree, i)) for i in range(len(draft))]
            self._update_state(row, salt)
            for number, past in enumerate(pasts, row.start - row.num_evicted):
                slot = self._slot(row, number)
                assert slot[0] != 0, "a token is written to the null block"
                assert slot not in written, "two sequences write the same slot"
                written[slot] = past
        self._copy_states(plan.checkpoints)
        self.slots.update(written)
        sampled: dict[str, list[int]] = {}
        for row in plan.rows:
            salt, (draft, tree) = salts[row.sequence_id], drafts[row.sequence_id]
            window = config.window or Window(row.end)
            behind = range(window.sinks, max(window.sinks, row.start - window.length + 1))
            self._check_kept(row, salt)
            for position in range(0 if not row.num_evicted else row.end, row.end):
                if position in behind:
                    continue
                past = (salt, *row.history[: position + 1])
                assert self.slots[self._slot(row, position)] == past, "the cache is wrong"
            if not row.num_samples:
                continue
            drawn = [next_token(row.history, row.seed + i, salt) for i in range(row.num_samples)]
            accepted: list[int] = []
            while (
                at := tree.child(accepted[-1] if accepted else -1, drawn[-1], draft)
            ) is not None:
                accepted.append(at)
                path = path_of(draft, tree, at)
                drawn.append(next_token([*row.history, *path], row.seed, salt))
            self.num_accepted += len(accepted)
            self.num_moved += sum(index != place for place, index in enumerate(accepted))
            moved = [self.slots[self._slot(row, row.end + index)] for index in accepted]
            for number, past in enumerate(moved, row.end):
                self.slots[self._slot(row, number)] = past
            sampled[row.sequence_id] = drawn
        step.sampled, step.is_computed = sampled, True
        step.draft_depths = {name: tree.depth for name, (_, tree) in drafts.items() if tree.depth}

    def _copy(
        self,
        source: dict[tuple[int, int], Past],
        target: dict[tuple[int, int], Past],
        copies: Copies,
    ) -> None:
        """Whole blocks; every source is read before any is written. What was never written stays unknown."""
        assert len({destination for _, destination in copies}) == len(copies)
        found = {
            (destination, offset): source.get((block, offset))
            for block, destination in copies
            for offset in range(self.block_size)
        }
        for place, past in found.items():
            target.pop(place, None)
            if past is not None:
                target[place] = past

    def _compact(self, compaction: Compaction) -> None:
        """Keep the last token, and of the others those that a hash chooses."""
        size = self.block_size
        held = [
            self.slots[compaction.source[slot // size], slot % size]
            for slot in range(compaction.num_slots)
        ]
        chosen = sorted(held[:-1], key=lambda past: hash((past, "kept")))[: compaction.num_kept - 1]
        kept = [*sorted(chosen, key=len), held[-1]]
        for slot, past in enumerate(kept):
            self.slots[compaction.destination[slot // size], slot % size] = past
        self._kept[compaction.sequence_id] = kept

    def _check_kept(self, row: ScheduledRow, salt: bytes) -> None:
        """A compacted sequence holds what it kept, and the tokens since in their order."""
        if not row.num_evicted:
            return
        num_slots = row.end - row.num_evicted
        held = [self.slots[self._slot(row, slot)] for slot in range(num_slots)]
        kept = self._kept.get(row.sequence_id)
        assert kept is None or held[: len(kept)] == kept, "a kept token is lost"
        lengths = [len(past) - 1 for past in held]
        assert lengths == sorted(set(lengths)) and lengths[-1] == row.end
        assert held == [(salt, *row.history[:length]) for length in lengths], "the cache is wrong"

    def _copy_states(self, copies: Copies) -> None:
        assert len({destination for _, destination in copies}) == len(copies)
        last = self.scheduler.states.num_slots
        self.num_restored += sum(source > last for source, _ in copies)
        self.states |= {
            destination: self.states[source]
            for source, destination in copies
            if source in self.states
        }

    def _update_state(self, row: ScheduledRow, salt: bytes) -> None:
        """Update the state of a row's sequence by its tokens; it starts from nothing at position 0."""
        if not self.scheduler.states.num_slots:
            assert row.state_slot == row.checkpoint == 0
            return
        assert row.state_slot, "a sequence has no state"
        if row.start:
            before = self.states.get(row.state_slot)
            assert before == (salt, *row.history[: row.start]), "the state is wrong"
        self.states[row.state_slot] = (salt, *row.history[: row.end])

    def _slot(self, row: ScheduledRow, number: int) -> tuple[int, int]:
        return row.block_ids[number // self.block_size], number % self.block_size

    def drop_in_flight(self) -> None:
        """The model fails in a step that has just been scheduled."""
        self.scheduler.schedule()
        self._in_flight = None
        self.scheduler.reset_in_flight()
        self.scheduler.check_integrity()

    def drain(self, limit: int = 2000) -> None:
        """Step until nothing is left; fails if the scheduler stalls or thrashes."""
        for _ in range(limit):
            if not self.scheduler.has_unfinished():
                break
            plan, _ = self.step()
            assert plan.rows or self._in_flight is not None, "the scheduler stalls"
        assert not self.scheduler.has_unfinished(), "the scheduler thrashes"
        pool, swap = self.scheduler.pool, self.scheduler.swap
        assert pool.num_free == pool.num_usable
        assert len(swap.free_ids) == swap.num_blocks
        assert self.scheduler.states.num_free == self.scheduler.states.num_slots


def foretell(
    prompt: list[int], seed: int, max_tokens: int, salt: bytes = b"", *, ignore_eos: bool = False
) -> list[int]:
    """The output of a request, whatever happens around it."""
    history = list(prompt)
    while len(history) - len(prompt) < max_tokens:
        history.append(next_token(history, seed, salt))
        if history[-1] == EOS and not ignore_eos:
            break
    return history[len(prompt) :]
