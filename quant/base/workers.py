"""Independent tasks over several devices: a thread for each takes the next task; results keep their order."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

from .device import creating_on

Task = TypeVar("Task")
Result = TypeVar("Result")


def spread(
    tasks: Sequence[Task],
    devices: Sequence[torch.device],
    run: Callable[[Task, torch.device], Result],
) -> list[Result]:
    """`run` of every task on one of the devices, without gradients; the results in the order of the tasks.

    A device may be named twice, and has two threads then.

    Raises:
        Exception: the first one of a task; those that were not begun are left out.
    """
    left = iter(enumerate(tasks))
    lock = threading.Lock()
    results: dict[int, Result] = {}

    def work(device: torch.device) -> None:
        while True:
            with lock:
                index, task = next(left, (None, None))
            if index is None:
                return
            try:
                with torch.no_grad(), creating_on(device):
                    results[index] = run(task, device)  # pyright: ignore[reportArgumentType]
            except BaseException:
                with lock:
                    for _ in left:
                        pass
                raise

    with ThreadPoolExecutor(len(devices)) as pool:
        for done in [pool.submit(work, device) for device in devices]:
            done.result()
    return [results[index] for index in range(len(tasks))]
