"""Tasks over several devices: order, exceptions, and that each device takes part."""

from __future__ import annotations

import threading

import pytest
import torch
from llmopt.quant.base.device import HOST, spread


def test_results_keep_the_order_and_every_device_takes_tasks() -> None:
    both = threading.Barrier(2, timeout=20)  # passes only where two threads work at once
    seen: set[int] = set()

    def run(task: int, device: torch.device) -> int:
        if task < 2:
            both.wait()
        seen.add(threading.get_ident())
        assert not torch.is_grad_enabled()
        return task * 10

    assert spread(range(5), (HOST, HOST), run) == [0, 10, 20, 30, 40]
    assert len(seen) == 2


def test_an_exception_ends_the_rest() -> None:
    begun: list[int] = []

    def run(task: int, _: torch.device) -> None:
        begun.append(task)
        raise ValueError(f"task {task}")

    with pytest.raises(ValueError, match="task 0"):
        spread(range(9), (HOST,), run)
    assert begun == [0]


def test_no_tasks_give_no_results() -> None:
    assert spread([], (HOST, HOST), lambda task, _: task) == []
