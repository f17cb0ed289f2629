"""Prompt passes: batched prefill of whole prompts outside the scheduler, for scoring and embeddings.

Prompts share steps, and each the KV blocks of its beginning with the one before. Logits are computed for
slices of hidden states, so that memory is independent of vocabulary and number of tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Self

import torch

from ...base.errors import BadInput
from ..cache.step_inputs import Run
from ..scheduling.block_pool import BlockPool, evict_blocks
from ..scheduling.request import NULL_SLOT
from ..scheduling.scheduler_config import SchedulerConfig
from ..scheduling.state_pool import StatePool
from .model_runner import ModelRunner


class Span(NamedTuple):
    """Tokens of a prompt, by its index; `is_kept`: its blocks stay for the next, which shares them."""

    prompt: int
    begin: int
    end: int
    is_kept: bool = False


class PromptPass:
    """Prefill of prompts on one engine, in order, with one adapter; a context manager of KV blocks."""

    def __init__(
        self,
        runner: ModelRunner,
        pool: BlockPool,
        config: SchedulerConfig,
        lora: str | None = None,
        states: StatePool | None = None,
    ) -> None:
        self._runner, self._pool, self._config, self._lora = runner, pool, config, lora
        self._states = StatePool() if states is None else states
        self.vocab_size = runner.decoder.vocab_size
        # Tokens of a step, of a prompt per step, and of a prompt.
        self.max_tokens, self.chunk = config.max_num_batched_tokens, config.chunk
        self.max_model_len = config.max_model_len
        self._tables: dict[int, tuple[list[int], range]] = {}
        self._slots: dict[int, int] = {}
        self._kept: int | None = None  # a prompt that has ended: the next one shares its blocks

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for prompt in list(self._tables):
            self._free(prompt)

    @property
    def max_prompts(self) -> int:
        return self._states.num_free if self._states.num_slots else self.max_tokens

    @property
    def shared_block(self) -> int:
        alone = self._states.num_slots or self._config.window is not None
        return 0 if alone else self._config.block_size

    @property
    def num_free_blocks(self) -> int:
        return self._pool.num_free

    @property
    def num_free_tokens(self) -> int:
        return self._pool.num_free * self._config.block_size

    def num_blocks(self, num_tokens: int) -> int:
        return self._config.max_blocks(num_tokens)

    def check_fits(self, num_tokens: int) -> None:
        """Raise BadInput where so many tokens do not fit in the context or in the free blocks."""
        if num_tokens > self.max_model_len or self.num_blocks(num_tokens) > self.num_free_blocks:
            raise BadInput(
                f"{num_tokens} tokens to score exceed the context of {self.max_model_len} tokens "
                f"or the {self.num_free_tokens} free tokens of the KV cache"
            )

    def hidden(self, spans: Sequence[Span], prompts: Sequence[Sequence[int]]) -> torch.Tensor:
        """Run a step; returns the final normed hidden states of its tokens, [tokens, hidden]. The spans of a
        prompt come in order. A first span that begins later shares the blocks before it with the prompt
        before. After its last token the blocks of a prompt are freed."""
        config, runs = self._config, []
        for prompt, begin, end, _ in spans:
            if prompt not in self._tables:
                table = []
                if begin:  # blocks that the prompt before it has
                    table = self._tables[prompt - 1][0][: config.num_blocks(begin)]
                    self._pool.share(table)
                    if self._kept is not None:
                        self._free(self._kept)
                        self._kept = None
                self._tables[prompt] = table, range(0)
            table, _ = self._tables[prompt]
            table += self._pool.allocate(config.num_blocks(end) - len(table))
            if prompt not in self._slots:
                self._slots[prompt] = self._states.allocate()
            slot = self._slots[prompt]
            runs.append(Run(begin, prompts[prompt][begin:end], table, state_slot=slot))
        hidden = self._runner.hidden(runs, self._lora)
        for prompt, _, end, is_kept in spans:
            table, evicted = self._tables[prompt]
            if end == len(prompts[prompt]):
                if is_kept:
                    self._kept = prompt
                else:
                    self._free(prompt)
                continue
            now = config.evicted(end)
            self._pool.free(evict_blocks(table, evicted, now))
            self._tables[prompt] = table, now
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._runner.decoder.logits(hidden)

    def _free(self, prompt: int) -> None:
        table, evicted = self._tables.pop(prompt)
        self._pool.free([*table[: evicted.start], *table[evicted.stop :]])
        self._states.free(self._slots.pop(prompt, NULL_SLOT))


def plan_steps(
    lengths: Sequence[int], passes: Sequence[PromptPass], shared: Sequence[int] = ()
) -> Iterator[list[Span]]:
    """Steps over all prompts in order, with as many tokens in each as every one of `passes` takes. A prompt
    begins once every pass has free KV blocks and state slots for it and for all that have begun. Whole blocks
    of `shared` first tokens, of the prompt before, are not computed again."""
    max_tokens, chunk = min(p.max_tokens for p in passes), min(p.chunk for p in passes)
    free, max_prompts = [p.num_free_blocks for p in passes], min(p.max_prompts for p in passes)
    unit = math.lcm(*(p.shared_block for p in passes))  # 0 where a pass shares none
    step: list[Span] = []
    taken = [0] * len(passes)  # blocks of the prompts in this step
    left = max_tokens
    for prompt, length in enumerate(lengths):
        whole = [prompts.num_blocks(length) for prompts in passes]
        start = begin = shared[prompt] // unit * unit if unit and shared else 0
        # The first prompt of a step holds what it shares alone.
        own = [n - prompts.num_blocks(start) for n, prompts in zip(whole, passes, strict=True)]
        while begin < length:
            needed = own if step else whole
            fits = begin > start or (
                all(h + n <= f for h, n, f in zip(taken, needed, free, strict=True))
                and len(step) < max_prompts
            )
            if left == 0 or not fits:
                assert step, "a prompt does not fit the free blocks"
                if begin == start > 0:
                    step[-1] = step[-1]._replace(is_kept=True)
                yield step
                step, left = [], max_tokens
                taken = [0] * len(passes) if begin == start else whole
                continue
            if begin == start:
                taken = [h + n for h, n in zip(taken, needed, strict=True)]
            end = min(length, begin + min(left, chunk))
            step.append(Span(prompt, begin, end))
            left -= end - begin
            begin = end
            if begin < length and step[-1].end - step[-1].begin == chunk:
                left = 0  # a prompt has one chunk in a step
    if step:
        yield step
