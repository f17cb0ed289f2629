"""CUDA graphs: a function of CUDA tensors, captured once and replayed with one launch."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch


class CudaGraph:
    """`call`, captured; `replay` runs it. Its result is in memory of `pool`, which graphs may share.

    A replay overwrites the results of all graphs of its pool. `warming_up` is entered for the first call,
    which is not captured.
    """

    def __init__(
        self,
        call: Callable[[], torch.Tensor],
        pool: Any,
        warming_up: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        # Warm-up: a first call compiles kernels and allocates workspaces, which cannot be captured.
        with warming_up():
            call()
        self._graph = torch.cuda.CUDAGraph()
        # Other threads may use CUDA during the capture.
        with torch.cuda.graph(self._graph, pool=pool, capture_error_mode="thread_local"):
            self._result = call()

    def replay(self) -> torch.Tensor:
        """The result, which the next replay in the pool overwrites."""
        self._graph.replay()
        return self._result
