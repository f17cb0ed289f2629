"""Warm-up: steps of every kind before the first request, so that no kernel is compiled while serving.

A Triton kernel is compiled anew for each combination of its compile-time constants and argument types. Which
of them a step meets follows from how many tokens, sequences and sampled rows it has, up to powers of two, and
from the sampling parameters; the steps here meet each once.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from ..base.sampling_params import SamplingParams
from ..scheduling.block_pool import NULL_BLOCK
from ..scheduling.scheduler_config import SchedulerConfig
from ..scheduling.step_plan import ScheduledRow, StepPlan
from ..scheduling.token_view import TokenView
from .model_runner import ModelRunner

_log = logging.getLogger(__name__)
WRITTEN_BLOCK = NULL_BLOCK + 1
"""The block that all warm-up steps write: null blocks in a table are those that were evicted."""
QUIET_SECONDS = 3.0
"""A warm-up that takes longer says how far it is, at most this often."""


@dataclass(frozen=True, slots=True)
class _AllTokens:
    """A token mask that allows all tokens."""

    vocab_size: int

    def allowed(self, prompt: Sequence[int], output: Sequence[int]) -> torch.Tensor:
        return torch.ones(self.vocab_size, dtype=torch.bool)


def warm_up(runner: ModelRunner, limits: SchedulerConfig) -> int:
    """Run the steps, on the first block; returns how many. For an engine without requests."""
    plans = [
        *warm_up_plans(limits, runner.decoder.vocab_size, min(runner.eos_token_ids, default=0))
    ]
    said = begun = time.monotonic()
    for done, plan in enumerate(plans):
        runner.execute(plan)
        if (now := time.monotonic()) - said > QUIET_SECONDS:
            _log.info("warm-up: %d of %d steps in %.0f s", done + 1, len(plans), now - begun)
            said = now
    for cache in runner.caches:
        cache.warm_up()
        cache.zero_null_block()
    return len(plans)


def warm_up_plans(limits: SchedulerConfig, vocab_size: int, stop_id: int) -> Iterator[StepPlan]:
    """Prompts and batches of every power of two of tokens, a mixed step, and each kind of sampling."""
    plain, drawn = SamplingParams(), SamplingParams(temperature=1.0, top_k=5, top_p=0.9, min_p=0.01)
    for size in _powers_of_two(limits.max_num_seqs):
        yield StepPlan(tuple(_row(limits, f"{i}", 1, drawn) for i in range(size)))
    for size in _powers_of_two(limits.max_num_batched_tokens):
        yield StepPlan(tuple(_prompts(limits, size, plain)))
    # Below and above what counts as a short span, beside a decode; greedy and sampled rows.
    mixed = [_row(limits, f"{i}", count, plain) for i, count in enumerate((1, 5, 20))]
    if limits.max_num_seqs >= 3 and limits.max_num_batched_tokens >= 26:
        yield StepPlan(tuple(mixed))
    token_mask = _AllTokens(vocab_size)
    kinds = (
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=0.0, logprobs=1),
        SamplingParams(repetition_penalty=1.1, presence_penalty=0.1, frequency_penalty=0.1),
        SamplingParams(token_mask=token_mask, stop_token_ids=(stop_id,)),
        SamplingParams(logit_bias={0: 1.0}, min_tokens=2, logprobs=2),
        SamplingParams(prompt_logprobs=1),
    )
    for params in kinds:
        yield StepPlan((_row(limits, "0", 3, params),))
    if limits.drafting is not None:
        for params in (plain, kinds[0]):
            yield StepPlan((_row(limits, "0", 2, params, num_draft_tokens=2),))


def _powers_of_two(most: int) -> list[int]:
    """Those below `most`, and `most`."""
    return [*(1 << i for i in range((most - 1).bit_length())), most]


def _prompts(
    limits: SchedulerConfig, tokens: int, params: SamplingParams
) -> Iterator[ScheduledRow]:
    """Prompts of so many tokens, as few as the limits allow; what does not fit in them is left out."""
    longest = min(limits.chunk, limits.max_model_len)
    for index in range(limits.max_num_seqs):
        if (count := min(tokens, longest)) > 0:
            yield _row(limits, f"{index}", count, params)
        tokens -= count


def _row(
    limits: SchedulerConfig,
    name: str,
    count: int,
    params: SamplingParams,
    num_draft_tokens: int = 0,
) -> ScheduledRow:
    count = min(count, limits.max_model_len)
    return ScheduledRow(
        sequence_id=f"warm-up/{name}",
        start=0,
        end=count,
        tokens=TokenView([0] * count),
        block_ids=(WRITTEN_BLOCK,) * limits.num_blocks(count + num_draft_tokens),
        num_samples=1,
        num_prompt_tokens=count,
        params=params,
        seed=0,
        num_draft_tokens=num_draft_tokens,
    )
