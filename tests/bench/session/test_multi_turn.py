"""Conversations on the bundled model: the prefix cache's hits against block arithmetic, in process and served."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import typer
from llmopt.bench.options.options import BenchOptions
from llmopt.bench.record.run_record import conversations_part
from llmopt.bench.session.run_sessions import run_bench
from llmopt.bench.session.target_sessions import EngineSession
from llmopt.cli.bench import bench
from llmopt.cli.freeze import freeze
from llmopt.cli.main import run_guarded
from llmopt.engine.config.config import EngineConfig
from llmopt.engine.core.engine import Engine

from ...support.live_server import RunningServer, running
from ...support.simulated_clock import simulated_clock

SIZE = 16
TALKS: dict[str, Any] = {
    "model": "stories260K",
    "quality": False,
    "num_runs": 1,
    "num_warmups": 2,
    "num_prompts": 6,
    "output_len": 10,
    "num_threads": 1,
    "block_size": SIZE,
}


def small_engine() -> Engine:
    return Engine(EngineConfig(model="stories260K", num_threads=1, block_size=SIZE))


@pytest.fixture(scope="module")
def engine() -> Engine:
    return small_engine()


@pytest.fixture(scope="module")
def server(engine: Engine) -> Iterator[RunningServer]:
    with running(engine) as live:
        yield live


def llmopt(*words: str | Path) -> int:
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(bench)
    app.command()(freeze)
    return run_guarded(lambda: app(list(map(str, words)), standalone_mode=False), debug=False)


def counted_by_length(traces: list[Any]) -> int:
    """Hit tokens by lengths alone: of each later turn the full blocks of the prompt and answer before it, without
    the answer's last token, which is never computed."""
    threads = defaultdict(list)
    for trace in traces:
        threads[trace.conversation].append(trace)
    hits = 0
    for thread in threads.values():
        for before, now in pairwise(thread):
            held = before.prompt_len + before.output_len - 1
            hits += min(held, now.prompt_len - 1) // SIZE * SIZE
    return hits


@pytest.mark.sweep(2)
@pytest.mark.parametrize("history", ["model", "dataset"])
@pytest.mark.parametrize("concurrency", [1, 3])
def test_hit_rate_equals_the_count_from_the_conversations(
    engine: Engine, history: str, concurrency: int
) -> None:
    options = BenchOptions(
        **TALKS, multi_turn=True, multi_turn_history=history, max_concurrency=concurrency
    )
    with EngineSession(options, engine=engine) as session:
        assert session.run_pass()
    (load,), workload = session.passes, session.workload
    rate = session.measured.prefix_cache_hit_rate
    assert workload.num_requests == len(load.traces) > 12
    assert all(trace.success for trace in load.traces)
    prompt_tokens = sum(trace.prompt_len for trace in load.traces)
    assert prompt_tokens == workload.prompt_tokens
    part = conversations_part([load], workload, SIZE)["conversations"]
    assert rate == part["expected_prefix_cache_hit_rate"]
    if history == "model":
        hits = counted_by_length(load.traces)
        assert rate == hits / prompt_tokens > 0
        assert sum(trace.cached_tokens or 0 for trace in load.traces) == hits
    # The first turn shares nothing, every later one hits.
    rates = [turn["prefix_cache_hit_rate"] for turn in part["turns"]]
    assert rates[0] == 0 and all(rate > 0 for rate in rates[1:])


def test_shared_system_prompts_are_counted_too() -> None:
    sizes = {"agentic_num_turns": 3, "agentic_system_len": 64, "agentic_output_len": 6}
    options = BenchOptions(
        **{**TALKS, "output_len": None}, **sizes, dataset="agentic", max_concurrency=1
    )
    record = run_bench(options).result["llmopt"]
    part = record["conversations"]
    assert record["prefix_cache_hit_rate"] == part["expected_prefix_cache_hit_rate"]
    # Five of six sessions find the system prompt of the first.
    assert part["turns"][0]["prefix_cache_hit_rate"] > 0.3
    assert [turn["completed"] for turn in part["turns"]] == [6, 6, 6]


def test_the_report_shows_turns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--multi-turn", "--num-prompts", "4", "--output-len", "6", "--num-runs", "1"]
    words += ["--no-quality", "--num-threads", "1", "--think-time", "uniform:0:0.01"]
    assert llmopt("bench", "stories260K", *words, "-o", tmp_path / "run") == 0
    said = " ".join(capsys.readouterr().out.split())
    assert re.search(r"4 conversations; turn 1: median TTFT .* turn \d: ", said)
    folder = tmp_path / "run"
    page = (folder / "report.html").read_text()
    assert "Conversation turns" in page and "8 conversations at a time" in page
    assert (folder / "turns.svg").is_file()
    table = pq.read_table(folder / "requests.parquet").to_pydict()
    assert set(table["conversation"]) == {f"bench-{n}" for n in range(4)}
    assert max(table["turn"]) > 1 and not any(table["drained"])


def test_a_frozen_thread_runs_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "talks.jsonl"
    build = ["--multi-turn", "--num-prompts", "3", "--output-len", "5"]
    assert llmopt("freeze", "stories260K", *build, "-o", path) == 0
    head = json.loads(path.read_text().splitlines()[0])
    run = ["--dataset", path, "--no-quality", "--num-runs", "1", "--num-threads", "1"]
    assert llmopt("bench", "stories260K", *run, "-o", tmp_path / "run") == 0
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["llmopt"]["identity"]["workload_sha256"] == head["sha256"]
    assert result["completed"] == head["num_requests"] > 3
    assert result["llmopt"]["conversations"]["num_conversations"] == 3


def test_a_fixed_duration_repeats_and_drains() -> None:
    options = BenchOptions(
        **{**TALKS, "num_prompts": 1, "output_len": 4}, duration=0.4, max_concurrency=1
    )
    with simulated_clock():
        run = run_bench(options)
    (load,) = run.passes
    record = run.result["llmopt"]
    assert run.result["duration"] == 0.4 and record["window"]["seconds"] == [0.4]
    assert record["window"]["cycles"][0] > 1 and all(t.scheduled < 0.4 for t in load.traces)
    assert record["window"]["sent"] == [len(load.traces)] == [run.result["completed"]]
    # No cycle finds the prompts of another in the prefix cache.
    assert record["prefix_cache_hit_rate"] == 0.0
    within = sum(
        count
        for trace in load.traces
        for time, count in zip(trace.chunk_times, trace.chunk_tokens, strict=True)
        if time <= 0.4
    )
    assert run.result["total_output_tokens"] == within <= 4 * len(load.traces)


def watched(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> dict[str, list[list[int]]]:
    """What the engine is given and what it generates: {request id: [prompt, answer]}."""
    seen: dict[str, list[list[int]]] = {}
    add, step = engine.add_request, engine.step

    def add_request(request_id: str, prompt: Any, *rest: Any, **more: Any) -> Any:
        seen[request_id] = [list(prompt), []]
        return add(request_id, prompt, *rest, **more)

    def one_step() -> Any:
        outputs = step()
        for output in outputs:
            seen[output.request_id][1].extend(output.new_token_ids)
        return outputs

    monkeypatch.setattr(engine, "add_request", add_request)
    monkeypatch.setattr(engine, "step", one_step)
    return seen


def metric(server: RunningServer, name: str) -> float:
    with server.http() as client:
        text = client.get("/metrics").text
    return sum(
        float(line.rpartition(" ")[2]) for line in text.splitlines() if re.match(rf"{name}\b", line)
    )


def test_served_conversations_hit_what_their_blocks_say(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names = ("vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total")
    # Nobody else takes steps of this engine: the server's counters would know only with its next one.
    with running(small_engine()) as server:
        seen = watched(server.engine, monkeypatch)
        before = [metric(server, name) for name in names]
        options = BenchOptions(
            base_url=server.url,
            backend="openai-chat",
            tokenizer="stories260K",
            check_client=False,
            multi_turn=True,
            num_prompts=3,
            output_len=8,
            num_runs=1,
            num_warmups=0,
            max_concurrency=1,
            think_time="0.01",
            quality=False,
        )
        run = run_bench(options)
        after = [metric(server, name) for name in names]
    queries, hits = (new - old for new, old in zip(after, before, strict=True))
    (load,) = run.passes
    assert all(trace.success for trace in load.traces) and max(t.turn for t in load.traces) >= 1
    sent = list(seen.values())
    assert len(sent) == len(load.traces)
    assert queries == sum(len(prompt) for prompt, _ in sent) == run.result["total_input_tokens"]
    # One after another, so what a prompt finds is what any request before it left.
    expected = 0
    for number, (prompt, _) in enumerate(sent):
        shared = [common(prompt[:-1], (p + a)[:-1]) for p, a in sent[:number]]
        expected += max(shared, default=0) // SIZE * SIZE
    assert hits == expected > 0
    record = run.result["llmopt"]
    assert record["prefix_cache_hit_rate"] == hits / queries
    sent_by_turn = [turn["completed"] for turn in record["conversations"]["turns"]]
    assert sum(sent_by_turn) == len(sent) and sent_by_turn[0] == 3


def common(one: list[int], other: list[int]) -> int:
    length = 0
    while length < min(len(one), len(other)) and one[length] == other[length]:
        length += 1
    return length


def test_a_server_is_loaded_for_a_duration(server: RunningServer) -> None:
    options = BenchOptions(
        base_url=server.url,
        tokenizer="stories260K",
        check_client=False,
        num_prompts=1,
        output_len=4,
        num_runs=1,
        num_warmups=0,
        max_concurrency=1,
        duration=0.5,
    )
    run = run_bench(options)
    (load,) = run.passes
    window = run.result["llmopt"]["window"]
    assert run.result["duration"] == 0.5 and window["cycles"][0] >= 1
    assert run.result["failed"] == 0 and all(trace.scheduled < 0.5 for trace in load.traces)
    assert all(trace.output_len == 4 for trace in load.traces)
    assert run.result["llmopt"]["prefix_cache_hit_rate"] == 0.0


def test_conversations_go_to_a_server_as_chats(
    server: RunningServer, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--base-url", server.url, "--tokenizer", "stories260K", "--multi-turn"]
    assert llmopt("bench", *words) == 2
    assert "give --backend openai-chat" in capsys.readouterr().err
