"""Embedding and rerank load, and mixed LoRA load, over HTTP: what is sent, what is counted, what is reported."""

from __future__ import annotations

import json
import shutil
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from llmopt.base.errors import BadInput
from llmopt.bench.load.driver import batches
from llmopt.bench.load.started_server import preset, server_arguments
from llmopt.bench.load.stream import read_pooled
from llmopt.bench.options.options import BenchOptions, checked
from llmopt.bench.options.values import RERANK
from llmopt.bench.record.result import BenchRun
from llmopt.bench.report.run_report import run_page, run_verdict
from llmopt.bench.session.run_sessions import run_bench, write_run
from llmopt.bench.workloads.workload import numbered
from llmopt.recipes import MODELS

from tests.support.fake_server import Handler, State, make_server
from tests.support.live_server import make_engine, running


@pytest.fixture
def fake() -> Iterator[tuple[str, State]]:
    with make_server([]) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        handler: Any = server.RequestHandlerClass
        yield f"http://127.0.0.1:{server.server_port}", handler.state
        server.shutdown()


def measured(url: str, **given: Any) -> BenchRun:
    options = {"num_prompts": 8, "num_runs": 1, "num_warmups": 0, "check_client": False}
    usual = {"base_url": url, "quality": False, "tokenizer": "stories3M", "dataset": "random"}
    return run_bench(
        checked(BenchOptions, {**options, **usual, "random_input_len": 12, **given}, "option")
    )


def test_embeddings_have_one_time_and_no_tokens(fake: tuple[str, State], tmp_path: Path) -> None:
    url, state = fake
    run = measured(url, backend="openai-embeddings", random_batch_size=2, goodput=("e2el:5000",))
    result, ours = run.result, run.result["llmopt"]
    assert (result["completed"], result["failed"], result["total_output_tokens"]) == (4, 0, 0)
    assert result["total_input_tokens"] == 8 * 12
    assert [len(body["input"]) for body in state.seen] == [2] * 4
    assert not {"stream", "max_tokens", "prompt"} & state.seen[0].keys()
    assert result["median_e2el_ms"] > 0 and "median_ttft_ms" not in result
    assert ours["metrics"]["ttft"]["median"] is None and ours["slo"]["share"] == 1
    assert ours["identity"]["engine"]["backend"] == "openai-embeddings"
    assert "requests/s" in run_verdict(result).headline
    write_run(run, tmp_path / "run", with_csv=True)
    assert "End to end" in (tmp_path / "run" / "report.md").read_text()


def test_a_window_repeats_batches_with_first_tokens_of_their_own(fake: tuple[str, State]) -> None:
    url, state = fake
    run = measured(
        url, backend="openai-embeddings", random_batch_size=4, duration=0.3, max_concurrency=1
    )
    (load,) = run.passes
    assert all(trace.success for trace in load.traces) and max(t.cycle for t in load.traces) > 0
    first = [[ids[0] for ids in body["input"]] for body in state.seen]
    assert all(len(batch) == 4 and len(set(batch)) == 1 for batch in first)
    assert len({batch[0] for batch in first}) > 1


def test_rerank_sends_a_query_with_its_documents(fake: tuple[str, State]) -> None:
    url, state = fake
    run = measured(url, backend="vllm-rerank", random_batch_size=3)
    assert (run.result["completed"], run.result["failed"]) == (2, 0)
    assert [len(body["documents"]) for body in state.seen] == [3, 3]
    assert all(isinstance(body["query"], str) and body["query"] for body in state.seen)
    items = numbered([((1, 2), 1)] * 5)
    assert [len(group) for group in batches(items, RERANK, 3)] == [4]
    assert [len(group) for group in batches(items, "openai-embeddings", 3)] == [3, 2]
    with pytest.raises(BadInput, match="a query and a document"):
        batches(items[:1], RERANK, 3)


def test_a_response_that_lacks_results_has_failed(
    fake: tuple[str, State], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert read_pooled([(1.0, b'{"data": [{}, {}]}')]).num_results == 2
    assert "neither data nor results" in read_pooled([(1.0, b'{"x": 1}')]).error
    assert "neither" in read_pooled([(1.0, b"[]")]).error
    monkeypatch.setattr(
        Handler, "_json", lambda self, _: self._send(200, b'{"data": []}', "application/json")
    )
    run = measured(fake[0], backend="openai-embeddings", model="served")
    assert run.result["failed"] == 8
    assert "0 results for 1 inputs" in run.passes[0].traces[0].error


def test_our_own_embeddings_and_reranking(tmp_path: Path) -> None:
    folder = tmp_path / "embedder"
    shutil.copytree(MODELS / "stories3M", folder)
    (folder / "1_Pooling").mkdir()
    config = {"word_embedding_dimension": 192, "pooling_mode_mean_tokens": True}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(config))
    with running(make_engine(str(folder))) as server:
        run = measured(server.url, backend="openai-embeddings", random_batch_size=2)
        ranked = measured(server.url, backend="vllm-rerank", random_batch_size=3).result
    assert (run.result["completed"], run.result["failed"]) == (4, 0)
    assert run.result["total_input_tokens"] == 8 * 12
    assert (ranked["completed"], ranked["failed"]) == (2, 0)
    assert run_page(run.result, {}).verdict.tone == "plain"


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"backend": "openai-embeddings"}, "needs a server"),
        ({"base_url": "http://h", "random_batch_size": 2}, "--random-batch-size is for"),
        (
            {"base_url": "http://h", "backend": "vllm-rerank", "goodput": ("ttft:9",)},
            "one metric, e2el",
        ),
        (
            {"base_url": "http://h", "backend": "vllm-pooling", "tasks": ("arc_easy",)},
            "a model that generates",
        ),
    ],
)
def test_what_does_not_fit_is_refused(given: dict[str, Any], words: str) -> None:
    with pytest.raises(BadInput, match=words):
        checked(BenchOptions, given, "option")


@pytest.mark.parametrize("assignment", ["round-robin", "random"])
def test_adapters_share_the_requests_of_a_server(fake: tuple[str, State], assignment: str) -> None:
    url, state = fake
    load = {"lora": ["sql=/nowhere/sql", "chat"], "lora_assignment": assignment}
    run = measured(url, **load, random_output_len=3, backend="openai", quality=True)
    ours = run.result["llmopt"]
    assert "of one adapter" in ours["quality_reason"]
    sent = Counter(body["model"] for body in state.seen)
    by_adapter = ours["lora"]["by_adapter"]
    assert set(sent) == {"sql", "chat"} and sum(sent.values()) == 8
    assert {name: part["requests"] for name, part in by_adapter.items()} == dict(sent)
    assert all(part["median_ttft_ms"] > 0 for part in by_adapter.values())
    if assignment == "round-robin":
        assert sent == {"sql": 4, "chat": 4}
    assert ours["identity"]["engine"]["lora"] == ["sql", "chat"]
    tables = [table for section in run_page(run.result, {}).sections for table in section.tables]
    assert any(table.header[0] == "adapter" for table in tables)


def test_all_turns_of_a_conversation_go_to_one_adapter(fake: tuple[str, State]) -> None:
    url, state = fake
    run = measured(
        url,
        lora=["sql", "chat"],
        backend="openai-chat",
        dataset="agentic",
        num_prompts=2,
        output_len=2,
    )
    assert run.result["failed"] == 0
    by_conversation: dict[str, set[str | None]] = {}
    for trace in run.passes[0].traces:
        by_conversation.setdefault(trace.conversation, set()).add(trace.lora)
    assert max(trace.turn for trace in run.passes[0].traces) > 0
    assert all(len(adapters) == 1 for adapters in by_conversation.values())
    sent = Counter(body["model"] for body in state.seen)
    assert sent == Counter(trace.lora for trace in run.passes[0].traces)


def test_a_started_server_is_given_its_adapters(tmp_path: Path) -> None:
    given = {"serve": "vllm", "lora": [f"sql={tmp_path}"], "serve_args": "--max-lora-rank 8"}
    options = checked(BenchOptions, given, "option")
    words = server_arguments(options, preset("vllm"), "m", 80)
    assert words[-5:] == [
        "--enable-lora",
        "--lora-modules",
        f"sql={tmp_path}",
        "--max-lora-rank",
        "8",
    ]
    assert server_arguments(options, preset("llmopt"), "m", 80)[-4] == "--lora"
    with pytest.raises(BadInput, match="takes no adapters"):
        server_arguments(options, preset("llama.cpp"), "m", 80)
