"""Captured tensor-parallel steps: the tokens of eager ones, one message a step, and all ranks captured or none."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from llmopt.engine import SamplingParams
from llmopt.engine.config.config import EngineConfig
from llmopt.engine.core import build
from llmopt.engine.core.engine import Engine
from llmopt.engine.execution import workers
from llmopt.engine.execution.decode_inputs import DecodeInputs
from llmopt.engine.execution.step_loop import StepRecorder
from llmopt.engine.kernels.attention.dispatch import native_attention
from llmopt.engine.kernels.common.devices import VARIABLE
from llmopt.engine.scheduling.step_plan import DecodeRows

from ...support.model_families import save_model
from ...support.triton_world import DEVICE

pytestmark = [
    pytest.mark.skipif(DEVICE != "cpu", reason="tests/gpu captures on a GPU"),
    pytest.mark.skipif(native_attention().reason is not None, reason="no C kernels to capture"),
]
FEW: dict[str, Any] = {"max_num_seqs": 3, "max_model_len": 32}
OPTIONS: dict[str, Any] = {"dtype": "float32", "device": "cpu", "num_threads": 1, "block_size": 4}
NARROW = {
    "hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2,
    "num_hidden_layers": 1,
}  # fmt: skip
PROMPTS = [[1, 403, 407, 403, 407, 403], [1] + [5 + 7 * i for i in range(11)], [9, 8]]
GREEDY = SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True)


@contextmanager
def opened(model: str | Path, **options: Any) -> Iterator[tuple[Engine, list[tuple[str, Any]]]]:
    """An engine of two ranks, and the calls that rank 0 sends while it serves."""
    engine = Engine(EngineConfig(model, tensor_parallel_size=2, **{**OPTIONS, **options}))
    sent: list[tuple[str, Any]] = []
    assert engine.workers is not None
    send = engine.workers._send

    def watched(channels: Any, value: Any) -> None:
        sent.append(value)
        send(channels, value)

    engine.workers._send = watched
    try:
        yield engine, sent
    finally:
        engine.close()


def tokens(engine: Engine, params: SamplingParams = GREEDY) -> dict[str, list[int]]:
    """Requests that begin while others decode, and end after each other."""
    found: dict[str, list[int]] = {}
    waiting = list(enumerate(PROMPTS))
    while waiting or engine.has_unfinished():
        if waiting:
            number, prompt = waiting.pop()
            engine.add_request(str(number), prompt, params)
        for output in engine.step():
            found.setdefault(output.request_id, []).extend(output.new_token_ids)
    return found


@pytest.fixture(scope="module")
def expected() -> dict[str, list[int]]:
    with opened("stories3M", enforce_eager=True, **FEW) as (engine, sent):
        found = tokens(engine)
        assert {call for call, _ in sent} == {"forward", "logits"}
    return found


def test_a_captured_step_is_one_message(expected: dict[str, list[int]]) -> None:
    """All-reduces lie between the recorded launches; batches of sizes captured early and at their first use."""
    with opened("stories3M", **FEW) as (engine, sent):
        engine.recorder = StepRecorder(engine.scheduler)
        assert tokens(engine) == expected
        replays = [argument for call, argument in sent if call == "replay"]
        assert len(replays) == sum(step.replayed for step in engine.recorder.steps) >= 8
        assert {replay.name.key.size for replay in replays} == {1, 2, 3}
        assert all(replay.num_logits == replay.name.key.size for replay in replays)
        assert max(len(workers.pack(("replay", replay)).content) for replay in replays) < 400
        # Tables are sent again only where a block was begun.
        assert any(replay.unshared[1] == 0 for replay in replays)


def test_async_and_preempted_steps_give_the_tokens_of_eager_ones(
    expected: dict[str, list[int]],
) -> None:
    with opened("stories3M", **FEW, async_scheduling=True, num_blocks=9) as (engine, sent):
        assert tokens(engine) == expected
        assert engine.stats.num_preemptions > 0, "the pool was meant to be too small"
        assert sum(call == "replay" for call, _ in sent) >= 8


REFUSING = """
from llmopt.engine.kernels.common.graphs import CpuGraph
made = CpuGraph.__init__
def refuse(self, call, pool, count=[0]):
    count[0] += 1
    if count[0] > GRAPHS:
        raise RuntimeError("no memory for this graph")
    made(self, call, pool)
CpuGraph.__init__ = refuse
"""


@pytest.mark.sweep(1)
@pytest.mark.parametrize("rows", [3, 5], ids=["at the start", "within a step"])
def test_a_capture_that_fails_on_one_rank_leaves_all_eager(
    rows: int,
    expected: dict[str, list[int]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Rank 1 fails with its second graph, when both have one; or with that of 3 rows, behind 5 and 1."""
    popen = workers.subprocess.Popen

    def refusing(command: list[str], **options: Any) -> Any:
        python, flag, code, *rest = command
        refuse = REFUSING.replace("GRAPHS", "1" if rows == 3 else "2")
        return popen([python, flag, refuse + code, *rest], **options)

    monkeypatch.setattr(workers.subprocess, "Popen", refusing)
    with opened("stories3M", **{**FEW, "max_num_seqs": rows}) as (engine, sent):
        assert tokens(engine) == expected
        (line,) = [r.getMessage() for r in caplog.records if "graphs" in r.getMessage()]
        assert line == (
            "decode steps run without graphs, as capturing them failed: CaptureFailed: worker 1: "
            "RuntimeError: no memory for this graph"
        )
        calls = [call for call, _ in sent]
        assert calls.count("capture") == (rows == 5) and "replay" not in calls


@pytest.mark.whole
def test_a_capture_that_fails_on_rank_0_leaves_all_eager(
    expected: dict[str, list[int]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The other rank's reply, which has a graph, is not taken for a later one."""
    replies: list[list[str | None]] = []
    take = workers.Workers.replies
    monkeypatch.setattr(
        workers.Workers, "replies", lambda self: replies.append(take(self)) or replies[-1]
    )

    def refuse(*_: Any) -> None:
        raise MemoryError("a device that is full")

    with monkeypatch.context() as patched:
        patched.setattr("llmopt.engine.execution.graph_setting.CpuGraph", refuse)
        with opened("stories3M", **FEW) as (engine, sent):
            assert "MemoryError: a device that is full" in caplog.text
            assert tokens(engine) == expected and "replay" not in {call for call, _ in sent}
    assert replies == [[None]]


@pytest.mark.whole
def test_replayed_steps_of_several_tokens_change_no_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In Triton's interpreter, whose steps are called again in place of a graph."""
    save_model(tmp_path, "LlamaConfig", NARROW)
    options = {**OPTIONS, "max_model_len": 16, "max_num_seqs": 2, "num_blocks": 12}
    params = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
    expected = tokens(Engine(EngineConfig(tmp_path, **options)), params)
    monkeypatch.setenv(VARIABLE, "interpret")
    monkeypatch.setattr(build, "token_graph_sizes", lambda device, most: (16,))
    with opened(tmp_path, **options) as (engine, sent):
        assert tokens(engine, params) == expected
        kinds = [argument.name.kind for call, argument in sent if call == "replay"]
        assert {*kinds} == {"tokens", "decode"}


def test_inputs_are_shared_in_the_parts_that_changed() -> None:
    """A follower's tensors equal those of rank 0 after every fill, though it gets no more than what it lacks."""
    random = np.random.default_rng(0)
    leader, follower = (DecodeInputs(4, 8, 4, torch.device("cpu"), torch.float32) for _ in range(2))
    values: deque[torch.Tensor] = deque()

    def give(tensor: torch.Tensor) -> None:
        values.append(tensor.clone())

    def take(tensor: torch.Tensor) -> None:
        tensor.copy_(values.popleft())

    for _ in range(30):
        starts = random.integers(0, 30, random.integers(1, 4)).tolist()
        tables = [random.integers(1, 99, start // 4 + 1).tolist() for start in starts]
        held = [
            SimpleNamespace(state_slot=int(slot)) for slot in random.integers(0, 4, len(starts))
        ]
        batch: Any = SimpleNamespace(rows=held, starts=starts, tables=tables, block_size=4)
        rows = DecodeRows(batch, 0, has_placeholders=False, sampled=starts)
        size = int(random.integers(len(rows), 5))
        leader.fill_host(rows, size)
        unshared = leader.take_unshared()
        leader.share(unshared, give)
        follower.share(unshared, take)
        assert torch.equal(leader._columns, follower._columns)
        for row in range(size):
            begun = -(-int(leader._lengths[row]) // 4)
            assert torch.equal(leader._tables[row, :begun], follower._tables[row, :begun])
        assert leader.take_unshared() == (size, 0)
