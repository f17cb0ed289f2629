"""Memory profiling: the KV-cache budget that a profile run of the largest step leaves on a device."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch

from ...quant.base.errors import BadInput
from ..base.host import available_memory_bytes
from ..base.sampling_params import SamplingParams
from ..base.units import format_gib
from ..planner.memory.cache_size import DEFAULT_UTILIZATION, KvCacheBudget
from ..scheduling.scheduler_config import SchedulerConfig
from ..scheduling.step_plan import ScheduledRow, StepPlan
from ..scheduling.token_view import TokenView
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
    """None for a CPU, whose memory other processes share."""
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
        BadInput: `what` does not fit.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        memory = memory_of(device)
        free, total = (available_memory_bytes(),) * 2 if memory is None else memory.free_and_total()
        raise BadInput(
            f"{what} does not fit on {device}: {format_gib(free)} of its {format_gib(total)} is free now; "
            "take a smaller or quantized model, lower max_num_batched_tokens, or share the model between "
            "devices (tensor_parallel_size)"
        ) from error
