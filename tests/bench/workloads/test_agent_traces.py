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
from llmopt.bench.workloads.workload import WorkloadItem

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
    assert links(rows(path)) == {"s#0": ("", False, 0.0), "s#1": ("s#0", True, 0.25)}
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


def lengths(item: WorkloadItem) -> list[int]:
    """Tokens that each turn of a conversation appends."""
    return [len(item.prompt_token_ids), *(len(turn.token_ids) for turn in item.turns)]


@pytest.mark.parametrize("times", [(None, None, None), (0, 1000, 1500)])
def test_a_row_of_an_aiperf_session_is_what_it_appends(
    tmp_path: Path, times: tuple[int | None, ...]
) -> None:
    sent, blocks = (1500, 20, 600), ([1, 2, 3], None, [8, 9])
    entries = [
        {"session_id": session, "timestamp": time, "input_length": n, "hash_ids": ids}
        | {"output_length": 40, "delay": None if n == 1500 else 250}
        for session in ("a", "b")
        for time, n, ids in zip(times, sent, blocks, strict=True)
    ]
    path = written(tmp_path, *entries, {"session_id": "c", "input_length": 7, "output_length": 5})
    how: dict[str, Any] = {"num_prompts": None, "max_model_len": 4096, "path": path}
    made = trace_workload(IDS, "trace", **how, replay="dependency", decode=str)
    assert [lengths(item) for item in made.items] == [[*sent], [*sent], [7]]
    whole = trace_workload(IDS, "trace", **how, replay="dependency").items
    prompts = sorted({item.prompt_token_ids for item in whole}, key=len)
    assert [len(prompt) for prompt in prompts] == [7, 1500, 1560, 1560, 2200, 2200]
    for prompt in prompts[2:]:  # the text of a session grows at its end
        assert any(prompt[: len(shorter)] == shorter for shorter in prompts if shorter != prompt)


def test_turns_of_aiperf_repeat_the_answers_before(tmp_path: Path) -> None:
    turns = [{"text": "a" * 400, "max_tokens": 50}, {"texts": ["b" * 20, "b" * 20], "delay": 300}]
    turns[1]["output_length"] = 8
    later = {"text": "c" * 80, "output_length": 9, "timestamp": 7000}
    path = written(
        tmp_path,
        {"session_id": "s", "turns": turns},
        {"session_id": "t", "turns": [{"text": "d" * 40, "max_tokens": 3}]},
        {"session_id": "s", "turns": [later]},
        *({"session_id": f"{n}", "turns": [{"text": "e", "max_tokens": 3}]} for n in range(9)),
    )
    by_name = rows(path)
    assert {name: row.parent for name, row in by_name.items() if name[0] in "st"} == {
        "s#0": "",
        "t#0": "",
        "s#1": "s#0",
        "s#2": "s#1",
    }
    assert [by_name[name].prompt_len for name in ("s#0", "s#1", "s#2")] == [100, 160, 188]
    assert by_name["s#2"].seconds == 7.0
    assert [name for name in by_name if name[0] not in "st"] == [f"{n}#0" for n in range(9)]
    made = trace_workload(IDS, "trace", num_prompts=None, max_model_len=4096, path=path, decode=str)
    assert [lengths(item) for item in made.items[:2]] == [[100, 10, 20], [10]]


def test_sessions_of_one_partial_block_append_text_of_their_own(tmp_path: Path) -> None:
    first = {"timestamp": 0, "input_length": 600, "output_length": 4, "hash_ids": [1, 2]}
    then = {"timestamp": 9, "input_length": 200, "output_length": 4}
    entries = [{"session_id": name, **row} for name in "ab" for row in (first, then)]
    path = written(tmp_path, *entries)
    made = trace_workload(IDS, "trace", num_prompts=None, max_model_len=4096, path=path).items
    whole = sorted({item.prompt_token_ids for item in made}, key=len)
    assert [len(prompt) for prompt in whole] == [600, 804, 804]
    assert whole[1][600:] != whole[2][600:]


def test_conversations_without_turns_change_nothing_and_children_must_exist(
    tmp_path: Path,
) -> None:
    turn = {"text": "e" * 40, "max_tokens": 3}
    empty: dict[str, Any] = {"session_id": "a", "turns": []}
    assert [*rows(written(tmp_path, empty, {"session_id": "b", "turns": [turn]}))] == ["b#0"]
    forked = {"session_id": "b", "turns": [{**turn, "forks": ["zz"]}]}
    with pytest.raises(BadInput, match="zz"):
        rows(written(tmp_path, forked))
    with pytest.raises(BadInput, match=r'"delay" is .x., not a number'):
        rows(written(tmp_path, {"session_id": "s", "input_length": 7, "delay": "x"}))


def test_a_spawned_conversation_is_joined_where_aiperf_joins_it(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "Plan the orchard."}]
    turns = [{"messages": messages, "max_tokens": 8} for _ in range(3)]
    helper = {"session_id": "h", "turns": [{"messages": messages, "max_tokens": 5, "delay": 2000}]}
    parents = {None: ("h#0", "r#1"), 1: ("h#0", "r#1"), 2: ("r#0", "h#0")}
    for join, expected in parents.items():
        turns[0]["spawns"] = [{"children": ["h"], "join_at": join}]
        path = written(tmp_path, {"session_id": "r", "turns": turns}, helper)
        by_name = rows(path)
        assert (by_name["r#1"].parent, by_name["r#2"].parent) == expected
    root = {"session_id": "r", "turns": [], "orchestrator": True, "spawns": ["h"]}
    with pytest.raises(BadInput, match="orchestrator, spawns of a conversation cannot be replayed"):
        read_trace("trace", written(tmp_path, root, helper))


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
