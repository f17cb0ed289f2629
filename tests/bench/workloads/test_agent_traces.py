"""Sessions of agents: files with the fields of their formats, made here.

Fields by: AIPerf's `weka/trace_models.py`, `loader/models.py` and `loader/dag_jsonl_models.py` (ai-dynamo/aiperf).
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from llmopt.base.errors import BadInput
from llmopt.bench.workloads.trace_rows import TraceRow
from llmopt.bench.workloads.traces import read_trace, trace_workload

from .test_workload_traces import IDS


def written(tmp_path: Path, *entries: dict[str, Any]) -> Path:
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    return path


def rows(path: Path) -> dict[str, TraceRow]:
    """By name; times from the first."""
    return {row.name: row for row in read_trace("trace", path)}


def links(found: dict[str, TraceRow]) -> dict[str, tuple[str, bool, float]]:
    return {name: (row.parent, row.extends, round(row.gap, 3)) for name, row in found.items()}


def weka_call(t: float, size: int, ids: Iterable[int], kind: str = "s") -> dict[str, Any]:
    return {
        "t": t,
        "type": kind,
        "model": "m",
        "in": size,
        "out": 9,
        "hash_ids": [*ids],
        "api_time": 1.0,
    }


def test_weka_nests_sub_agents(tmp_path: Path) -> None:
    inner = [weka_call(0.5, 128, [7, 8], "n"), weka_call(2.0, 192, [7, 8, 9])]
    agent = {
        "t": 3.0,
        "type": "subagent",
        "agent_id": "a1",
        "status": "completed",
        "requests": inner,
    }
    calls = [weka_call(1.0, 130, [1, 2, 3]), agent, weka_call(8.0, 192, [1, 2, 4])]
    trace = {"id": "w", "block_size": 64, "hash_id_scope": "local", "requests": calls}
    path = tmp_path / "weka.json"
    path.write_text(json.dumps(trace, indent=1))
    found = rows(path)
    assert links(found) == {
        "w#0": ("", False, 0.0),
        "w/a1#0": ("w#0", False, 1.5),
        "w/a1#1": ("w/a1#0", True, 0.5),
        "w#2": ("w/a1#1", False, 2.0),
    }
    assert found["w#0"].block_tokens == 64 and found["w#0"].prompt_len == 130
    other = written(tmp_path, {**trace, "id": "v"}, {**trace, "id": "u", "hash_id_scope": "global"})
    assert rows(other)["u#0"].blocks == (1, 2, 3) != rows(other)["v#0"].blocks
    made = trace_workload(
        IDS,
        "trace",
        num_prompts=None,
        max_model_len=4096,
        path=path,
        replay="dependency",
        decode=str,
    )
    assert [len(item.turns) for item in made.items] == [0, 1, 0] and made.num_requests == 4


def test_aiperf_sessions_and_graphs(tmp_path: Path) -> None:
    session = {"session_id": "s", "output_length": 4}
    path = written(
        tmp_path,
        {**session, "timestamp": 1000, "input_length": 512, "hash_ids": [1]},
        {**session, "delay": 250, "input_length": 700, "hash_ids": [1, 2]},
    )
    assert links(rows(path)) == {"s#0": ("", False, 0.0), "s#1": ("s#0", False, 0.25)}
    said = [{"role": "user", "content": "Plan the orchard. " * 20}]
    child = [{"role": "user", "content": "Count the trees. " * 20}]
    path = written(
        tmp_path,
        {
            "session_id": "root",
            "turns": [
                {"messages": said, "max_tokens": 8, "spawns": [{"children": ["helper"]}]},
                {"messages": said, "max_tokens": 8, "delay": 100.0, "forks": ["branch"]},
            ],
        },
        {"session_id": "helper", "turns": [{"messages": child, "max_tokens": 5, "delay": 2000}]},
        {"session_id": "branch", "turns": [{"messages": child, "max_tokens": 5}]},
    )
    found = rows(path)
    assert {name: row.parent for name, row in found.items()} == {
        "root#0": "",
        "helper#0": "root#0",
        "root#1": "helper#0",
        "branch#0": "root#1",
    }
    shared = found["root#1"].blocks
    assert found["branch#0"].blocks[: len(shared) - 1] == shared[:-1]
    assert found["helper#0"].blocks[0] != shared[0]


def test_alibabas_traces_have_seconds_and_small_blocks(tmp_path: Path) -> None:
    call = {"parent_chat_id": -1, "type": "text", "turn": 1, "output_length": 9}
    first = {"chat_id": 159, "timestamp": 61.5, "input_length": 40, "hash_ids": [7, 8, 9]}
    again = {"chat_id": 160, "timestamp": 63.0, "input_length": 40, "hash_ids": [7, 8, 5]}
    path = written(tmp_path, {**call, **first}, {**call, **again})
    assert [row.seconds for row in read_trace("trace", path)] == [61.5, 63.0]
    made = trace_workload(IDS, "trace", num_prompts=None, max_model_len=4096, path=path)
    first, second = (item.prompt_token_ids for item in made.items)
    assert first[:32] == second[:32] and first[32:] != second[32:]


def test_blocks_of_another_size_are_refused(tmp_path: Path) -> None:
    row = {"timestamp": 0, "input_length": 130, "output_length": 4, "hash_ids": [1, 2, 3]}
    with pytest.raises(BadInput, match="3 blocks of 512 for 130 tokens"):
        read_trace("trace", written(tmp_path, row))


def test_what_is_missing_is_said(tmp_path: Path) -> None:
    path = written(tmp_path, {"id": "w", "block_size": 64, "requests": [{"t": 0, "type": "n"}]})
    with pytest.raises(BadInput, match=r"weka without KeyError: 'in'"):
        read_trace("trace", path)
    with pytest.raises(BadInput, match="has no known form"):
        read_trace("trace", written(tmp_path, {"what": "else"}))


@pytest.mark.parametrize("line", ['{"id": "w"', "NaN NaN"])
def test_a_line_that_is_cut_off_is_refused(tmp_path: Path, line: str) -> None:
    path = written(tmp_path, {"id": "w", "block_size": 64, "requests": [weka_call(0.0, 64, [1])]})
    path.write_text(path.read_text().rstrip("\n") + "\n" + line)
    with pytest.raises(BadInput, match=r"trace\.jsonl, line 2: not JSON"):
        read_trace("trace", path)


@pytest.mark.parametrize(
    "entry",
    [
        {"llmopt_trace": 1},
        {"type": "session_meta", "payload": {}},
        {"sessionId": "s", "uuid": "u", "type": "user"},
        {"resourceSpans": []},
    ],
)
def test_other_sessions_are_no_known_form(tmp_path: Path, entry: dict[str, Any]) -> None:
    with pytest.raises(BadInput, match="has no known form"):
        read_trace("trace", written(tmp_path, entry))
