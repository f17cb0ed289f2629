"""KV eviction to a budget (SnapKV, H2O): when a sequence's blocks are compacted, and which are freed then."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ...base.errors import BadInput
from .block_pool import BlockPool, PrefixCache
from .extensions import SchedulerExtension
from .request import Request
from .step_plan import Compaction, ScheduledRow, StepPlan

METHODS = ("snapkv", "h2o")
DEFAULT_METHOD = "snapkv"


@dataclass(frozen=True, slots=True)
class KvEviction:
    """The rule of a KV-cache budget: `budget` tokens stay of every layer and KV head, each head's own choice.

    A token's slot is its place among the tokens that are left, its position that in the sequence. The two are
    the same until a sequence is compacted, and differ by `Request.num_evicted_tokens` from then on.

    * snapkv compacts once, when the prompt is computed, and keeps all of the output (arXiv:2404.14469).
    * h2o compacts then, and again whenever the sequence has a block more than the budget (arXiv:2306.14048).

    Attributes:
        observation_window: snapkv: the last tokens of the prompt, whose queries vote on the keys before them.

    Raises BadInput: a budget below a block, or one that leaves SnapKV nothing but its observation window.
    """

    method: str
    budget: int
    block_size: int
    observation_window: int = 32

    def __post_init__(self) -> None:
        if self.budget < self.block_size:
            raise BadInput(
                f"kv_budget = {self.budget} is below a block of {self.block_size} tokens: raise it, or "
                "lower block_size"
            )
        if self.method == "snapkv" and self.budget <= self.observation_window:
            raise BadInput(
                f"kv_budget = {self.budget}: snapkv keeps its observation window of the last "
                f"{self.observation_window} tokens, so it needs {self.observation_window + 1} or more"
            )

    @property
    def num_recent(self) -> int:
        return self.observation_window if self.method == "snapkv" else self.budget // 2

    @property
    def max_output_slots(self) -> int | None:
        """Slots at which a sequence that decodes is compacted; None: it grows."""
        if self.method == "snapkv":
            return None
        return (-(-self.budget // self.block_size) + 1) * self.block_size

    def compaction_point(self, request: Request) -> int | None:
        """Number of computed tokens at which a sequence is compacted next; None: it ends before."""
        point: int | None = None
        if not request.num_evicted_tokens and request.num_prompt_tokens > self.budget:
            point = request.num_prompt_tokens
        elif self.max_output_slots is not None:
            point = request.num_evicted_tokens + self.max_output_slots
        # The last token is never computed: what is left at that point would not be read.
        last = request.num_prompt_tokens + request.max_tokens - 1
        return None if point is None or point >= last else point

    def first_scored(self, point: int) -> int:
        """Position of the first query whose weights count when `point` tokens are computed."""
        return max(0, point - self.observation_window) if self.method == "snapkv" else 0

    def held(self, num_prompt_tokens: int, num_tokens: int) -> int:
        """Most slots of a sequence at once after its prompt, until `num_tokens` of it are computed."""
        slots = num_tokens - max(0, num_prompt_tokens - self.budget)
        return slots if self.max_output_slots is None else min(slots, self.max_output_slots)

    def longest(self, num_prompt_tokens: int, capacity: int) -> int:
        """Tokens of the longest sequence with a prompt that fits into `capacity` slots, and so alone."""
        if self.max_output_slots is not None and self.max_output_slots <= capacity:
            return sys.maxsize
        # The last token is never computed.
        return capacity + max(0, num_prompt_tokens - self.budget) + 1


class Compactor(SchedulerExtension):
    """Plans compactions: blocks for the tokens that are kept, and the blocks that are freed."""

    def __init__(self, rule: KvEviction, pool: BlockPool, cache: PrefixCache) -> None:
        self._rule = rule
        self._pool, self._cache = pool, cache
        self._pending: list[Compaction] = []
        self.num_kept_tokens = self.num_evicted_tokens = 0

    def chunk(self, request: Request, num_new: int) -> int:
        """Tokens up to where the sequence is compacted."""
        point = self._rule.compaction_point(request)
        return num_new if point is None else min(num_new, point - request.num_computed_tokens)

    def num_reusable(self, request: Request, num_blocks: int) -> int:
        """Blocks, of `num_blocks` cached, that may be shared: queries that vote need computing."""
        if (point := self._rule.compaction_point(request)) is None:
            return num_blocks
        return min(num_blocks, self._rule.first_scored(point) // self._rule.block_size)

    def num_admitted(self, request: Request, num_tokens: int) -> int:
        point = self._rule.compaction_point(request)
        return num_tokens if point is None else min(num_tokens, point)

    def mark(self, request: Request, row: ScheduledRow) -> ScheduledRow:
        """The row with the tokens that are scored in it, and whether its end is compacted."""
        evicted, point = request.num_evicted_tokens, self._rule.compaction_point(request)
        if point is None:
            return row._replace(num_evicted=evicted)
        scored = max(0, row.end - max(row.start, self._rule.first_scored(point)))
        return row._replace(num_evicted=evicted, num_scored=scored, compacts=row.end == point)

    def compact(self, request: Request) -> bool:
        """Have the next step compact a sequence; False: no blocks are free. Shared blocks stay."""
        before, num_slots = request.block_ids, request.num_slots
        kept = self._blocks_for(before, -(-self._rule.budget // self._rule.block_size))
        if kept is None:
            return False
        table = tuple(before[: -(-num_slots // self._rule.block_size)])
        self._pending.append(
            Compaction(request.sequence_id, table, num_slots, tuple(kept), self._rule.budget)
        )
        kept_slots = set(kept)
        self._pool.free([block_id for block_id in before if block_id not in kept_slots])
        request.block_ids = kept
        request.num_evicted_tokens += num_slots - self._rule.budget
        self.num_kept_tokens += self._rule.budget
        self.num_evicted_tokens += num_slots - self._rule.budget
        return True

    def complete(self, plan: StepPlan) -> StepPlan:
        """The plan with its compactions first, in order; those of ended sequences do no harm."""
        taken, self._pending = tuple(self._pending), []
        return replace(plan, compactions=taken)

    def reset_in_flight(self) -> None:
        self._pending = []

    def _blocks_for(self, table: Sequence[int], count: int) -> list[int] | None:
        """Destination blocks: the sequence's own unshared ones, last first; free ones; those only cached."""
        own = [block_id for block_id in reversed(table) if self._pool.ref_count(block_id) == 1]
        cached_ids = self._pool.cached_ids
        blocks = [block_id for block_id in own if block_id not in cached_ids][:count]
        num_free = min(count - len(blocks), self._pool.num_free)
        reused = [block_id for block_id in own if block_id in cached_ids]
        reused = reused[: count - len(blocks) - num_free]
        if len(blocks) + num_free + len(reused) < count:
            return None
        for block_id in reused:
            self._cache.forget(block_id)
        return [*blocks, *self._pool.allocate(num_free), *reused]
