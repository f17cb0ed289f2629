"""Dispatch of mixture-of-experts kernels: grouped GEMM, or a loop over experts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

import torch

from ..common.dispatch import Candidate, Operation
from ..common.runtime import refuses_rows
from .experts import Expert, ExpertsKernel, LoopedExperts, RoutedExpert


@dataclass(frozen=True, slots=True)
class ExpertsKernelQuery:
    """Kernel query of the experts: device and dtype; `is_whole`: all of the model's experts are local;
    `is_gated`: they are gated MLPs."""

    device: str
    dtype: torch.dtype
    is_whole: bool = True
    is_gated: bool = True

    def __str__(self) -> str:
        which = "all experts" if self.is_whole else "some of the experts"
        return f"{which} in {self.dtype} on {self.device}"


def _refuses_grouped(kernel_query: ExpertsKernelQuery) -> str | None:
    if not kernel_query.is_whole:
        return "it needs all experts in one process"
    if not kernel_query.is_gated:
        return "it takes gated MLPs"
    return refuses_rows(kernel_query.device, kernel_query.dtype)


def _grouped(
    experts: Sequence[RoutedExpert], expert_ids: range, count: int, on_inputs: bool
) -> ExpertsKernel:
    from .triton_experts import group

    # They are gated: it refuses a query of others.
    grouped = group(cast("Sequence[Expert]", experts), on_inputs)
    return LoopedExperts(experts, expert_ids, count, on_inputs) if grouped is None else grouped


EXPERTS: Operation[
    ExpertsKernelQuery, Callable[[Sequence[RoutedExpert], range, int, bool], ExpertsKernel]
] = Operation(
    "experts",
    [
        Candidate("triton-grouped", _refuses_grouped, _grouped),
        Candidate("loop", lambda kernel_query: None, LoopedExperts),
    ],
)
