"""Workers of one run: processes that torchrun started, and sums that are the same for any number of them.

Samples are cut into at most `LANES` lanes, whatever the number of workers, and a worker has whole lanes. What
is summed over samples is summed in order within a lane, and the lanes in a fixed tree of pairs, so that every
number of workers makes the same bits. A process that torchrun did not start is alone: it has no lanes, and
everything is summed in order.

Workers go through the same steps, and meet in every function here that says so; one that ends ends the run.
"""

from __future__ import annotations

import io
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import distributed as dist

from .device import HOST
from .errors import BadInput, Failure, first_line

LANES = 16
"""More keep more workers busy, and take more memory for sums of lanes: of n lanes a worker holds log2(n)."""
_GRACE_SECONDS = 20.0  # in which torchrun ends a worker, once the first said what is wrong with all
_PATIENCE = timedelta(days=7)  # the others wait for a search of the first one
_STARTED = "TORCHELASTIC_RUN_ID"
Task = TypeVar("Task")
Answer = TypeVar("Answer")
Part = torch.Tensor | None
_ALONE: ContextVar[bool] = ContextVar("alone", default=False)


def is_worker() -> bool:
    """Whether torchrun started this process."""
    return _STARTED in os.environ


def together() -> bool:
    """Whether this process works with others, of which there may be none."""
    return dist.is_initialized() and not _ALONE.get()


def count() -> int:
    """Number of workers."""
    return dist.get_world_size() if together() else 1


def rank() -> int:
    """This worker's number; that of a process that is alone is 0."""
    return dist.get_rank() if together() else 0


def is_first() -> bool:
    """Whether this process is the one that speaks, decides and keeps the journal."""
    return not is_worker() or os.environ.get("RANK", "0") == "0"


def own_device(asked: str) -> str:
    """The device of this worker where `--device` says `cuda`: that of its number on its machine.

    Raises:
        BadInput: several devices, of which each worker would take all.
    """
    if not is_worker() or asked == "cpu":
        return asked
    if asked != "cuda":
        raise BadInput(f"--device {asked}: workers have one GPU each: give --device cuda")
    return f"cuda:{os.environ.get('LOCAL_RANK', '0')}"


def join(device: str) -> None:
    """Meet the other processes of torchrun, if it started this one.

    Not before the model is planned: transformers leaves it to the first of several processes to save models.
    """
    if not is_worker() or dist.is_initialized():
        return
    if device != "cpu":
        torch.cuda.set_device(own_device(device))
    dist.init_process_group("gloo" if device == "cpu" else "cpu:gloo,cuda:nccl", timeout=_PATIENCE)


@contextmanager
def one_of_many() -> Iterator[None]:
    """A context for a worker's run: it has one thread, or `OMP_NUM_THREADS`, and fails in one voice."""
    if not is_worker():
        yield
        return
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    try:
        yield
    except (BadInput, Failure):
        if not is_first():  # what is wrong is mostly wrong with all workers
            time.sleep(_GRACE_SECONDS)
        raise
    except RuntimeError as error:
        if not isinstance(error, dist.DistError) and "Connection closed" not in str(error):
            raise
        time.sleep(_GRACE_SECONDS)  # torchrun ends this one meanwhile
        raise Failure(f"another worker ended: {first_line(error)}") from error
    if dist.is_initialized():
        dist.destroy_process_group()


@contextmanager
def _alone() -> Iterator[None]:
    token = _ALONE.set(True)
    try:
        yield
    finally:
        _ALONE.reset(token)


def first_alone(call: Callable[[], Answer]) -> Answer:
    """The answer that the first worker finds alone; the workers meet."""
    answer = None
    if rank() == 0:
        with _alone():
            answer = call()
    return given(answer, 0)  # type: ignore[return-value]


def one_by_one(call: Callable[[], Answer]) -> Answer:
    """Call in the first worker, then in the others, each alone; those find what it left in files."""
    if rank() > 0:
        meet()
    with _alone():
        answer = call()
    if rank() == 0:
        meet()
    meet()
    return answer


def meet() -> None:
    """Wait for all workers."""
    gathered(None)


def given(value: Answer, source: int) -> Answer:
    """The value that one worker has; tensors come to this worker's device, or stay on the host."""
    if count() == 1:
        return value
    stream = io.BytesIO()
    if rank() == source:
        torch.save(value, stream)
    with HOST:  # a method may have made another device the default
        length = torch.tensor([stream.tell()])
        dist.broadcast(length, source)
        data = torch.empty(int(length), dtype=torch.uint8)
        if rank() == source:
            data = torch.frombuffer(stream.getbuffer(), dtype=torch.uint8)
        dist.broadcast(data, source)
    if rank() == source:
        return value
    return torch.load(io.BytesIO(data.numpy().data), map_location=_here, weights_only=False)


def _here(storage: Any, location: str) -> Any:
    return storage if location == "cpu" else storage.cuda()


def gathered(value: Answer) -> list[Answer]:
    """The small values of all workers, in their order."""
    if count() == 1:
        return [value]
    values: list[Any] = [None] * count()
    dist.all_gather_object(values, value)
    return values


def shared_out(
    tasks: Sequence[Task], costs: Sequence[float], run: Callable[[Task], Answer]
) -> list[Answer]:
    """The answers to independent tasks, each found by one worker, the dearest first by the least loaded; the
    workers meet.

    Raises:
        Exception: that of the first task that failed, in all workers.
    """
    if count() == 1:
        return [run(task) for task in tasks]
    owners, loads = [0] * len(tasks), [0.0] * count()
    for number in sorted(range(len(tasks)), key=lambda number: (-costs[number], number)):
        owners[number] = loads.index(min(loads))
        loads[owners[number]] += costs[number]
    found: dict[int, tuple[Answer | None, Exception | None]] = {}
    for number, task in enumerate(tasks):
        if owners[number] == rank():
            try:
                found[number] = run(task), None
            except Exception as error:  # the others wait for this answer
                found[number] = None, error
    answers: list[Any] = []
    for number, owner in enumerate(owners):
        answer, error = given(found.pop(number, (None, None)), owner)
        if error is not None:
            raise error
        answers.append(answer)
    return answers


class LaneSums:
    """Sums of tensors over lanes, added in a fixed tree of pairs: lanes 0 and 1, 2 and 3, then both pairs.

    A worker that has lanes next to each other keeps a sum for each whole branch.
    """

    def __init__(self) -> None:
        self.branches: list[tuple[int, int, list[Part]]] = []

    def add(self, place: int, parts: Sequence[Part], level: int = 0) -> None:
        """Add the sums of a lane, or of the branch at a place of a level; they are changed in place."""
        parts = list(parts)
        while place % 2 and self.branches and self.branches[-1][:2] == (level, place - 1):
            parts = [_sum(*pair) for pair in zip(self.branches.pop()[2], parts, strict=True)]
            level, place = level + 1, place // 2
        self.branches.append((level, place, parts))

    def total(self) -> list[Part]:
        """The sum of all branches, the last two first."""
        if not self.branches:
            return []
        *others, last = [parts for _, _, parts in self.branches]
        for parts in reversed(others):
            last = [_sum(*pair) for pair in zip(parts, last, strict=True)]
        return last


def _sum(left: Part, right: Part) -> Part:
    """The sum in the memory of one of them; nothing counts as zeros, which turn -0 into 0."""
    if left is None or right is None:
        one = right if left is None else left
        return None if one is None else one.add_(0.0)
    return left.add_(right)


def totals(sums: Sequence[LaneSums], like: Sequence[Sequence[torch.Tensor]]) -> list[list[Part]]:
    """The sums over the lanes of all workers, which meet; None for a part that no lane has.

    Args:
        sums: in the same order in every worker; emptied.
        like: tensors of the parts' shapes.
    """
    shapes = gathered(
        [
            [
                (level, place, [part is not None for part in parts])
                for level, place, parts in one.branches
            ]
            for one in sums
        ]
    )
    answers: list[list[Part]] = []
    for number, (one, template) in enumerate(zip(sums, like, strict=True)):
        home = number % count()
        whole = LaneSums()
        for sender, branches in enumerate(shapes):
            own = iter(one.branches)
            for level, place, present in branches[number]:
                parts = next(own)[2] if sender == rank() else [None] * len(present)
                if sender != home:
                    parts = [
                        _moved(part, tensor, sender, home) if there else None
                        for part, tensor, there in zip(parts, template, present, strict=True)
                    ]
                whole.add(place, parts, level)
        one.branches = []
        total = (whole.total() if rank() == home else []) or [None] * len(template)
        for index, tensor in enumerate(template):
            if any(present[index] for each in shapes for _, _, present in each[number]):
                total[index] = _broadcast(total[index], tensor, home)
        answers.append(total)
    return answers


def _moved(part: Part, like: torch.Tensor, sender: int, home: int) -> Part:
    """A tensor at its home, which comes from another worker."""
    if rank() == sender and part is not None:
        dist.send(_raw(part), home)
    elif rank() == home:
        received = torch.empty_like(like)
        dist.recv(_raw(received), sender)
        return received
    return None


def _broadcast(total: Part, like: torch.Tensor, home: int) -> torch.Tensor:
    total = torch.empty_like(like) if total is None else total.contiguous()
    if count() > 1:
        dist.broadcast(_raw(total), home)
    return total


def _raw(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor, which every backend can send."""
    return tensor.view(-1).view(torch.uint8)


def largest(tensors: Sequence[torch.Tensor]) -> None:
    """Replace the values of tensors by the largest of all workers, which meet."""
    for tensor in tensors:
        if count() > 1:
            dist.all_reduce(tensor, dist.ReduceOp.MAX)


@dataclass(frozen=True, slots=True)
class Share:
    """Samples of one worker: whole lanes.

    Attributes:
        samples: how many there are in all.
        size: samples of a lane; the last may have fewer.
        lanes: those of the worker.
    """

    samples: int
    size: int
    lanes: range

    @property
    def count(self) -> int:
        """Lanes of all workers; of no samples an empty one."""
        return max(1, -(-self.samples // self.size))

    @property
    def own(self) -> slice:
        """The worker's samples."""
        return slice(self.lanes.start * self.size, min(self.samples, self.lanes.stop * self.size))

    def rows(self, lane: int) -> slice:
        """The samples of one of the worker's lanes, counted from its first."""
        start = (lane - self.lanes.start) * self.size
        return slice(start, min(start + self.size, self.own.stop - self.own.start))

    def ended(self, stop: int) -> int | None:
        """The lane that ends before this sample, counted from the worker's first; None: it goes on."""
        lane, rest = divmod(min(stop, self.own.stop - self.own.start) - 1, self.size)
        at_end = rest == self.size - 1 or stop >= self.own.stop - self.own.start
        return self.lanes.start + lane if at_end else None


def share_of(samples: int, rows: int) -> Share | None:
    """This worker's share of samples that are run so many at a time; None for a process that is alone."""
    if not together():
        return None
    batches = -(-samples // rows)
    whole = Share(samples, max(1, -(-batches // LANES)) * rows, range(0))
    ends = [whole.count * number // count() for number in (rank(), rank() + 1)]
    return replace(whole, lanes=range(*ends))


def launch(number: int, module: str, words: Sequence[str]) -> int:
    """Run `python -m module` with these words in so many workers of this machine; returns the exit code.

    Raises:
        Failure: a worker was killed.
    """
    import logging
    import sys

    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # equal for any number of workers
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=number,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        run_id=f"llmopt-{os.getpid()}",
        max_restarts=0,
        monitor_interval=0.1,
    )
    try:
        elastic_launch(config, sys.executable)("-m", module, *words)
    except SignalException:
        raise KeyboardInterrupt from None
    except ChildFailedError as failed:
        worker, failure = failed.get_first_failure()
        if failure.exitcode >= 0:
            return failure.exitcode
        name = signal.Signals(-failure.exitcode).name
        raise Failure(f"worker {worker} was ended by {name}: the same command goes on") from None
    return 0
