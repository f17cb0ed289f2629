"""LM head of a captured decode step: logits and greedy tokens, captured behind the step's hidden states."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..kernels.graphs.cpu_graph import CpuGraph, NotCapturable
from ..kernels.sampling.argmax import argmax_rows
from ..model.open import CausalModel


class DecodeHead:
    """The logits of a CPU graph's result, and the argmax of each row, in one call of C.

    Attributes:
        tokens: int64 [rows], greedy tokens that `run` overwrites; None: not captured.
    """

    def __init__(
        self,
        model: CausalModel,
        hidden: torch.Tensor,
        capture: Callable[[Callable[[], torch.Tensor]], CpuGraph],
        *,
        takes_largest: bool,
    ) -> None:
        self.tokens: torch.Tensor | None = None
        tokens: torch.Tensor | None = None

        def call() -> torch.Tensor:
            nonlocal tokens
            logits = model.logits(hidden)
            if takes_largest:
                tokens = argmax_rows(logits)
            return logits

        self.run: Callable[[], torch.Tensor] = lambda: model.logits(hidden)
        try:
            graph = capture(call)
        except NotCapturable:
            return
        if graph.is_native:  # else each replay would copy the logits that torch makes
            self.run, self.tokens = graph.replay, tokens
