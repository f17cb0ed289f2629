"""Workers of one run: processes that torchrun started, what they do together, and how they end.

Workers go through the same steps, and meet in every function here that says so; one that ends ends the run.
A process that torchrun did not start is alone.
"""

from __future__ import annotations

import io
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import distributed as dist

from ...base.errors import BadInput, Failure, first_line
from .device import HOST

_GRACE_SECONDS = 20.0  # in which torchrun ends a worker, once the first said what is wrong with all
_PATIENCE = timedelta(days=7)  # the others wait for a search of the first one
_INTERRUPTED = 128 + signal.SIGINT
_STARTED = "TORCHELASTIC_RUN_ID"
Task = TypeVar("Task")
Answer = TypeVar("Answer")
_ALONE: ContextVar[bool] = ContextVar("alone", default=False)


def is_worker() -> bool:
    return _STARTED in os.environ


def together() -> bool:
    return dist.is_initialized() and not _ALONE.get()


def count() -> int:
    return dist.get_world_size() if together() else 1


def rank() -> int:
    return dist.get_rank() if together() else 0


def is_first() -> bool:
    return not is_worker() or os.environ.get("RANK", "0") == "0"


def own_device(name: str) -> str:
    """This worker's device where `--device` says `cuda`, by its number. BadInput: several devices."""
    if not is_worker() or name == "cpu":
        return name
    if name != "cuda":
        raise BadInput(f"--device {name}: workers have one GPU each: give --device cuda")
    return f"cuda:{os.environ.get('LOCAL_RANK', '0')}"


def join(device: str) -> None:
    """Meet torchrun's other processes, once the model is planned: transformers leaves saving to the first."""
    if not is_worker() or dist.is_initialized():
        return
    if device != "cpu":
        torch.cuda.set_device(own_device(device))
    dist.init_process_group("gloo" if device == "cpu" else "cpu:gloo,cuda:nccl", timeout=_PATIENCE)


@contextmanager
def one_of_many() -> Iterator[None]:
    """A context for a worker's run: it has one thread, or `OMP_NUM_THREADS`, and ends in one voice."""
    if not is_worker():
        yield
        return
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    try:
        with _one_voice():
            yield
    except BaseException as error:
        # A process that ends beside gloo's threads may abort; NCCL waits for what the others send no more.
        if dist.is_initialized() and dist.get_backend() == "gloo":
            dist.destroy_process_group()
        if isinstance(error, KeyboardInterrupt) and not is_first():
            raise SystemExit(_INTERRUPTED) from None
        raise
    if dist.is_initialized():
        dist.destroy_process_group()


def is_lost(error: BaseException) -> bool:
    """True if this worker waited in vain for another, which has ended."""
    is_gloo = isinstance(error, RuntimeError) and "gloo" in str(error)
    return isinstance(error, dist.DistError) or is_gloo


@contextmanager
def _one_voice() -> Iterator[None]:
    """Leave it to the first worker to say what is wrong, which is mostly wrong with all."""
    try:
        yield
    except Exception as error:
        if is_lost(error) or not is_first():
            time.sleep(_GRACE_SECONDS)  # torchrun ends this one meanwhile
        if is_lost(error):
            raise Failure(f"another worker ended: {first_line(error)}") from error
        raise


@contextmanager
def _alone() -> Iterator[None]:
    token = _ALONE.set(True)
    try:
        yield
    finally:
        _ALONE.reset(token)


def first_alone(call: Callable[[], Answer]) -> Answer:
    """Run on the first worker, alone; broadcast its result or exception."""

    def alone() -> Answer:
        with _alone():
            return call()

    return done_by(0, alone)


def done_by(worker: int, call: Callable[[], Answer]) -> Answer:
    return opened(given(tried(call) if rank() == worker else None, worker))


class Tried(NamedTuple):
    """The outcome of a call: its answer, or what it raised."""

    answer: Any
    error: Exception | None


def tried(call: Callable[[], Any]) -> Tried:
    try:
        return Tried(call(), None)
    except Exception as error:
        if count() == 1:
            raise
        return Tried(None, error)


def opened(tried: Tried | None) -> Any:
    assert tried is not None
    if tried.error is not None:
        raise tried.error
    return tried.answer


def one_by_one(call: Callable[[], Answer]) -> Answer:
    """Run on rank 0 first, then on the other ranks, each alone: they read its files."""
    if rank() > 0:
        meet()
    with _alone():
        answer = call()
    if rank() == 0:
        meet()
    meet()
    return answer


def meet() -> None:
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

    def here(storage: Any, location: str) -> Any:
        return storage if location == "cpu" else storage.cuda()

    return torch.load(io.BytesIO(data.numpy().data), map_location=here, weights_only=False)


def gathered(value: Answer) -> list[Answer]:
    if count() == 1:
        return [value]
    values: list[Any] = [None] * count()
    dist.all_gather_object(values, value)
    return values


def shared_out(
    tasks: Sequence[Task], costs: Sequence[float], run: Callable[[Task], Answer]
) -> list[Answer]:
    """Answers to independent tasks, the dearest first by the least loaded; the first exception in all."""
    if count() == 1:
        return [run(task) for task in tasks]
    owners, loads = [0] * len(costs), [0.0] * count()
    for number in sorted(range(len(costs)), key=lambda number: (-costs[number], number)):
        owners[number] = loads.index(min(loads))
        loads[owners[number]] += costs[number]
    results = {
        number: tried(partial(run, task))
        for number, task in enumerate(tasks)
        if owners[number] == rank()
    }
    return [opened(given(results.pop(n, None), owner)) for n, owner in enumerate(owners)]


def launch(number: int, module: str, arguments: Sequence[str]) -> int:
    """Run `python -m module` in so many workers here; its exit code. Failure: a worker was killed."""
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
        elastic_launch(config, sys.executable)("-m", module, *arguments)
    except SignalException as stopped:  # which the first worker has said
        return 128 + stopped.sigval
    except ChildFailedError as failed:
        worker, failure = failed.get_first_failure()
        if failure.exitcode >= 0:
            return failure.exitcode
        name = signal.Signals(-failure.exitcode).name
        raise Failure(f"worker {worker} was ended by {name}: the same command goes on") from None
    return 0
