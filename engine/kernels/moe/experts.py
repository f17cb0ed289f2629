"""Mixture-of-experts: the interface of experts kernels, and the reference that loops over experts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from ..linear.linear import LinearKernel


class ExpertLinear(Protocol):
    """A linear of an expert."""

    @property
    def kernel(self) -> LinearKernel | None:
        """The GEMM kernel, if the linear is a single one; None: there are several."""
        ...

    @property
    def bias(self) -> torch.Tensor | None:
        """`[out]`, or None."""
        ...

    @property
    def weight_bytes(self) -> int: ...


class RoutedExpert(Protocol):
    """An MLP, gated or not."""

    @property
    def weight_bytes(self) -> int: ...

    def __call__(self, x: torch.Tensor) -> torch.Tensor: ...


class Expert(RoutedExpert, Protocol):
    """A gated MLP: `down(combine(gate, up))`, gate and up in one stacked linear."""

    @property
    def gate_up(self) -> ExpertLinear: ...

    @property
    def down(self) -> ExpertLinear: ...

    @property
    def combine(self) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]: ...


class ExpertsKernel(Protocol):
    """Routed experts: `sum(weight * expert(x))` over the top-k, or `sum(expert(weight * x))` if on inputs."""

    @property
    def weight_bytes(self) -> int:
        """Weight bytes of all experts: a large batch may activate every one."""
        ...

    @property
    def is_capturable(self) -> bool:
        """Whether it can be captured into a graph: its operations do not depend on the routing."""
        ...

    def __call__(
        self,
        x: torch.Tensor,
        weights: torch.Tensor,
        experts: torch.Tensor,
        added: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """`x` [tokens, hidden]; top-k `weights` and `experts` (ids, int64) [tokens, top_k]; `added` [tokens,
        hidden] is added to the result."""
        ...


class LoopedExperts:
    """The reference: a loop over experts, each on the tokens routed to it.

    Args:
        numbers: ids of these experts, of `count` in the model.
        on_inputs: whether routing weights multiply the inputs instead of the outputs.
    """

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
            inputs, routing_weights = (
                x.index_select(0, tokens[run]),
                weights[permutation[run], None],
            )
            if self._on_inputs:
                out.index_add_(0, tokens[run], expert(inputs * routing_weights))
            else:
                out.index_add_(0, tokens[run], expert(inputs) * routing_weights)
            begin += count
        return out if added is None else out + added
