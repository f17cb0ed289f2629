"""Mixture of experts: interfaces, references in torch, trials, and dispatch of their kernels.

The reference routes from router logits and loops over experts. On a CPU one call of the C kernel in
`experts.c` computes all experts. The kernels are tried on the experts themselves, with random routing.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch.nn import functional

from ....base.build import beside, fields
from ..common.devices import refuses_native, refuses_rows, serves_all
from ..common.dispatch import Candidate, Operation, lazily
from ..common.graphs import addresses, launch, struct
from ..common.verdicts import RandomInputs, Trial, tolerance
from ..elementwise.native_rows import CHANNELS, NativeGate
from ..linear.library_linear import lacks_deep_gemm, refuses_dtype
from ..linear.linear import LinearKernel
from ..linear.native_linear import CallStruct, PackedLinear, packed_of


@dataclass(frozen=True, slots=True)
class RoutingRule:
    """How experts are selected and weighed.

    Attributes:
        softmax: scores over all experts; else the sigmoid of each logit.
        normalize: the weights are divided by their sum plus `least_sum`.
        scale: factor on the weights after that.
        num_groups, topk_groups: experts are selected from the best `topk_groups` of `num_groups` groups; a
            group's score is the sum of its `group_top_k` best.
        num_shared: experts after the routed ones that every token is given too, with weight 1.
    """

    top_k: int
    softmax: bool = True
    normalize: bool = True
    least_sum: float = 0.0
    scale: float = 1.0
    num_groups: int = 1
    topk_groups: int = 1
    group_top_k: int = 1
    num_shared: int = 0


Route = Callable[
    [torch.Tensor, RoutingRule, torch.Tensor | None, torch.Tensor | None],
    tuple[torch.Tensor, torch.Tensor],
]
"""Logits float32 [tokens, experts], rule, score correction and expert scale, float32 [experts], → weights and
int64 ids, [tokens, top_k + num_shared]."""

RouterLogits = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]
"""Rows [tokens, hidden], a float32 weight [experts, hidden] and bias [experts] → float32 logits."""


def router_logits_torch(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    return functional.linear(x.float(), weight, bias)


def route_torch(
    logits: torch.Tensor,
    rule: RoutingRule,
    correction: torch.Tensor | None = None,
    expert_scale: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    scores = logits.softmax(dim=-1) if rule.softmax else logits.sigmoid()
    selection_scores = scores if correction is None else scores + correction
    if rule.num_groups > 1:
        grouped = selection_scores.unflatten(1, (rule.num_groups, -1))
        best = grouped.topk(rule.group_top_k, dim=-1).values.sum(dim=-1)
        is_top = torch.zeros_like(best, dtype=torch.bool)
        is_top.scatter_(1, best.topk(rule.topk_groups, dim=-1).indices, True)
        selection_scores = grouped.masked_fill(~is_top[..., None], float("-inf")).flatten(1)
    experts = selection_scores.topk(rule.top_k, dim=-1).indices
    weights = scores.gather(1, experts)
    if rule.normalize:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + rule.least_sum)
    if expert_scale is not None:
        weights = weights * expert_scale[experts]
    weights = weights * rule.scale
    if not rule.num_shared:
        return weights, experts
    shared = torch.arange(logits.shape[1], logits.shape[1] + rule.num_shared, device=logits.device)
    shared = shared.expand(len(logits), -1)
    ones = weights.new_ones(shared.shape)
    return torch.cat([weights, ones], dim=1), torch.cat([experts, shared], dim=1)


class ExpertLinear(Protocol):
    """A linear of an expert: its GEMM kernel, None if it has several, and its bias `[out]`, if any."""

    @property
    def kernel(self) -> LinearKernel | None: ...

    @property
    def bias(self) -> torch.Tensor | None: ...

    @property
    def weight_bytes(self) -> int: ...


class RoutedExpert(Protocol):
    """An MLP, gated or not."""

    @property
    def weight_bytes(self) -> int: ...

    def __call__(self, x: torch.Tensor) -> torch.Tensor: ...


class PlainExpert(RoutedExpert, Protocol):
    """An MLP without a gate: `down(activation(up))`."""

    @property
    def up(self) -> ExpertLinear: ...

    @property
    def down(self) -> ExpertLinear: ...

    @property
    def activation(self) -> Callable[[torch.Tensor], torch.Tensor]: ...


@runtime_checkable
class Expert(RoutedExpert, Protocol):
    """A gated MLP: `down(combine(gate, up))`, gate and up in one stacked linear."""

    @property
    def gate_up(self) -> ExpertLinear: ...

    @property
    def down(self) -> ExpertLinear: ...

    @property
    def combine(self) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]: ...


class ExpertsKernel(Protocol):
    """Routed experts: `sum(weight * expert(x))` over the top-k, or `sum(expert(weight * x))` if on inputs.

    Attributes:
        weight_bytes: weight bytes of all experts: a large batch may activate every one.
        is_capturable: True if a graph can capture it: its operations do not depend on the routing.
    """

    weight_bytes: int
    is_capturable: bool

    def __call__(
        self,
        x: torch.Tensor,
        weights: torch.Tensor,
        experts: torch.Tensor,
        added: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """`x` and `added` [tokens, hidden]; top-k `weights` and `experts` (ids, int64) [tokens, top_k]."""
        ...


class LoopedExperts:
    """Reference: a loop over experts `numbers` of `count`; `on_inputs`: weights multiply the inputs."""

    is_capturable = False

    def __init__(
        self, experts: Sequence[RoutedExpert], numbers: range, count: int, on_inputs: bool
    ) -> None:
        self._experts, self._numbers, self._count = experts, numbers, count
        self._on_inputs = on_inputs
        self.weight_bytes = sum(expert.weight_bytes for expert in experts)

    def __call__(
        self,
        x: torch.Tensor,
        weights: torch.Tensor,
        experts: torch.Tensor,
        added: torch.Tensor | None = None,
    ) -> torch.Tensor:
        weights = weights.to(x.dtype).flatten()
        # Token permutation: sorted by expert, each expert's tokens are contiguous.
        permutation = experts.flatten().argsort(stable=True)
        tokens = permutation // experts.shape[1]
        counts = torch.bincount(experts.flatten(), minlength=self._count).tolist()
        out = torch.zeros_like(x)
        begin = sum(counts[: self._numbers.start])
        for number, expert in zip(self._numbers, self._experts, strict=True):
            count = counts[number]
            if count == 0:
                continue
            run = slice(begin, begin + count)
            inputs = x.index_select(0, tokens[run])
            routing_weights = weights[permutation[run], None]
            if self._on_inputs:
                out.index_add_(0, tokens[run], expert(inputs * routing_weights))
            else:
                out.index_add_(0, tokens[run], expert(inputs) * routing_weights)
            begin += count
        return out if added is None else out + added


TOKENS = 20
ROUTER_INPUTS = 512


def routing_trial(query: RoutingKernelQuery) -> Trial[Any]:
    """Expert weights by id, so that the order of equal ones does not matter."""
    random = RandomInputs(query.device, torch.float32)
    logits, top_k = random(TOKENS, query.count), min(4, query.count)

    def compute(route: Route) -> list[torch.Tensor]:
        weights, ids = route(logits, RoutingRule(top_k), None, None)
        return [torch.zeros_like(logits).scatter_(1, ids, weights)]

    return Trial(compute, tolerance(torch.float32))


def router_logits_trial(query: RoutingKernelQuery) -> Trial[Any]:
    """16-bit rows with a float32 weight and bias."""
    random, rows = (RandomInputs(query.device, kind) for kind in (torch.float32, torch.bfloat16))
    weight, bias = random(query.count, ROUTER_INPUTS), random(query.count)
    given = rows(TOKENS, ROUTER_INPUTS), weight, bias
    return Trial(lambda logits_of: [logits_of(*given)], tolerance(torch.float32))


def experts_trial(
    experts: Sequence[RoutedExpert],
    inputs: int,
    top_k: int,
    device: torch.device,
    dtype: torch.dtype,
    *,
    on_inputs: bool,
) -> Trial[Any]:
    """All experts of a layer in this process; untimed, as one expert after another waits for the device."""
    random = RandomInputs(device, dtype)
    x = random(TOKENS, inputs)
    scores = torch.rand(TOKENS, len(experts), generator=random.generator)
    weights, ids = scores.softmax(dim=1).topk(top_k, dim=1)
    routing = x, weights.to(device), ids.to(device)

    def compute(make: Any) -> list[torch.Tensor]:
        return [make(experts, range(len(experts)), len(experts), on_inputs)(*routing)]

    return Trial(compute, tolerance(dtype, quantizes_inputs=True))


# Of `experts.c`.
_Linear = struct("ExpertLinear", "weights biases", "", ("like", CallStruct))
_Call = struct(
    *("ExpertsCall", "", "", ("gate_up", _Linear), ("down", _Linear)),
    *fields(
        "x routing_weights ids out", "tokens top_k first count on_inputs is_bf16 activation threads"
    ),
)

native_experts = beside(__file__, "experts.c")


class _Stack:
    """The same linear of every expert: arrays of their weights and biases."""

    def __init__(self, linears: Sequence[PackedLinear]) -> None:
        self.linears = list(linears)
        self.in_features = linears[0].weight.struct.in_features
        pointers = ctypes.c_void_p * len(linears)
        self._weights = pointers(*(ctypes.addressof(linear.weight.struct) for linear in linears))
        biases = [linear.bias for linear in linears if linear.bias is not None]
        self._biases = pointers(*(bias.data_ptr() for bias in biases)) if biases else None

    def struct(self, x: torch.Tensor) -> ctypes.Structure:
        like = self.linears[0].call_like(x)
        biases = None if self._biases is None else ctypes.addressof(self._biases)
        return _Linear(ctypes.addressof(self._weights), biases, like)


class NativeExperts:
    """Experts in one C call, by two grouped GEMMs: bit-equal to the loop over experts, batch-invariant."""

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
        shape = tokens, top_k, self._first, len(self._gate_up.linears), self._on_inputs
        call = _Call(
            *(self._gate_up.struct(x), self._down.struct(x), *addresses(x, weights, experts, out)),
            *(*shape, x.dtype is torch.bfloat16, self._activation, torch.get_num_threads()),
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
    """Kernel query of the experts; `is_gated`: gated MLPs; `is_block_fp8`: their linears are DeepGEMM's."""

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
    routing_trial,
)

ROUTER_LOGITS: Operation[RoutingKernelQuery, RouterLogits] = Operation(
    "router logits",
    [
        Candidate("triton", refuses_rows, lazily("moe.triton_routing", "router_logits")),
        Candidate("torch", serves_all, router_logits_torch),
    ],
    router_logits_trial,
)


def _refuses_native(kernel_query: ExpertsKernelQuery) -> str | None:
    reason = refuses_native(kernel_query, native_experts)
    return reason or (None if kernel_query.is_gated else "it takes gated MLPs")


MakeExperts = Callable[[Sequence[RoutedExpert], range, int, bool], ExpertsKernel]


def _grouped_by(group: Callable[..., ExpertsKernel | None], otherwise: MakeExperts) -> MakeExperts:
    def make(
        experts: Sequence[RoutedExpert], expert_ids: range, count: int, on_inputs: bool
    ) -> ExpertsKernel:
        grouped = group(experts, expert_ids, count, on_inputs)
        return otherwise(experts, expert_ids, count, on_inputs) if grouped is None else grouped

    return make


def _refuses_deep_gemm(kernel_query: ExpertsKernelQuery) -> str | None:
    # Permutation, gate and sum are those of the Triton kernels.
    reason = refuses_rows(kernel_query) or refuses_dtype(kernel_query.device, kernel_query.dtype)
    if reason is None and not kernel_query.is_block_fp8:
        return "it is for experts in block FP8"
    return reason or lacks_deep_gemm()


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
