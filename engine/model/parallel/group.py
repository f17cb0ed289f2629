"""Process group of tensor parallelism: rendezvous, all-reduce, all-gather (gloo or NCCL)."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from ....quant.base.errors import BadInput, Failure
from ...kernels.common.launch import call_or_capture

TIMEOUT = timedelta(minutes=5)
"""Timeout of rendezvous and collectives, after which a peer counts as dead."""


class PeerLost(Failure):
    """A process of the group ended or does not respond; the message names it."""


class Group:
    """Collectives over the tensor-parallel ranks, after all have called `connect`.

    gloo over the loopback interface on CPUs, NCCL on GPUs, on the current stream: CPU and CUDA graphs capture
    them. What fails in a CUDA capture is raised as it is.

    Raises:
        BadInput: this torch lacks the backend for the device.
        PeerLost: from every operation, where another process has ended.
    """

    def __init__(self, rank: int, size: int, device: torch.device) -> None:
        cuda = device.type == "cuda"
        is_available = distributed.is_available() and (
            distributed.is_nccl_available() if cuda else distributed.is_gloo_available()
        )
        if not is_available:
            backend = "NCCL" if cuda else "gloo"
            raise BadInput(f"tensor_parallel_size = {size}: this torch has no {backend}")
        self.rank = rank
        self.size = size
        self.device = device
        self._cuda = cuda
        self._silent = False
        self._processes: Any = None
        self.explain: Callable[[], str | None] = lambda: None
        """Called for the reason when an operation fails."""

    def connect(self, rendezvous: Path) -> None:
        """Rendezvous through a file store; all ranks name the same `rendezvous` file."""
        file_store: Any = distributed.FileStore  # pyright: ignore[reportPrivateImportUsage]
        store = file_store(str(rendezvous), self.size)
        self._run(lambda: self._rendezvous(store))

    def all_reduce(self, part: torch.Tensor) -> torch.Tensor:
        """Sum of all ranks' `part`, in place."""
        part, options = part.contiguous(), distributed.AllreduceOptions()
        options.asyncOp = False
        self._collect(lambda: self._processes.allreduce([part], options))
        return part

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Rank 0's values of a contiguous tensor, in place."""
        options = distributed.BroadcastOptions()
        options.rootRank, options.asyncOp = 0, False
        self._collect(lambda: self._processes.broadcast([tensor], options))

    @contextmanager
    def silent(self) -> Iterator[None]:
        """Within the block, collectives do nothing: for the call that warms a capture up, whose values mean
        nothing, and which must not wait for a rank on which it fails."""
        before, self._silent = self._silent, True
        try:
            yield
        finally:
            self._silent = before

    def all_gather_columns(self, part: torch.Tensor, width: int) -> torch.Tensor:
        """`[rows, width]` from all ranks' columns, split as by `Shard.vocabulary`; sent padded."""
        ends = [width * (rank + 1) // self.size for rank in range(self.size)]
        counts = [end - begin for begin, end in zip([0, *ends], ends, strict=False)]
        widest = max(counts)
        padded = part.new_zeros(part.shape[0], widest)
        padded[:, : part.shape[1]] = part
        parts = [torch.empty_like(padded) for _ in range(self.size)]
        self._collect(lambda: self._processes.allgather([parts], [padded]))
        return torch.cat([p[:, :count] for p, count in zip(parts, counts, strict=True)], dim=1)

    def _rendezvous(self, store: Any) -> None:
        if self._cuda:
            # NCCL would register the buffers of a captured collective, for which (with NVLS) ranks exchange
            # messages on the host: a capture would wait for a rank on which it failed.
            os.environ.setdefault("NCCL_GRAPH_REGISTER", "0")
            options: Any = distributed.ProcessGroupNCCL.Options()
            options._timeout = TIMEOUT
            kind: Any = distributed.ProcessGroupNCCL
        else:
            kind = distributed.ProcessGroupGloo
            options = kind._Options()
            options._devices = [kind.create_device(hostname="127.0.0.1")]
            options._timeout = TIMEOUT
        self._processes = kind(store, self.rank, self.size, options)

    def _collect(self, collective: Callable[[], Any]) -> None:
        """Run a collective; a capture records it instead."""
        if not self._silent:
            call_or_capture(lambda: self._run(lambda: _wait(collective())))

    def _run(self, operation: Callable[[], object]) -> None:
        try:
            operation()
        except RuntimeError as error:
            if self._cuda and torch.cuda.is_current_stream_capturing():
                raise  # of this device, such as out of memory: a capture waits for no peer
            reason = self.explain() or (str(error).splitlines() or ["no answer"])[0]
            raise PeerLost(f"tensor parallel: {reason}") from error


def _wait(work: Any) -> None:
    """Wait for a collective: the host with gloo, the current stream with NCCL."""
    if work is not None:
        work.wait()
