"""Steps before the first request: a profile run that sizes the KV cache, a warm-up that compiles kernels.

A Triton kernel is compiled anew for each combination of its compile-time constants and argument types.
Which of them a step meets follows from how many tokens, sequences and sampled rows it has, up to powers of
two, and from the sampling parameters; the warm-up's steps meet each once.
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch

from ...base.errors import BadInput, DoesNotFit
from ..base.host import available_memory_bytes
from ..base.sampling_params import SamplingParams
from ..base.units import format_gib
from ..planner.cache_size import DEFAULT_UTILIZATION, KvCacheBudget
from ..scheduling.block_pool import NULL_BLOCK
from ..scheduling.request import TokenView
from ..scheduling.scheduler_config import SchedulerConfig
from ..scheduling.step_plan import ScheduledRow, StepPlan
from .model_runner import ModelRunner

PROFILE_BLOCKS = 2
"""KV blocks of the profile run: the null block, and one that every sequence writes."""


class DeviceMemory(Protocol):
    """Memory statistics of a device, in bytes."""

    def free_and_total(self) -> tuple[int, int]:
        """Free and total memory, of all processes."""
        ...

    def peak_of(self, work: Callable[[], object]) -> int:
        """Peak memory of `work`, beyond what was allocated before."""
        ...


class CudaMemory:
    """The memory of a CUDA device, as the driver and torch's allocator count it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def free_and_total(self) -> tuple[int, int]:
        return torch.cuda.mem_get_info(self._device)

    def peak_of(self, work: Callable[[], object]) -> int:
        """Reserved memory, what the allocator caches included: it is not free for the KV cache either."""
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
    """The memory of an Apple GPU: the share of the machine's that Metal recommends.

    torch counts no peak there. Its allocator keeps what it has freed, so the driver's bytes do not fall.
    """

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


def memory_of(device: torch.device) -> DeviceMemory | None:
    """The memory of a GPU; None for a CPU, whose memory other processes share."""
    if device.type == "mps":
        return MpsMemory()
    return CudaMemory(device) if device.type == "cuda" else None


def profile_kv_cache_budget(
    memory: DeviceMemory | None,
    utilization: float | None,
    weight_bytes: int,
    profile_step: Callable[[], object],
    num_processes: int,
) -> KvCacheBudget:
    """The KV-cache budget of one of `num_processes`, which share a host, or have a device each.

    Raises:
        BadInput: a utilization for a device other than a GPU.
    """
    if memory is None:
        if utilization is not None:
            raise BadInput(
                f"gpu_memory_utilization = {utilization} is for CUDA: on a CPU give the size of the KV cache"
            )
        return KvCacheBudget.on_cpu(available_memory_bytes() // num_processes)
    activations = memory.peak_of(profile_step)
    free, total = memory.free_and_total()
    share = DEFAULT_UTILIZATION if utilization is None else utilization
    other_processes = max(0, total - free - weight_bytes)
    return KvCacheBudget.on_cuda(total, share, weight_bytes, activations, other_processes)


def profile_run(runner: ModelRunner, limits: SchedulerConfig) -> None:
    """Run the largest steps: of `max_num_batched_tokens` and `max_num_seqs`, with a sampled token each
    and logprobs of all prompt tokens; and of as many sequences at the end of their context, with their draft
    tokens, whose keys are split over programs.

    All sequences write the same block of a cache of `PROFILE_BLOCKS`: the values are meaningless.
    """
    share, rest = divmod(limits.max_num_batched_tokens, limits.max_num_seqs)
    longest = min(limits.chunk, limits.max_model_len)
    lengths = [min(longest, share + (index < rest)) for index in range(limits.max_num_seqs)]
    runner.execute(_largest_step(limits, [range(length) for length in lengths], scored=True))
    most = 1 if limits.drafting is None else 1 + limits.drafting.longest * limits.drafting.width
    drafted = min(most, longest, max(1, share))
    # Behind a window the context may be endless: what a sequence holds of it at once.
    held = limits.max_blocks(limits.max_model_len) * limits.block_size
    end = min(limits.max_model_len, held)
    runner.execute(_largest_step(limits, [range(end - drafted, end)] * limits.max_num_seqs))


def _largest_step(
    limits: SchedulerConfig, spans: Sequence[range], *, scored: bool = False
) -> StepPlan:
    """A step that computes these tokens of a sequence each."""
    params = SamplingParams(
        temperature=1.0, top_k=50, top_p=0.9, prompt_logprobs=1 if scored else None
    )
    tokens = [0] * max(span.stop for span in spans)
    rows = tuple(
        ScheduledRow(
            sequence_id=f"largest-step/{index}",
            start=span.start,
            end=span.stop,
            tokens=TokenView(tokens, span.stop),
            block_ids=(PROFILE_BLOCKS - 1,) * limits.num_blocks(span.stop),
            num_samples=1,
            num_prompt_tokens=span.stop,
            params=params,
            seed=index,
        )
        for index, span in enumerate(spans)
    )
    return StepPlan(rows)


@contextmanager
def explaining_out_of_memory(what: str, device: torch.device) -> Iterator[None]:
    """Converts an out-of-memory error into a message with the sizes.

    Raises:
        DoesNotFit: `what` does not fit.
    """
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
