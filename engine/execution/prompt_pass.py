"""Prompt passes: batched prefill of whole prompts outside the scheduler, for scoring and embeddings.

The prompts share steps, without prefix cache and without sampling: a step returns hidden states, and logits
are computed for slices of them, so that memory is independent of vocabulary and number of tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Self

import torch

from ...quant.base.errors import BadInput
from ..cache.step_inputs import Run
from ..scheduling.block_pool import BlockPool, evict_blocks
from ..scheduling.request import NULL_SLOT
from ..scheduling.scheduler_config import SchedulerConfig
from ..scheduling.state_pool import StatePool
from .model_runner import ModelRunner


class Span(NamedTuple):
    """Tokens `begin` to `end` of the prompt of that index."""

    prompt: int
    begin: int
    end: int


class PromptPass:
    """Prefill of prompts on one engine, in order; a context manager that frees the KV blocks.

    Args:
        lora: adapter of all prompts.
    """

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
        self._tables: dict[int, tuple[list[int], range]] = {}
        self._slots: dict[int, int] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for prompt in list(self._tables):
            self._free(prompt)

    @property
    def vocab_size(self) -> int:
        return self._runner.decoder.vocab_size

    @property
    def max_tokens(self) -> int:
        """Tokens per step."""
        return self._config.max_num_batched_tokens

    @property
    def chunk(self) -> int:
        """Tokens of one prompt per step."""
        return self._config.chunk

    @property
    def max_model_len(self) -> int:
        """Tokens per prompt."""
        return self._config.max_model_len

    @property
    def max_prompts(self) -> int:
        """Prompts that can have begun and not ended at once."""
        return self._states.num_free if self._states.num_slots else self.max_tokens

    @property
    def num_free_blocks(self) -> int:
        return self._pool.num_free

    @property
    def num_free_tokens(self) -> int:
        return self._pool.num_free * self._config.block_size

    def num_blocks(self, num_tokens: int) -> int:
        """Most KV blocks that a prompt of that length holds at once."""
        return self._config.max_blocks(num_tokens)

    def check_fits(self, num_tokens: int) -> None:
        """Raise where a prompt of that length does not fit.

        Raises:
            BadInput: more tokens than fit in the context or in the free blocks.
        """
        if num_tokens > self.max_model_len or self.num_blocks(num_tokens) > self.num_free_blocks:
            raise BadInput(
                f"{num_tokens} tokens to score exceed the context of {self.max_model_len} tokens "
                f"or the {self.num_free_tokens} free tokens of the KV cache"
            )

    def hidden(self, spans: Sequence[Span], prompts: Sequence[Sequence[int]]) -> torch.Tensor:
        """Run a step; returns the final normed hidden states of its tokens, [tokens, hidden].

        The spans of a prompt come in order; with its last token a prompt's blocks are freed.
        """
        config, runs = self._config, []
        for prompt, begin, end in spans:
            table, _ = self._tables.setdefault(prompt, ([], range(0)))
            table += self._pool.allocate(config.num_blocks(end) - len(table))
            if prompt not in self._slots:
                self._slots[prompt] = self._states.allocate()
            slot = self._slots[prompt]
            runs.append(Run(begin, prompts[prompt][begin:end], table, state_slot=slot))
        hidden = self._runner.hidden(runs, self._lora)
        for prompt, _, end in spans:
            table, evicted = self._tables[prompt]
            if end == len(prompts[prompt]):
                self._free(prompt)
                continue
            now = config.evicted(end)
            self._pool.free(evict_blocks(table, evicted, now))
            self._tables[prompt] = table, now
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits, float32 [rows, vocab], of rows of `hidden`."""
        return self._runner.decoder.logits(hidden)

    def _free(self, prompt: int) -> None:
        table, evicted = self._tables.pop(prompt)
        self._pool.free([*table[: evicted.start], *table[evicted.stop :]])
        self._states.free(self._slots.pop(prompt, NULL_SLOT))


def plan_steps(lengths: Sequence[int], passes: Sequence[PromptPass]) -> Iterator[list[Span]]:
    """Steps over all prompts in order, with as many tokens in each as every one of `passes` takes.

    A prompt begins where the KV blocks and state slots of all that have begun and of it are free in every
    pass. The prompts fit one by one (`PromptPass.check_fits`).
    """
    max_tokens = min(each.max_tokens for each in passes)
    chunk = min(each.chunk for each in passes)
    free = [each.num_free_blocks for each in passes]
    max_prompts = min(each.max_prompts for each in passes)
    step: list[Span] = []
    held = [0] * len(passes)  # blocks of the prompts in this step
    left = max_tokens
    for prompt, length in enumerate(lengths):
        needed = [each.num_blocks(length) for each in passes]
        begin = 0
        while begin < length:
            fits = begin > 0 or (
                all(h + n <= f for h, n, f in zip(held, needed, free, strict=True))
                and len(step) < max_prompts
            )
            if left == 0 or not fits:
                assert step, "a prompt does not fit the free blocks"
                yield step
                step, left = [], max_tokens
                held = [0] * len(passes) if begin == 0 else needed
                continue
            if begin == 0:
                held = [h + n for h, n in zip(held, needed, strict=True)]
            end = min(length, begin + min(left, chunk))
            step.append(Span(prompt, begin, end))
            left -= end - begin
            begin = end
            if begin < length and step[-1].end - step[-1].begin == chunk:
                left = 0  # a prompt has one chunk in a step
    if step:
        yield step
