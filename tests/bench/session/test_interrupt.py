from __future__ import annotations

import os
import signal
import threading

import pytest
from llmopt.base.atomic_io import interrupts_held


def press_ctrl_c() -> None:
    os.kill(os.getpid(), signal.SIGINT)


@pytest.fixture(autouse=True)
def default_handler():
    """pytest may have been started where SIGINT is ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_the_first_passes_by_and_the_second_interrupts():
    passed_by = 0
    with pytest.raises(KeyboardInterrupt), interrupts_held():
        for _ in range(2):
            press_ctrl_c()
            passed_by += 1
    assert passed_by == 1


def test_afterwards_all_is_as_before():
    with interrupts_held():
        press_ctrl_c()
    with pytest.raises(KeyboardInterrupt):
        press_ctrl_c()
    with interrupts_held():
        pass
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_another_thread_is_left_alone():
    handlers = []

    def work() -> None:
        with interrupts_held():
            handlers.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert handlers == [signal.default_int_handler]
