"""Tensor-parallel ranks on pretended cards: rank 0 serves beside workers that are not there, and what it sent them
is given to a worker afterwards. NCCL reduces nothing; what it would refuse is told."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from llmopt.engine.execution import workers
from llmopt.engine.execution.worker import Channel, LoadedShard, pack, work
from torch import distributed

from .card import Card


@dataclass
class Wire:
    """The pipe to worker 1: what was sent, and the replies that rank 0 gets, None where there are no more."""

    sent: list[bytes] = field(default_factory=list)
    replies: deque[Any] = field(default_factory=deque)

    def send_bytes(self, content: bytes) -> None:
        self.sent.append(content)

    def recv_bytes(self) -> bytes:
        return pack(self.replies.popleft() if self.replies else None).content

    def fileno(self) -> int:
        return 0

    def close(self) -> None: ...


class _Received(Wire):
    def recv_bytes(self) -> bytes:
        if not self.sent:
            raise EOFError
        return self.sent.pop(0)

    def send_bytes(self, content: bytes) -> None: ...


class _Process:
    pid = 0

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def poll(self) -> None: ...

    def kill(self) -> None: ...

    def wait(self, *_: Any) -> int:
        return 0


@dataclass
class Collectives:
    """What a rank had NCCL do: operation, numbers, and whether a graph captured it."""

    card: Card
    done: list[tuple[str, int, bool]] = field(default_factory=list)
    connected: set[int] = field(default_factory=set)

    def __call__(self, *_: Any) -> Collectives:
        return self

    Options = SimpleNamespace

    def allreduce(self, tensors: Sequence[torch.Tensor], options: Any) -> None:
        self._add("all-reduce", tensors, options)

    def broadcast(self, tensors: Sequence[torch.Tensor], options: Any) -> None:
        assert options.rootRank == 0
        self._add("broadcast", tensors, options)

    def allgather(self, parts: Any, tensors: Sequence[torch.Tensor]) -> None:
        self._add("all-gather", tensors, None)

    def _add(self, name: str, tensors: Sequence[torch.Tensor], options: Any) -> None:
        (tensor,) = tensors
        card, numbers = self.card, tensor.numel()
        assert tensor.is_contiguous() and str(tensor.device) == f"cuda:{card.current}"
        if card.capturing:
            assert not options.asyncOp, "NCCL's own stream is not the one that is captured"
            if numbers not in self.connected:  # with `cudaMalloc`, and the other ranks
                card.refuse_in_capture(f"NCCL connects {numbers} numbers")
        self.connected.add(numbers)
        self.done.append((name, numbers, card.capturing))
        card.add("kernel", f"nccl {name}")


@contextmanager
def workers_apart(card: Card, replies: Sequence[str | None] = ()) -> Iterator[tuple[Wire, Any]]:
    """A context in which engines are rank 0 of two; `replies` are rank 1's to captures, None after them."""
    wire, collectives = Wire(replies=deque([LoadedShard(), *replies])), Collectives(card)
    with (
        patch.object(workers, "Pipe", lambda: (wire, wire)),
        patch.object(workers, "subprocess", SimpleNamespace(Popen=_Process, DEVNULL=None)),
        _nccl(collectives),
    ):
        yield wire, collectives


def follow(card: Card, sent: Sequence[bytes]) -> Collectives:
    """Be worker 1, on the second card, for what rank 0 has sent."""
    collectives = Collectives(card)
    device = torch.device("cuda", 1)
    with _nccl(collectives), torch.cuda.device(device):
        connection: Any = _Received(sent=list(sent))
        with suppress(EOFError):
            work(Channel(connection, device))
    return collectives


@contextmanager
def _nccl(collectives: Collectives) -> Iterator[None]:
    with (
        patch.object(distributed, "is_nccl_available", lambda: True),
        patch.object(distributed, "ProcessGroupNCCL", collectives, create=True),
    ):
        yield
