"""Steps before the first request: a profile run that sizes the KV cache, a warm-up that compiles kernels.

A Triton kernel is compiled for each combination of constants and argument types, which follow from how many
tokens, sequences and samples a step has, up to powers of two. The warm-up meets each once.
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from ...base.errors import DoesNotFit
from ..base.host import available_memory_bytes
from ..base.sampling_params import SamplingParams
from ..base.units import format_gib
from ..scheduling.block_pool import NULL_BLOCK
from ..scheduling.request import TokenView
from ..scheduling.scheduler_config import SchedulerConfig
from ..scheduling.step_plan import ScheduledRow, StepPlan
from .model_runner import ModelRunner

_log = logging.getLogger(__name__)

PROFILE_BLOCKS = 2
"""KV blocks of the profile run: the null block, and `WRITTEN_BLOCK`."""


class CudaMemory:
    """Memory of a CUDA device, as the driver and torch's allocator count it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def free_and_total(self) -> tuple[int, int]:
        return torch.cuda.mem_get_info(self._device)

    def peak_of(self, work: Callable[[], object]) -> int:
        """Reserved memory, including the allocator's cache: it is not free for the KV cache either."""
        self._give_back()
        torch.cuda.reset_peak_memory_stats(self._device)
        before = torch.cuda.memory_reserved(self._device)
        work()
        torch.cuda.synchronize(self._device)
        peak = torch.cuda.max_memory_reserved(self._device)
        self._give_back()
        return peak - before

    def _give_back(self) -> None:
        gc.collect()
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()


class MpsMemory:
    """Memory of an Apple GPU, as Metal recommends; torch counts no peak, nor does freed memory return."""

    def free_and_total(self) -> tuple[int, int]:
        total = torch.mps.recommended_max_memory()
        return max(0, total - torch.mps.driver_allocated_memory()), total

    def peak_of(self, work: Callable[[], object]) -> int:
        gc.collect()
        torch.mps.empty_cache()
        before = torch.mps.driver_allocated_memory()
        work()
        torch.mps.synchronize()
        peak = torch.mps.driver_allocated_memory()
        torch.mps.empty_cache()
        return max(0, peak - before)


def memory_of(device: torch.device) -> CudaMemory | MpsMemory | None:
    """Memory of a GPU in bytes; None for a CPU, whose memory other processes share."""
    if device.type == "mps":
        return MpsMemory()
    return CudaMemory(device) if device.type == "cuda" else None


def profile_run(runner: ModelRunner, limits: SchedulerConfig) -> None:
    """Run the largest steps, which size the KV cache; all write the same block, of meaningless values. The
    first has `max_num_batched_tokens` and `max_num_seqs`, a sample each, and all prompt logprobs. The second
    has as many sequences, at the end of their context, with draft tokens."""
    share, rest = divmod(limits.max_num_batched_tokens, limits.max_num_seqs)
    longest = min(limits.chunk, limits.max_model_len)
    lengths = [min(longest, share + (index < rest)) for index in range(limits.max_num_seqs)]
    runner.execute(_largest_step(limits, [range(length) for length in lengths], scored=True))
    most = 1 if limits.drafting is None else 1 + limits.drafting.longest * limits.drafting.width
    drafted = min(most, longest, max(1, share))
    # With a window the context may be endless: a sequence holds a part of it at once.
    most_held = limits.max_blocks(limits.max_model_len) * limits.block_size
    end = min(limits.max_model_len, most_held)
    runner.execute(_largest_step(limits, [range(end - drafted, end)] * limits.max_num_seqs))


def _largest_step(
    limits: SchedulerConfig, spans: Sequence[range], *, scored: bool = False
) -> StepPlan:
    """Step that computes these tokens of a sequence each."""
    params = SamplingParams(
        temperature=1.0, top_k=50, top_p=0.9, prompt_logprobs=1 if scored else None
    )
    tokens = [0] * max(span.stop for span in spans)
    rows = (_row(limits, i, span, params, tokens=tokens) for i, span in enumerate(spans))
    return StepPlan(tuple(rows))


@contextmanager
def explaining_out_of_memory(what: str, device: torch.device) -> Iterator[None]:
    """Convert an out-of-memory error into DoesNotFit of `what`, with the sizes."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        memory = memory_of(device)
        free, total = (available_memory_bytes(),) * 2 if memory is None else memory.free_and_total()
        raise DoesNotFit(
            f"{what} does not fit on {device}: {format_gib(free)} of its {format_gib(total)} is free now; "
            "take a smaller or quantized model, lower max_num_batched_tokens, or share the model between "
            "devices (tensor_parallel_size)"
        ) from error


WRITTEN_BLOCK = NULL_BLOCK + 1
"""The block that all these steps write: null blocks in a table are those that were evicted."""
QUIET_SECONDS = 3.0
"""A longer warm-up logs its progress, at most this often."""


@dataclass(frozen=True, slots=True)
class _AllTokens:
    vocab_size: int

    def allowed(self, prompt: Sequence[int], output: Sequence[int]) -> torch.Tensor:
        return torch.ones(self.vocab_size, dtype=torch.bool)


def warm_up(runner: ModelRunner, limits: SchedulerConfig) -> int:
    """Run the steps, on the first block; returns how many. For an engine without requests."""
    plans = [
        *warm_up_plans(limits, runner.decoder.vocab_size, min(runner.eos_token_ids, default=0))
    ]
    logged = begun = time.monotonic()
    for done, plan in enumerate(plans):
        runner.execute(plan)
        if (now := time.monotonic()) - logged > QUIET_SECONDS:
            _log.info("warm-up: %d of %d steps in %.0f s", done + 1, len(plans), now - begun)
            logged = now
    for cache in runner.caches:
        cache.warm_up()
        cache.zero(NULL_BLOCK + 1)  # table padding reads it, with weight 0
    return len(plans)


def warm_up_plans(limits: SchedulerConfig, vocab_size: int, stop_id: int) -> Iterator[StepPlan]:
    """Prompts and batches of every power of two of tokens, a mixed step, and each kind of sampling."""
    plain, drawn = SamplingParams(), SamplingParams(temperature=1.0, top_k=5, top_p=0.9, min_p=0.01)
    seqs, tokens = limits.max_num_seqs, limits.max_num_batched_tokens
    for size in (*(1 << i for i in range((seqs - 1).bit_length())), seqs):
        yield StepPlan(tuple(_row(limits, i, range(1), drawn) for i in range(size)))
    longest = min(limits.chunk, limits.max_model_len)
    for size in (*(1 << i for i in range((tokens - 1).bit_length())), tokens):
        # As few prompts as the limits allow; surplus tokens are left out.
        lengths = [min(size - begin, longest) for begin in range(0, size, longest)][:seqs]
        yield StepPlan(tuple(_row(limits, i, range(n), plain) for i, n in enumerate(lengths)))
    # Shorter and longer than a short span, with a decode.
    mixed = [_row(limits, i, range(count), plain) for i, count in enumerate((1, 5, 20))]
    if seqs >= 3 and tokens >= 26:
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
        yield StepPlan((_row(limits, 0, range(3), params),))
    if limits.drafting is not None:
        for params in (plain, kinds[0]):
            yield StepPlan((_row(limits, 0, range(2), params, num_draft_tokens=2),))


def _row(
    limits: SchedulerConfig,
    index: int,
    span: range,
    params: SamplingParams,
    num_draft_tokens: int = 0,
    tokens: Sequence[int] = (),
) -> ScheduledRow:
    """Row of the tokens `span` of a prompt, within the context; every row writes the same block."""
    end = min(span.stop, limits.max_model_len)
    return ScheduledRow(
        sequence_id=f"start-up/{index}",
        start=span.start,
        end=end,
        tokens=TokenView(tokens or [0] * end, end),
        block_ids=(WRITTEN_BLOCK,) * limits.num_blocks(end + num_draft_tokens),
        num_samples=1,
        num_prompt_tokens=end,
        params=params,
        seed=0,
        num_draft_tokens=num_draft_tokens,
    )
