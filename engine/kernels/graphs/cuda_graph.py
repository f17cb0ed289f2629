"""A function of tensors on a CUDA device, captured once and replayed with one launch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class CudaGraph:
    """`call`, captured; `replay` replays it. Its results lie in `pool`, where other graphs' may lie too.

    What graphs of a pool have computed is overwritten by whichever is replayed next.
    """

    def __init__(self, call: Callable[[], torch.Tensor], pool: Any) -> None:
        # What a first call does besides, such as compiling kernels and taking workspaces, cannot be captured.
        call()
        self._graph = torch.cuda.CUDAGraph()
        # Other threads may go on with CUDA meanwhile.
        with torch.cuda.graph(self._graph, pool=pool, capture_error_mode="thread_local"):
            self._result = call()

    def replay(self) -> torch.Tensor:
        """The result, which the next replay in the pool overwrites."""
        self._graph.replay()
        return self._result
