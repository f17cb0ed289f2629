"""Layers loaded by several threads: their order, their errors, and the same weights as by one."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from llmopt.engine import LLM, SamplingParams
from llmopt.engine.model.decoder.reader import load_layers

CPU = torch.device("cpu")


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    assert torch.get_num_threads() == 2, "as before the load"
    torch.set_num_threads(before)


@pytest.mark.usefixtures("two_threads")
def test_layers_come_in_order_from_two_threads_at_once() -> None:
    meet = threading.Barrier(2, timeout=120)

    def load(index: int) -> tuple[int, int]:
        if index < 2:
            meet.wait()
        return index, threading.get_ident()

    loaded = load_layers(load, 9, CPU)
    assert [index for index, _ in loaded] == list(range(9))
    assert len({thread for _, thread in loaded[:2]}) == 2
    assert threading.get_ident() not in {thread for _, thread in loaded}


@pytest.mark.usefixtures("two_threads")
def test_the_first_broken_layer_ends_the_load(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other thread loads a layer until the pool has been told to begin no other."""
    begun: list[int] = []
    cancelled = threading.Event()
    shutdown = ThreadPoolExecutor.shutdown

    def load(index: int) -> int:
        begun.append(index)
        if index == 3:
            raise ValueError("layer 3")
        if index > 3:
            assert cancelled.wait(120)
        return index

    def shut_down(pool: ThreadPoolExecutor, wait: bool = True, *, cancel_futures: bool) -> None:
        shutdown(pool, wait=False, cancel_futures=cancel_futures)
        cancelled.set()
        shutdown(pool)

    monkeypatch.setattr(ThreadPoolExecutor, "shutdown", shut_down)
    with pytest.raises(ValueError, match="layer 3"):
        load_layers(load, 1000, CPU)
    assert len(begun) <= 6  # 3 broke, and each of two threads had begun another


def test_one_thread_loads_where_it_is() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        assert set(load_layers(lambda _: threading.get_ident(), 3, CPU)) == {threading.get_ident()}
    finally:
        torch.set_num_threads(before)


def test_a_model_loaded_by_two_threads_gives_the_same_tokens() -> None:
    params = SamplingParams(temperature=0.0, max_tokens=8)
    answers = []
    for threads in (1, 2):
        llm = LLM("stories3M", dtype="float32", num_threads=threads, max_model_len=64)
        answers.append(llm.generate(["Once upon a time"], params)[0].token_ids)
    assert answers[0] == answers[1]
    torch.set_num_threads(1)
