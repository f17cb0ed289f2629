"""Dispatch of mixture-of-experts kernels: grouped GEMM, or a loop over experts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

import torch

from ..common.devices import package, refuses_native, refuses_rows, serves_all
from ..common.dispatch import Candidate, Operation
from ..linear.library_linear import NAME as DEEP_GEMM
from ..linear.library_linear import refuses_dtype
from .experts import (
    Expert,
    ExpertsKernel,
    LoopedExperts,
    Route,
    RoutedExpert,
    RouterLogits,
    RoutingRule,
    route_torch,
    router_logits_torch,
)
from .native_experts import group_native, native_experts

LOOP = "loop"
"""The candidate that computes experts one after the other."""


@dataclass(frozen=True, slots=True)
class ExpertsKernelQuery:
    """Kernel query of the experts: device and dtype; `is_whole`: all of the model's experts are local;
    `is_gated`: they are gated MLPs; `is_block_fp8`: their linears are DeepGEMM's."""

    device: str
    dtype: torch.dtype
    is_whole: bool = True
    is_gated: bool = True
    is_block_fp8: bool = False

    def __str__(self) -> str:
        which = "all experts" if self.is_whole else "some of the experts"
        kind = " of block FP8" if self.is_block_fp8 else ""
        return f"{which}{kind} in {self.dtype} on {self.device}"


@dataclass(frozen=True, slots=True)
class RoutingKernelQuery:
    """Kernel query of the top-k routing: device, and number of experts."""

    device: str
    count: int
    dtype = torch.float32

    def __str__(self) -> str:
        return f"{self.count} experts on {self.device}"


def _route_triton(
    logits: torch.Tensor,
    rule: RoutingRule,
    correction: torch.Tensor | None = None,
    expert_scale: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`route_triton`; Triton is imported by the first call."""
    from .triton_routing import route_triton

    return route_triton(logits, rule, correction, expert_scale)


ROUTING: Operation[RoutingKernelQuery, Route] = Operation(
    "routing",
    [
        Candidate("triton", refuses_rows, _route_triton),
        Candidate("torch", serves_all, route_torch),
    ],
)


def _router_logits_triton(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """`router_logits`; Triton is imported by the first call."""
    from .triton_routing import router_logits

    return router_logits(x, weight, bias)


ROUTER_LOGITS: Operation[RoutingKernelQuery, RouterLogits] = Operation(
    "router logits",
    [
        Candidate("triton", refuses_rows, _router_logits_triton),
        Candidate("torch", serves_all, router_logits_torch),
    ],
)


def _refuses_grouped(kernel_query: ExpertsKernelQuery) -> str | None:
    if not kernel_query.is_whole:
        return "it needs all experts in one process"
    if not kernel_query.is_gated:
        return "it takes gated MLPs"
    return refuses_rows(kernel_query)


def _refuses_native(kernel_query: ExpertsKernelQuery) -> str | None:
    if (reason := refuses_native(kernel_query, native_experts)) is not None:
        return reason
    return None if kernel_query.is_gated else "it takes gated MLPs"


def _native(
    experts: Sequence[RoutedExpert], expert_ids: range, count: int, on_inputs: bool
) -> ExpertsKernel:
    # They are gated: it refuses a query of others.
    grouped = group_native(cast("Sequence[Expert]", experts), expert_ids.start, on_inputs)
    return LoopedExperts(experts, expert_ids, count, on_inputs) if grouped is None else grouped


def _refuses_deep_gemm(kernel_query: ExpertsKernelQuery) -> str | None:
    # Permutation, gate and sum are those of the Triton kernels.
    if (reason := _refuses_grouped(kernel_query)) is not None:
        return reason
    if (reason := refuses_dtype(kernel_query.device, kernel_query.dtype)) is not None:
        return reason
    return (
        package(DEEP_GEMM).reason if kernel_query.is_block_fp8 else "it is for experts in block FP8"
    )


def _deep_gemm(
    experts: Sequence[RoutedExpert], expert_ids: range, count: int, on_inputs: bool
) -> ExpertsKernel:
    from .triton_experts import group_deep_gemm

    grouped = group_deep_gemm(cast("Sequence[Expert]", experts), on_inputs)
    return _grouped(experts, expert_ids, count, on_inputs) if grouped is None else grouped


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
        Candidate("deep-gemm-grouped", _refuses_deep_gemm, _deep_gemm),
        Candidate("triton-grouped", _refuses_grouped, _grouped),
        Candidate("native-grouped", _refuses_native, _native),
        Candidate(LOOP, serves_all, LoopedExperts),
    ],
)
