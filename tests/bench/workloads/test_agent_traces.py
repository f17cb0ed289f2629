"""Sessions of agents: files with the fields of their formats, made here.

Fields by: AIPerf's `weka/trace_models.py`, `loader/models.py` and `loader/dag_jsonl_models.py` (ai-dynamo/aiperf);
OpenTelemetry's semantic conventions for GenAI spans and OTLP's JSON; session files of Claude Code
(`~/.claude/projects`) and of Codex (`~/.codex/sessions`, `codex-rs/protocol`).
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from llmopt.bench.workloads.trace_rows import TraceRow
from llmopt.bench.workloads.traces import read_trace, trace_workload
from llmopt.quant.base.errors import BadInput

from .test_workload_traces import IDS


def written(tmp_path: Path, *entries: dict[str, Any], name: str = "trace.jsonl") -> Path:
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    return path


def clock(seconds: float) -> str:
    return datetime.fromtimestamp(1.7e9 + seconds, UTC).isoformat().replace("+00:00", "Z")


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


def otlp(name: str, above: str, start: float, end: float, **said: Any) -> dict[str, Any]:
    kinds = {int: "intValue", str: "stringValue"}
    pairs = [
        {"key": key.replace("__", "."), "value": {kinds[type(value)]: str(value)}}
        for key, value in said.items()
    ]
    nanos = {"startTimeUnixNano": str(int(start * 1e9)), "endTimeUnixNano": str(int(end * 1e9))}
    return {"traceId": "t", "spanId": name, "parentSpanId": above, "attributes": pairs, **nanos}


def chat_span(name: str, above: str, start: float, end: float, text: str = "") -> dict[str, Any]:
    messages = [{"role": "user", "parts": [{"type": "text", "content": text}]}]
    known = {"gen_ai__input__messages": json.dumps(messages)} if text else {}
    usage = {"gen_ai__usage__input_tokens": 90, "gen_ai__usage__output_tokens": 7}
    return otlp(name, above, start, end, gen_ai__operation__name="chat", **usage, **known)


def test_spans_of_agents(tmp_path: Path) -> None:
    invoke = {"gen_ai__operation__name": "invoke_agent"}
    spans = [
        otlp("main", "", 0, 20, **invoke),
        chat_span("one", "main", 1, 2, "Weigh the pears. " * 20),
        otlp("tool", "main", 2, 9, gen_ai__operation__name="execute_tool"),
        otlp("helper", "tool", 3, 8, **invoke),
        chat_span("inner", "helper", 4, 7),
        chat_span("two", "main", 10, 12, "Weigh the pears. " * 20 + "They weigh a stone. " * 9),
        {**chat_span("refused", "main", 12, 13), "status": {"code": 2}},
    ]
    path = written(tmp_path, {"resourceSpans": [{"scopeSpans": [{"spans": spans}]}]})
    found = rows(path)
    assert links(found) == {
        "one": ("", False, 0.0),
        "inner": ("one", False, 2.0),
        "two": ("inner", False, 3.0),
    }
    assert found["inner"].blocks == () and found["one"].blocks[0] == found["two"].blocks[0]
    console = {
        "name": "chat m",
        "context": {"trace_id": "0x1", "span_id": "0x2"},
        "parent_id": None,
        "start_time": clock(0),
        "end_time": clock(1.5),
        "status": {"status_code": "UNSET"},
        "attributes": {"gen_ai.usage.input_tokens": 5, "gen_ai.usage.output_tokens": 6},
    }
    path = tmp_path / "console.json"
    path.write_text(json.dumps(console, indent=4))
    (row,) = read_trace("trace", path)
    assert (row.prompt_len, row.output_len) == (5, 6)


def claude(
    uuid: str, above: str | None, seconds: float, kind: str, content: Any, **more: Any
) -> dict:
    message = {"role": kind, "content": content}
    if kind == "assistant":
        message |= {"id": f"msg_{more.pop('answer', uuid)}", "usage": more.pop("usage")}
    entry = {
        "type": kind,
        "uuid": uuid,
        "parentUuid": above,
        "sessionId": "S",
        "isSidechain": False,
    }
    return {**entry, "timestamp": clock(seconds), "message": message, **more}


def usage(new: int, read: int, output: int = 20) -> dict[str, int]:
    return {"input_tokens": new, "cache_read_input_tokens": read, "output_tokens": output}


def test_claude_code(tmp_path: Path) -> None:
    side = {"isSidechain": True, "agentId": "h1"}
    entries = [
        {"type": "summary", "summary": "x", "leafUuid": "z"},
        claude("u1", None, 0, "user", "Prune the plum tree. " * 30),
        claude(
            "a1",
            "u1",
            2,
            "assistant",
            [{"type": "text", "text": "ok"}],
            usage=usage(900, 0),
            answer="A",
        ),
        claude("a2", "a1", 3, "assistant", [{"type": "tool_use"}], usage=usage(900, 0), answer="A"),
        claude("s1", None, 3.5, "user", "Look at the roots. " * 30, **side),
        claude("s2", "s1", 5, "assistant", "roots", usage=usage(700, 0), **side),
        claude("r1", "a2", 6, "user", [{"type": "tool_result", "content": "deep"}]),
        claude("a3", "r1", 8, "assistant", "done", usage=usage(60, 900)),
        claude("i1", "a3", 8.5, "user", "[Request interrupted by user]"),
        {
            **claude("b1", None, 9, "system", ""),
            "subtype": "compact_boundary",
            "logicalParentUuid": "a3",
        },
        claude("c1", "b1", 9.5, "user", "This session continues. " * 30, isCompactSummary=True),
        claude("a4", "c1", 11, "assistant", "go on", usage=usage(500, 0)),
    ]
    found = rows(written(tmp_path, *entries))
    assert links(found) == {
        "S:msg_A": ("", False, 0.0),
        "S:msg_s2": ("S:msg_A", False, 0.5),
        "S:msg_a3": ("S:msg_s2", False, 1.0),
        "S:msg_a4": ("S:msg_a3", False, 1.5),
    }
    first, helper, third, compacted = found.values()
    assert (first.prompt_len, third.prompt_len) == (900, 960)
    assert third.cancel_seconds == 2.0 and compacted.cancel_seconds is None
    whole = 900 * 4 // 64
    assert third.blocks[:whole] == first.blocks[:whole] != helper.blocks[:whole]
    assert compacted.blocks[:44] == first.blocks[:44]
    assert not set(compacted.blocks[48:]) & set(first.blocks)


def codex(seconds: float, kind: str, **payload: Any) -> dict[str, Any]:
    return {"timestamp": clock(seconds), "type": kind, "payload": payload}


def said(seconds: float, role: str, text: str) -> dict[str, Any]:
    kind = "output_text" if role == "assistant" else "input_text"
    content = [{"type": kind, "text": text}]
    return codex(seconds, "response_item", type="message", role=role, content=content)


def counted(seconds: float, total: int, prompt: int) -> dict[str, Any]:
    info = {
        "total_token_usage": {"total_tokens": total},
        "last_token_usage": {"input_tokens": prompt, "cached_input_tokens": 0, "output_tokens": 12},
    }
    return codex(seconds, "event_msg", type="token_count", info=info)


def test_codex_in_a_folder_of_threads(tmp_path: Path) -> None:
    output = {"type": "function_call_output", "call_id": "c", "output": "12 kg of medlars"}
    main = [
        codex(0, "session_meta", id="M", source="cli"),
        said(1, "user", "Weigh the medlars. " * 30),
        codex(1.1, "event_msg", type="token_count", info=None),
        codex(2, "response_item", type="function_call", name="scale", arguments="{}", call_id="c"),
        counted(2.5, 812, 800),
        counted(2.6, 812, 800),
        codex(9, "response_item", **output),
        said(10, "assistant", "Twelve."),
        counted(10.5, 1700, 850),
        codex(11, "compacted", message="The medlars weigh twelve. " * 9),
        said(12, "user", "And the quinces?"),
        counted(13, 2000, 300),
    ]
    spawn = {"subagent": {"thread_spawn": {"parent_thread_id": "M", "depth": 1}}}
    helper = [
        codex(3, "session_meta", id="H", source=spawn),
        said(3.5, "user", "Find a scale. " * 30),
        said(5, "assistant", "Found."),
        counted(6, 500, 480),
    ]
    written(tmp_path, *main, name="sessions/rollout-a.jsonl")
    written(tmp_path, *helper, name="sessions/rollout-b.jsonl")
    found = rows(tmp_path / "sessions")
    assert links(found) == {
        "M#0": ("", False, 0.0),
        "H#0": ("M#0", False, 1.0),
        "M#1": ("H#0", False, 3.0),
        "M#2": ("M#1", False, 1.5),
    }
    alone = rows(tmp_path / "sessions" / "rollout-a.jsonl")
    assert links(alone)["M#1"] == ("M#0", True, 6.5)


def test_what_is_missing_is_said(tmp_path: Path) -> None:
    path = written(tmp_path, {"id": "w", "block_size": 64, "requests": [{"t": 0, "type": "n"}]})
    with pytest.raises(BadInput, match=r"weka without KeyError: 'in'"):
        read_trace("trace", path)
    with pytest.raises(BadInput, match="has no known form"):
        read_trace("trace", written(tmp_path, {"what": "else"}))
