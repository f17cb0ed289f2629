"""Dispatch of mixture-of-experts kernels: grouped GEMM, or a loop over experts.

On CPU one call of the C kernel in `experts.c`, bound by ctypes, computes all experts.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ....base.build import beside, fields
from ..common.devices import package, refuses_native, refuses_rows, serves_all
from ..common.dispatch import Candidate, Operation, lazily
from ..common.graphs import launch
from ..elementwise.native_rows import CHANNELS, NativeGate
from ..linear.library_linear import NAME as DEEP_GEMM
from ..linear.library_linear import refuses_dtype
from ..linear.native_linear import CallStruct, PackedLinear, packed_of
from .experts import (
    Expert,
    ExpertLinear,
    ExpertsKernel,
    LoopedExperts,
    Route,
    RoutedExpert,
    RouterLogits,
    route_torch,
    router_logits_torch,
    router_logits_trial,
    routing_trial,
)


class _Linear(ctypes.Structure):
    """`ExpertLinear` of `experts.c`."""

    _fields_ = [
        *fields("weights biases"),
        ("like", CallStruct),
    ]


class _Call(ctypes.Structure):
    """`ExpertsCall` of `experts.c`."""

    _fields_ = [
        *[(name, _Linear) for name in ("gate_up", "down")],
        *fields(
            "x routing_weights ids out",
            "tokens top_k first count on_inputs is_bf16 activation threads",
        ),
    ]


native_experts = beside(__file__, "experts.c")
"""The compiled kernel, or the reason why there is none."""


class _Stack:
    """The same linear of every expert: arrays of their weights and biases."""

    def __init__(self, linears: Sequence[PackedLinear]) -> None:
        self.linears = list(linears)
        self.in_features = linears[0].weight_struct.in_features
        pointers = ctypes.c_void_p * len(linears)
        self._weights = pointers(*(ctypes.addressof(each.weight_struct) for each in linears))
        biases = [each.bias for each in linears if each.bias is not None]
        self._biases = pointers(*(bias.data_ptr() for bias in biases)) if biases else None

    def struct(self, x: torch.Tensor) -> _Linear:
        """The C struct of a call with inputs like `x`."""
        like = self.linears[0].call_like(x)
        biases = None if self._biases is None else ctypes.addressof(self._biases)
        return _Linear(ctypes.addressof(self._weights), biases, like)


class NativeExperts:
    """Experts in one C call: tokens sorted by expert, two grouped GEMMs and the gate between them.

    The results are those of the loop over experts, bit for bit, and batch-invariant as they are.
    """

    is_capturable = True

    def __init__(
        self, gate_up: _Stack, down: _Stack, activation: int, first: int, on_inputs: bool
    ) -> None:
        self._run = native_experts().function("llmopt_experts")
        self._gate_up, self._down = gate_up, down
        self._activation, self._first, self._on_inputs = activation, first, on_inputs
        linears = (*gate_up.linears, *down.linears)
        self.weight_bytes = sum(linear.weight_bytes for linear in linears)

    def __call__(
        self,
        x: torch.Tensor,
        weights: torch.Tensor,
        experts: torch.Tensor,
        added: torch.Tensor | None = None,
    ) -> torch.Tensor:
        tokens, top_k = experts.shape
        weights, experts = weights.to(x.dtype).contiguous(), experts.contiguous()
        out = x.new_empty(x.shape)
        if self._on_inputs:
            x = (x[:, None, :] * weights[:, :, None]).flatten(0, 1)
        x = x.contiguous()
        call = _Call(
            self._gate_up.struct(x),
            self._down.struct(x),
            x.data_ptr(),
            weights.data_ptr(),
            experts.data_ptr(),
            out.data_ptr(),
            tokens,
            top_k,
            self._first,
            len(self._gate_up.linears),
            self._on_inputs,
            x.dtype is torch.bfloat16,
            self._activation,
            torch.get_num_threads(),
        )
        if tokens and launch(self._run, call):
            raise MemoryError(f"no memory for the experts of {tokens} tokens")
        return out if added is None else out + added


def group_native(
    experts: Sequence[Expert], ids: range, count: int, on_inputs: bool
) -> NativeExperts | None:
    """The experts `ids` in one call; None: they differ too much, or have weights that are not packed."""
    combine = experts[0].combine
    gate_up = _stacked([expert.gate_up for expert in experts])
    down = _stacked([expert.down for expert in experts])
    if not isinstance(combine, NativeGate) or gate_up is None or down is None:
        return None
    if gate_up.in_features % CHANNELS:
        return None
    return NativeExperts(gate_up, down, combine.activation, ids.start, on_inputs)


def _stacked(linears: Sequence[ExpertLinear]) -> _Stack | None:
    packed = [packed_of(linear.kernel) for linear in linears if linear.bias is None]
    alike = [linear for linear in packed if linear is not None]
    if len(alike) < len(linears) or len({linear.grouping for linear in alike}) > 1:
        return None
    return _Stack(alike)


LOOP = "loop"
"""The candidate that computes experts one after the other."""


@dataclass(frozen=True, slots=True)
class ExpertsKernelQuery:
    """Kernel query of the experts: device and dtype; `is_gated`: they are gated MLPs; `is_block_fp8`: their
    linears are DeepGEMM's."""

    device: str
    dtype: torch.dtype
    is_gated: bool = True
    is_block_fp8: bool = False

    def __str__(self) -> str:
        kind = " of block FP8" if self.is_block_fp8 else "" if self.is_gated else " without gates"
        return f"experts{kind} in {self.dtype} on {self.device}"


@dataclass(frozen=True, slots=True)
class RoutingKernelQuery:
    """Kernel query of the top-k routing: device, and number of experts."""

    device: str
    count: int
    dtype = torch.float32

    def __str__(self) -> str:
        return f"{self.count} experts on {self.device}"


ROUTING: Operation[RoutingKernelQuery, Route] = Operation(
    "routing",
    [
        Candidate("triton", refuses_rows, lazily("moe.triton_routing", "route_triton")),
        Candidate("torch", serves_all, route_torch),
    ],
    lambda query: routing_trial(query.device, query.count),
)


ROUTER_LOGITS: Operation[RoutingKernelQuery, RouterLogits] = Operation(
    "router logits",
    [
        Candidate("triton", refuses_rows, lazily("moe.triton_routing", "router_logits")),
        Candidate("torch", serves_all, router_logits_torch),
    ],
    lambda query: router_logits_trial(query.device, query.count),
)


def _refuses_native(kernel_query: ExpertsKernelQuery) -> str | None:
    if (reason := refuses_native(kernel_query, native_experts)) is not None:
        return reason
    return None if kernel_query.is_gated else "it takes gated MLPs"


MakeExperts = Callable[[Sequence[RoutedExpert], range, int, bool], ExpertsKernel]


def _grouped_by(group: Callable[..., ExpertsKernel | None], otherwise: MakeExperts) -> MakeExperts:
    """Group experts by a kernel, or make them by another where they differ too much for it."""

    def make(
        experts: Sequence[RoutedExpert], expert_ids: range, count: int, on_inputs: bool
    ) -> ExpertsKernel:
        grouped = group(experts, expert_ids, count, on_inputs)
        return otherwise(experts, expert_ids, count, on_inputs) if grouped is None else grouped

    return make


def _refuses_deep_gemm(kernel_query: ExpertsKernelQuery) -> str | None:
    # Permutation, gate and sum are those of the Triton kernels.
    if (reason := refuses_rows(kernel_query)) is not None:
        return reason
    if (reason := refuses_dtype(kernel_query.device, kernel_query.dtype)) is not None:
        return reason
    return (
        package(DEEP_GEMM).reason if kernel_query.is_block_fp8 else "it is for experts in block FP8"
    )


_grouped = _grouped_by(lazily("moe.triton_experts", "group"), LoopedExperts)
_deep_gemm = _grouped_by(lazily("moe.triton_experts", "group_deep_gemm"), _grouped)

EXPERTS: Operation[ExpertsKernelQuery, MakeExperts] = Operation(
    "experts",
    [
        Candidate("deep-gemm-grouped", _refuses_deep_gemm, _deep_gemm),
        Candidate("triton-grouped", refuses_rows, _grouped),
        Candidate("native-grouped", _refuses_native, _grouped_by(group_native, LoopedExperts)),
        Candidate(LOOP, serves_all, LoopedExperts),
    ],
)
