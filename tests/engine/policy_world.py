"""A scheduler with a make-believe model, whose every output and every KV slot can be foretold."""

from __future__ import annotations

from llmopt.engine.block_pool import BlockPool
from llmopt.engine.prefix_cache import PrefixCache
from llmopt.engine.request import Request, RequestTimes
from llmopt.engine.sampling_params import SamplingParams
from llmopt.engine.scheduler import Scheduler, SchedulerConfig, Token
from llmopt.engine.step_plan import StepPlan

EOS = 0
VOCAB = 7


def next_token(history: list[int] | tuple[int, ...], seed: int) -> int:
    """What the make-believe model says after `history`."""
    return hash((tuple(history), seed)) % VOCAB


class World:
    """Runs steps and keeps, for each slot of the cache, the whole past of the token that lies there.

    Attention reads every slot of a sequence up to the current token, or those within the window. So before
    each draw, every one of them must hold exactly that sequence's past; a block that was shared, copied, freed or reused wrongly
    shows at once.
    """

    def __init__(
        self,
        num_blocks: int = 9,
        block_size: int = 4,
        caching: bool = True,
        policy: str = "priority",
        **limits: int,
    ) -> None:
        self.block_size = block_size
        pool = BlockPool(num_blocks)
        self.scheduler = Scheduler(
            SchedulerConfig(
                max_num_batched_tokens=limits.pop("max_num_batched_tokens", 8),
                max_num_seqs=limits.pop("max_num_seqs", 3),
                block_size=block_size,
                max_model_len=limits.pop("max_model_len", 32),
                policy=policy,
                **limits,
            ),
            pool,
            PrefixCache(pool, block_size, enabled=caching),
        )
        self.slots: dict[tuple[int, int], tuple[int, ...]] = {}
        self.finished: dict[str, Request] = {}
        self._order = 0

    def add(
        self,
        request_id: str,
        prompt: list[int],
        max_tokens: int,
        n: int = 1,
        priority: int = 0,
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
        )
        self.scheduler.add(request)
        self._order += n
        return request

    def step(self) -> tuple[StepPlan, list[Token]]:
        plan = self.scheduler.schedule()
        config = self.scheduler.config
        assert plan.num_tokens <= config.max_num_batched_tokens
        assert len(plan.rows) <= config.max_num_seqs
        copied = {
            (destination, offset): self.slots[source, offset]
            for source, destination in plan.block_copies
            for offset in range(self.block_size)
            if (source, offset) in self.slots
        }
        self.slots.update(copied)
        written: dict[tuple[int, int], tuple[int, ...]] = {}
        for row in plan.rows:
            assert row.num_tokens >= 1
            for position in range(row.start, row.end):
                slot = (row.block_ids[position // self.block_size], position % self.block_size)
                assert slot[0] != 0, "a token is written to the null block"
                assert slot not in written, "two sequences write the same slot"
                written[slot] = tuple(row.history[: position + 1])
        self.slots.update(written)
        sampled: dict[str, list[int]] = {}
        for row in plan.rows:
            window = config.window or row.end
            for position in range(max(0, row.start - window + 1), row.end):
                slot = (row.block_ids[position // self.block_size], position % self.block_size)
                assert self.slots[slot] == tuple(row.history[: position + 1]), "the cache is wrong"
            if row.num_samples:
                sampled[row.sequence_id] = [
                    next_token(list(row.history), row.seed + i) for i in range(row.num_samples)
                ]
        tokens = self.scheduler.update(plan, sampled, frozenset({EOS}))
        for token in tokens:
            if token.request.finish_reason is not None:
                self.finished[token.request.sequence_id] = token.request
        self.scheduler.check_integrity()
        return plan, tokens

    def drain(self, limit: int = 2000) -> None:
        """Step until nothing is left; a scheduler that stalls or thrashes does not get there."""
        for _ in range(limit):
            if not self.scheduler.has_unfinished():
                break
            plan, _ = self.step()
            assert plan.rows, "the scheduler stalls"
        assert not self.scheduler.has_unfinished(), "the scheduler thrashes"
        pool = self.scheduler.pool
        assert pool.num_free == pool.num_usable


def foretell(prompt: list[int], seed: int, max_tokens: int) -> list[int]:
    """The output of a request, whatever happens around it."""
    history = list(prompt)
    while len(history) - len(prompt) < max_tokens:
        history.append(next_token(history, seed))
        if history[-1] == EOS:
            break
    return history[len(prompt) :]
