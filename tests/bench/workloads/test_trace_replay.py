"""Replays against the runs that were recorded, on a server whose clock is simulated; and their links."""

from __future__ import annotations

import json
import random
import zlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from llmopt.base.errors import BadInput
from llmopt.bench.options.options import BenchOptions
from llmopt.bench.session.target_sessions import EngineSession
from llmopt.bench.workloads.datasets import (
    build_workload,
    freeze_workload,
    read_frozen,
    write_frozen,
)
from llmopt.bench.workloads.traces import Replay, read_trace, trace_workload
from llmopt.bench.workloads.workload import ConversationTurn, Message, Workload, WorkloadItem
from llmopt.quant.source.load_processor import load_tokenizer
from llmopt.quant.source.models import resolve_model

from .simulated import Served, SimulatedRun
from .test_workload_traces import IDS

QUANTILES = (50, 90, 99)
BLOCK = 16


def agents(seed: int, sessions: int = 26) -> Workload:
    """Sessions of an agent with tool gaps, and sub-agents; all share a system prompt."""
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
        items.append(WorkloadItem(name, prompt, drawn.randint(30, 90), clock, turns=turns))
        for turn in range(drawn.randint(0, 2)):
            helper = WorkloadItem(
                f"bench-{len(items)}", text(1200), 60, after=(name, turn), gap_seconds=0.2
            )
            items.append(helper)
    return Workload("custom", "test", tuple(items), is_timed=True)


def block_ids(tokens: Sequence[int]) -> list[int]:
    """Ids of the blocks of a prompt: equal ids are equal prefixes, as in a prefix cache."""
    ids, crc = [], 0
    for start in range(0, len(tokens), BLOCK):
        crc = zlib.crc32(repr(tokens[start : start + BLOCK]).encode(), crc)
        ids.append(crc)
    return ids


def recorded(workload: Workload, served: Sequence[Served], path: Path) -> Path:
    """Write a run in WEKA's form: a document for each session, with its sub-agents nested in it."""
    calls: dict[str, list[dict[str, Any]]] = {}
    for one in served:
        call = {"t": one.trace.sent, "type": "n", "api_time": one.end - one.trace.sent}
        call |= {"in": len(one.prompt), "out": one.trace.wanted_len}
        name = one.trace.request_id.partition("/")[0]
        calls.setdefault(name, []).append({**call, "hash_ids": block_ids(one.prompt)})
    for item in workload.items:
        if item.after is not None:
            inner = calls.pop(item.request_id)
            entry = {"t": inner[0]["t"], "type": "subagent", "agent_id": item.request_id}
            calls[item.after[0]].append({**entry, "requests": inner})
    head = {"block_size": BLOCK, "hash_id_scope": "global"}
    lines = [json.dumps({"id": name, **head, "requests": own}) for name, own in calls.items()]
    path.write_text("".join(line + "\n" for line in lines))
    return path


def figures(served: Sequence[Served]) -> dict[str, float]:
    found = {"hits": sum(o.cached for o in served) / sum(len(o.prompt) for o in served)}
    for name in ("ttft", "tpot"):
        values = [getattr(one.trace, name) for one in served]
        found |= {f"{name} p{q}": float(np.percentile(values, q)) for q in QUANTILES}
    return found


@pytest.mark.parametrize("how", ["arrival", "dependency"])
def test_a_replay_has_the_hits_and_latencies_of_the_run(tmp_path: Path, how: Replay) -> None:
    workload = agents(7)
    original = SimulatedRun(workload).run()
    path = recorded(workload, original, tmp_path / "trace.jsonl")
    again = trace_workload(
        IDS, "trace", num_prompts=None, max_model_len=65536, path=path, replay=how, decode=str
    )
    assert again.num_requests == len(original) > 130
    replayed = SimulatedRun(again).run()
    before, after = figures(original), figures(replayed)
    assert before["hits"] > 0.6
    assert after.pop("hits") == pytest.approx(before.pop("hits"), abs=0.02)
    assert after == pytest.approx(before, rel=0.1)


def test_dependency_follows_a_slower_server_and_arrival_does_not(tmp_path: Path) -> None:
    workload = agents(3, sessions=6)
    original = SimulatedRun(workload).run()
    rows = read_trace("trace", recorded(workload, original, tmp_path / "trace.jsonl"))
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
    """A trace of a session with a compaction, and of a request of its own."""
    call = {"type": "n", "out": 4, "api_time": 0.1}
    session = [
        {**call, "t": 0.0, "in": 60, "hash_ids": [1, 2]},
        {**call, "t": 0.15, "in": 90, "hash_ids": [1, 2, 3]},
        {**call, "t": 0.27, "in": 50, "hash_ids": [1, 9]},
    ]
    lone = [{**call, "t": 0.1, "in": 40, "out": 400}]
    path = tmp_path / "linked.jsonl"
    lines = [
        json.dumps({"id": name, "block_size": 30, "requests": own})
        for name, own in (("a", session), ("d", lone))
    ]
    path.write_text("\n".join(lines))
    return path


def test_the_engine_is_sent_turns_links_and_cancellations(tmp_path: Path) -> None:
    made = build_workload(
        BenchOptions(
            dataset="sharegpt",  # as the command line gives it
            trace=linked_workload(tmp_path),
            trace_replay="dependency",
        ),
        load_tokenizer(resolve_model(None)),
        512,
    )
    first, lone, after = made.items
    assert len(first.turns) == 1 and after.after == ("bench-0", 1)
    # A client that leaves, as frozen workloads may have one; no processor makes 400 tokens in it.
    leaving = replace(lone, cancel_seconds=0.001)
    write_frozen(replace(made, items=(first, leaving, after)), tmp_path / "frozen.jsonl", model="m")
    options = BenchOptions(
        dataset=str(tmp_path / "frozen.jsonl"), num_runs=1, num_warmups=0, num_threads=1
    )
    session = EngineSession(options)
    assert session.run_pass()
    (load,) = session.passes
    assert load.cancelled == 1 and all(trace.success for trace in load.traces)
    one, two, three = load.traces
    assert two.scheduled == pytest.approx(one.ended + 0.05)
    assert three.scheduled == pytest.approx(two.ended + 0.02)
    assert [trace.prompt_len for trace in load.traces] == [60, 90, 50]
    assert two.cached_tokens is not None and two.cached_tokens >= 32


def test_a_linked_trace_is_frozen_and_read(tmp_path: Path) -> None:
    options = BenchOptions(trace=linked_workload(tmp_path), trace_replay="dependency")
    made = freeze_workload(options, tmp_path / "frozen.jsonl")
    tokenizer = load_tokenizer(resolve_model(None))
    found = read_frozen(tmp_path / "frozen.jsonl", tokenizer, max_model_len=512)
    assert found.items == made.items
    other = replace(made.items[-1], gap_seconds=9.0)
    assert replace(made, items=(*made.items[:-1], other)).sha256 != made.sha256


def test_a_prompt_that_is_sent_as_text_keeps_its_length(tmp_path: Path) -> None:
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
    from llmopt.bench.load.driver import Body
    from llmopt.bench.load.exchange import MARK
    from llmopt.bench.options.values import CHAT

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


def test_options_of_a_trace() -> None:
    with pytest.raises(BadInput, match="is the data set: leave --dataset away"):
        build_workload(BenchOptions(dataset="random", trace=Path("t.jsonl")), IDS, 512)
    assert BenchOptions(trace_replay="by-dependency").trace_replay == "dependency"
    with pytest.raises(BadInput, match="no known form"):
        read_trace("trace", Path(__file__))


def test_prompts_of_text_share_the_tokens_that_they_shared(tmp_path: Path) -> None:
    """A block that is not full has no more tokens than its text; what two prompts share ends at a block."""
    system, path = "s" * 2800, tmp_path / "text.jsonl"
    tasks = ("abc" * 30, "def" * 90, "x" * 16, "x" * 16)
    lines = [
        {"session_id": f"{number}", "turns": [{"text": system + task, "max_tokens": 4}]}
        for number, task in enumerate(tasks)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = trace_workload(IDS, "trace", num_prompts=None, max_model_len=4096, path=path)
    by_length = sorted((item.prompt_token_ids for item in found.items), key=len)
    whole, again, one, two = by_length
    assert whole == again and len(two) == (2800 + 270 + 3) // 4
    shared = next(place for place, (a, b) in enumerate(zip(one, two, strict=False)) if a != b)
    # Four bytes a token, 64 a block.
    assert (2800 - 64) / 4 < shared + 1 <= 2800 / 4 + 1
