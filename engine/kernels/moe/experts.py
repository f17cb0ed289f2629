"""The experts of a mixture on the tokens routed to them: the contract, and the reference that loops."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from ..linear.linear import LinearKernel


class ExpertLinear(Protocol):
    """One of an expert's linears."""

    @property
    def kernel(self) -> LinearKernel | None:
        """The kernel that is all of it; None: there are several."""
        ...

    @property
    def bias(self) -> torch.Tensor | None:
        """Of `[out]`."""
        ...

    @property
    def weight_bytes(self) -> int: ...


class Expert(Protocol):
    """A gated MLP: `down(combine(gate, up))`, gate and up stacked."""

    @property
    def gate_up(self) -> ExpertLinear: ...

    @property
    def down(self) -> ExpertLinear: ...

    @property
    def combine(self) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]: ...

    @property
    def weight_bytes(self) -> int: ...

    def __call__(self, x: torch.Tensor) -> torch.Tensor: ...


class ExpertsKernel(Protocol):
    """`sum(weight * expert(x))`, or with weights on the inputs `sum(expert(weight * x))`."""

    @property
    def weight_bytes(self) -> int:
        """Of all experts: a full batch may visit each."""
        ...

    @property
    def is_capturable(self) -> bool:
        """Whether it does the same operations whatever visits which expert."""
        ...

    def __call__(
        self, x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor
    ) -> torch.Tensor:
        """`x` [tokens, hidden]; `weights`, and `experts` (int64), [tokens, visits]."""
        ...


class LoopedExperts:
    """The reference: one after the other, each with the tokens that visit it.

    Args:
        numbers: of these experts among `count`.
    """

    is_capturable = False

    def __init__(
        self, experts: Sequence[Expert], numbers: range, count: int, on_inputs: bool
    ) -> None:
        self._experts, self._numbers, self._count = experts, numbers, count
        self._on_inputs = on_inputs
        self.weight_bytes = sum(expert.weight_bytes for expert in experts)

    def __call__(
        self, x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor
    ) -> torch.Tensor:
        weights = weights.to(x.dtype).flatten()
        # Visits in the order of the experts: each expert's tokens then form a run.
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
        return out
