"""Replays against the runs that were recorded, on a server whose clock is simulated; and their links."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from llmopt.bench.load.trace_writer import Passed, TraceWriter
from llmopt.bench.options.options import BenchOptions
from llmopt.bench.session.engine_session import EngineSession
from llmopt.bench.workloads.datasets import build_workload, freeze_workload
from llmopt.bench.workloads.traces import Replay, read_trace, trace_workload
from llmopt.bench.workloads.workload import ConversationTurn, Message, Workload, WorkloadItem
from llmopt.quant.base.errors import BadInput

from .simulated import Served, SimulatedRun
from .test_workload_traces import IDS

QUANTILES = (50, 90, 99)


def agents(seed: int, sessions: int = 26) -> Workload:
    """Sessions of an agent with tool gaps, sub-agents, and clients that leave; all share a system prompt."""
    drawn = random.Random(seed)
    system = tuple(drawn.randrange(3, 32000) for _ in range(2400))

    def text(length: float) -> tuple[int, ...]:
        return tuple(drawn.randrange(3, 32000) for _ in range(round(length)))

    items: list[WorkloadItem] = []
    clock = 0.0
    for _ in range(sessions):
        clock += drawn.expovariate(1 / 6)
        name, prompt = f"bench-{len(items)}", system + text(drawn.uniform(100, 700))
        turns = tuple(
            ConversationTurn(
                text(drawn.lognormvariate(6, 0.7)),
                drawn.randint(20, 110),
                (Message("user", "x"),),
                drawn.expovariate(1.5),
            )
            for _ in range(drawn.randint(2, 9))
        )
        leaves = drawn.uniform(0.3, 1.2) if drawn.random() < 0.15 else None
        items.append(
            WorkloadItem(
                name, prompt, drawn.randint(30, 90), clock, turns=turns, cancel_seconds=leaves
            )
        )
        for turn in range(drawn.randint(0, 2)):
            helper = WorkloadItem(
                f"bench-{len(items)}", text(1200), 60, after=(name, turn), gap_seconds=0.2
            )
            items.append(helper)
    return Workload("custom", "test", tuple(items), is_timed=True)


def recorded(served: Sequence[Served], path: Path, *, as_text: bool = False) -> Path:
    """Write a run as `llmopt record` does; `as_text` with a character of two or three bytes a token."""
    writer = TraceWriter(path, salt=b"s", keep_text=False)
    for one in sorted(served, key=lambda one: one.end):
        usage = {"prompt_tokens": len(one.prompt), "completion_tokens": one.trace.output_len}
        prompt = "".join(chr(256 + token) for token in one.prompt) if as_text else one.prompt
        body = {"prompt": prompt, "max_tokens": one.trace.wanted_len}
        passed = Passed(one.trace.sent, "/v1/completions", "c", {}, json.dumps(body).encode(), 200)
        passed.chunks = [json.dumps({"usage": usage}).encode()]
        passed.seconds = one.end - one.trace.sent
        passed.ended = "whole" if one.left is None else "cancelled"
        writer.add(passed)
    writer.close()
    return path


def figures(served: Sequence[Served]) -> dict[str, float]:
    done = [one for one in served if one.left is None]
    found = {"hits": sum(o.cached for o in done) / sum(len(o.prompt) for o in done)}
    for name in ("ttft", "tpot"):
        values = [getattr(one.trace, name) for one in done]
        found |= {f"{name} p{q}": float(np.percentile(values, q)) for q in QUANTILES}
    return found


@pytest.mark.parametrize(
    "how, as_text", [("arrival", False), ("dependency", False), ("dependency", True)]
)
def test_a_replay_has_the_hits_and_latencies_of_the_run(
    tmp_path: Path, how: Replay, as_text: bool
) -> None:
    original = SimulatedRun(agents(7)).run()
    path = recorded(original, tmp_path / "trace.jsonl", as_text=as_text)
    again = trace_workload(
        IDS, "trace", num_prompts=None, max_model_len=65536, path=path, replay=how, decode=str
    )
    assert again.num_requests == len(original) > 130
    replayed = SimulatedRun(again).run()
    before, after = figures(original), figures(replayed)
    assert before["hits"] > 0.6
    assert after.pop("hits") == pytest.approx(before.pop("hits"), abs=0.02)
    assert after == pytest.approx(before, rel=0.1)
    left = sum(one.left is not None for one in original)
    assert left and abs(sum(one.left is not None for one in replayed) - left) <= 1


def test_dependency_follows_a_slower_server_and_arrival_does_not(tmp_path: Path) -> None:
    original = SimulatedRun(agents(3, sessions=6)).run()
    rows = read_trace("trace", recorded(original, tmp_path / "trace.jsonl"))
    by_name = {row.name: row for row in rows}
    linked = [row for row in rows if row.parent]
    assert len(linked) > len(rows) / 2 and any(row.extends for row in linked)
    common = {"num_prompts": None, "max_model_len": 65536, "path": tmp_path / "trace.jsonl"}
    found = trace_workload(IDS, "trace", replay="dependency", speed=2.0, **common)
    waiting = [item for item in found.items if item.after is not None]
    assert len(waiting) == len(linked)
    for row, item in zip(rows, found.items, strict=True):
        assert len(item.prompt_token_ids) == row.prompt_len
        assert item.gap_seconds == pytest.approx(row.gap / 2)
        if row.parent:
            assert (
                item.after is not None
                and item.after[0] == f"bench-{rows.index(by_name[row.parent])}"
            )
    assert any("wait for the one" in note for note in found.notes)
    plain = trace_workload(IDS, "trace", **common)
    assert not any(item.after or item.turns for item in plain.items)
    assert any("answers to requests before" in note for note in plain.notes)


def linked_workload(tmp_path: Path) -> Path:
    """A trace of a session with a compaction, and of a client that leaves."""
    rows = [
        {"llmopt_trace": 1},
        {"id": "a", "hash_ids": [1, 2], "prompt_tokens": 60, "output_tokens": 4, "arrival": 0.0},
        {
            "id": "b",
            "hash_ids": [1, 2, 3],
            "prompt_tokens": 90,
            "output_tokens": 4,
            "arrival": 0.3,
            "parent": "a",
            "extends": True,
            "gap": 0.05,
        },
        {
            "id": "c",
            "hash_ids": [1, 9],
            "prompt_tokens": 50,
            "output_tokens": 4,
            "arrival": 0.5,
            "parent": "b",
            "gap": 0.02,
        },
        {
            "id": "d",
            "prompt_tokens": 40,
            "output_tokens": 1,
            "max_tokens": 400,
            "arrival": 0.1,
            "ended": "cancelled",
            "seconds": 0.001,  # no processor makes 400 tokens in it
        },
    ]
    path = tmp_path / "linked.jsonl"
    lines = [{"status": 200, "seconds": 0.1, **row} for row in rows]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_the_engine_is_sent_turns_links_and_cancellations(tmp_path: Path) -> None:
    path = linked_workload(tmp_path)
    options = BenchOptions(
        dataset="sharegpt",  # as the command line gives it
        trace=path,
        trace_replay="dependency",
        num_runs=1,
        num_warmups=0,
        num_threads=1,
    )
    session = EngineSession(options)
    first, left, after = session.workload.items
    assert len(first.turns) == 1 and after.after == ("bench-0", 1) and left.cancel_seconds == 0.001
    assert session.run_pass()
    (load,) = session.passes
    assert load.cancelled == 1 and all(trace.success for trace in load.traces)
    one, two, three = load.traces
    assert two.scheduled == pytest.approx(one.ended + 0.05)
    assert three.scheduled == pytest.approx(two.ended + 0.02)
    assert [trace.prompt_len for trace in load.traces] == [60, 90, 50]
    assert two.cached_tokens >= 32


def test_a_linked_trace_is_frozen_and_read(tmp_path: Path) -> None:
    options = BenchOptions(trace=linked_workload(tmp_path), trace_replay="dependency")
    made = freeze_workload(options, tmp_path / "frozen.jsonl")
    from llmopt.bench.workloads.datasets import read_frozen
    from llmopt.quant.load_processor import load_tokenizer
    from llmopt.quant.models import resolve_model

    tokenizer = load_tokenizer(resolve_model(None))
    found = read_frozen(tmp_path / "frozen.jsonl", tokenizer, max_model_len=512)
    assert found.items == made.items
    other = replace(made.items[-1], gap_seconds=9.0)
    assert replace(made, items=(*made.items[:-1], other)).sha256 != made.sha256


def test_a_prompt_that_is_sent_as_text_keeps_its_length(tmp_path: Path) -> None:
    from llmopt.quant.load_processor import load_tokenizer
    from llmopt.quant.models import resolve_model

    tokenizer = load_tokenizer(resolve_model(None))
    options = BenchOptions(
        trace=linked_workload(tmp_path), base_url="http://127.0.0.1:1", backend="openai-chat"
    )
    found = build_workload(options, tokenizer, 512).items
    assert sum(map(len, (item.prompt_token_ids for item in found))) < 60 + 50 + 90 + 40
    for item in found:
        said = tokenizer.decode(item.prompt_token_ids)
        length = len(tokenizer.encode(said, add_special_tokens=False))
        assert length == pytest.approx(len(item.prompt_token_ids), abs=2)


def test_conversations_and_single_chats_share_their_prefix(tmp_path: Path) -> None:
    """Both are sent with the mark of the pass in the place of their first token."""
    from llmopt.bench.load.address import CHAT
    from llmopt.bench.load.driver import Body
    from llmopt.bench.load.exchange import MARK
    from llmopt.quant.load_processor import load_tokenizer
    from llmopt.quant.models import resolve_model

    tokenizer = load_tokenizer(resolve_model(None))
    options = BenchOptions(
        trace=linked_workload(tmp_path), base_url="http://127.0.0.1:1", backend="openai-chat"
    )
    items = build_workload(options, tokenizer, 512).items
    assert len({bool(item.turns) for item in items}) == 2
    body = Body("m", CHAT, tokenizer.decode)
    for item in items:
        sent = json.loads(body.encode(item).body.replace(MARK, body.mark(item.prompt_token_ids[0])))
        assert sent["messages"][0]["content"] == tokenizer.decode(item.prompt_token_ids)


def test_a_client_that_left_before_its_answer_is_replayed(tmp_path: Path) -> None:
    """An uncounted prompt has as many tokens as its blocks have in requests that the server counted."""
    counted = {"id": "a", "hash_ids": [1, 2, 3, 4], "prompt_tokens": 400, "output_tokens": 4}
    left = {"id": "b", "hash_ids": [1, 2, 3, 4, 5], "prompt_tokens": 140, "output_tokens": 0}
    left |= {"tokens_by": "estimate", "ended": "cancelled", "status": 0, "max_tokens": 80}
    refused = {**counted, "id": "c", "status": 400}
    path = tmp_path / "left.jsonl"
    rows: list[dict[str, Any]] = [{"llmopt_trace": 1, "block": {"bytes": 128, "token_ids": 32}}]
    rows += [
        {"status": 200, "arrival": 0.1 * place, "seconds": 0.3, "tokens_by": "usage", **row}
        for place, row in enumerate((counted, left, refused))
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    first, second = read_trace("trace", path)
    assert (first.prompt_len, first.cancel_seconds) == (400, None)
    assert (second.prompt_len, second.output_len, second.cancel_seconds) == (500, 80, 0.3)


def test_options_of_a_trace() -> None:
    with pytest.raises(BadInput, match="is the data set: leave --dataset away"):
        build_workload(BenchOptions(dataset="random", trace=Path("t.jsonl")), IDS, 512)
    assert BenchOptions(trace_replay="by-dependency").trace_replay == "dependency"
    with pytest.raises(BadInput, match="no known form"):
        read_trace("trace", Path(__file__))


@pytest.mark.parametrize("tokens_of", [1, 3])
def test_prompts_of_text_share_the_tokens_that_they_shared(tmp_path: Path, tokens_of: int) -> None:
    """A block that is not full has no more tokens than its text; what two prompts share ends at a block."""
    system, paths = "s" * 2800, tmp_path / "text.jsonl"
    writer = TraceWriter(paths, salt=b"s", keep_text=False)
    for number, task in enumerate(("abc" * 30, "def" * 90, "x" * 16, "x" * 16)):
        body = {"prompt": system + task, "max_tokens": 4}
        passed = Passed(number, "/v1/completions", "c", {}, json.dumps(body).encode(), 200)
        counts = {"prompt_tokens": len(system + task) // tokens_of, "completion_tokens": 4}
        passed.chunks = [json.dumps({"usage": counts}).encode()]
        writer.add(passed)
    writer.close()
    found = trace_workload(IDS, "trace", num_prompts=None, max_model_len=4096, path=paths)
    one, two, whole, again = found.items
    assert whole.prompt_token_ids == again.prompt_token_ids
    pairs = zip(one.prompt_token_ids, two.prompt_token_ids, strict=False)
    shared = next(place for place, (a, b) in enumerate(pairs) if a != b)
    assert len(system) / tokens_of - 64 / tokens_of < shared + 1 <= len(system) // tokens_of + 1
