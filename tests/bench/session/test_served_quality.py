"""Quality of served models: as in process, beside a reference server, and where a server gives no scores."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import typer
from llmopt.base.errors import BadInput
from llmopt.base.progress import ProgressCallback, ProgressUpdate, Silent
from llmopt.bench.load.address import Address, find_served
from llmopt.bench.load.known_server import known_server
from llmopt.bench.options.options import BenchOptions, checked
from llmopt.bench.session.quality import ScoredQuality, quality_passage, score_quality, score_served
from llmopt.cli.bench import bench
from llmopt.cli.main import run_guarded

from tests.support.live_server import RunningServer, make_engine, running

TOKENS = {"quality_tokens": 700, "tokenizer": "stories3M", "dtype": "float32", "num_threads": 1}


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running(make_engine()) as server:
        yield server


@pytest.fixture(scope="module")
def other_server() -> Iterator[RunningServer]:
    """A model whose distributions differ: the same weights with a KV cache of 8 bits."""
    with running(make_engine(kv_cache_dtype="int8")) as server:
        yield server


def served(url: str, **options: Any) -> ScoredQuality:
    chosen = checked(BenchOptions, {"base_url": url, **TOKENS, **options}, "option")
    address = Address.parse(url)
    return score_served(chosen, address, find_served(chosen, address), Silent())


def in_process(**options: Any) -> dict[str, Any]:
    chosen = checked(BenchOptions, {"model": "stories3M", **TOKENS, **options}, "option")
    engine = make_engine()
    passage = quality_passage(chosen, engine.tokenizer, engine.max_model_len)
    record = score_quality(chosen, engine, passage, Silent()).record
    assert record is not None
    return record


@pytest.mark.parametrize("protocol", ["documents", "strided"])
def test_perplexity_equals_that_in_process(server: RunningServer, protocol: str) -> None:
    window = {"quality_protocol": protocol, "quality_window": 200}
    found, expected = served(server.url, **window), in_process(**window)
    assert found.record is not None and found.series is not None and found.reason is None
    for key in ("token_sha256", "num_tokens", "protocol", "num_windows"):
        assert found.record[key] == expected[key]
    assert found.record["perplexity"] == pytest.approx(expected["perplexity"], rel=1e-5)
    assert found.record["served"] == {
        "scored_by": "prompt_logprobs", "reference_scored_by": None, "num_top": 20,
        "kl_is_lower_bound": None, "mean_rest": None,
    }  # fmt: skip
    assert len(found.series.needed("rank")) == found.record["num_tokens"]


def test_windows_that_fill_the_context_leave_room_for_a_token(server: RunningServer) -> None:
    found = served(server.url, quality_protocol="strided")
    assert found.record is not None and found.record["settings"]["window"] == 511


def test_distance_from_a_reference_server(
    server: RunningServer, other_server: RunningServer
) -> None:
    found = served(other_server.url, reference=server.url).record
    expected = served(server.url).record
    assert found is not None and expected is not None
    assert found["reference"] == server.url
    assert found["reference_perplexity"] == pytest.approx(expected["perplexity"], rel=1e-6)
    assert 0 < found["kl_nats"] < 0.1 and 0.5 < found["top1_agreement"] <= 1
    assert found["served"]["kl_is_lower_bound"] and 0 < found["served"]["mean_rest"] < 0.3
    assert found["intervals"]["perplexity_ratio"] and found["hurt"]
    same = served(server.url, reference=server.url).record
    assert same is not None and same["kl_nats"] == 0 and same["top1_agreement"] == 1


def test_a_server_without_scores_has_no_quality_and_a_reason(server: RunningServer) -> None:
    with known_server(1, 1) as port:
        url = f"http://127.0.0.1:{port}"
        missing = served(url, model="m", max_model_len=512)
        assert missing.record is None and missing.series is None
        assert missing.reason and missing.reason.startswith(
            "no quality: the server gives no logprobs"
        )
        assert "\n" not in missing.reason
        # A reference without scores leaves the model's own.
        found = served(server.url, reference=url)
    assert found.record is not None and found.record["kl_nats"] is None
    assert found.reason and f"no distance from the reference {url}" in found.reason


def test_references_are_of_the_kind_of_the_target() -> None:
    for options in (
        {"reference": "http://127.0.0.1:1"},
        {"reference": "stories3M", "base_url": "http://127.0.0.1:1"},
        {"reference": "stories3M", "serve": "vllm"},
    ):
        with pytest.raises(BadInput, match="URL of a server"):
            checked(BenchOptions, options, "option")


def test_the_command_records_quality_and_gates_it(
    server: RunningServer, other_server: RunningServer, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(bench)
    words = [
        "--base-url", other_server.url, "--against", server.url, "--tokenizer", "stories3M",
        "--num-prompts", "8", "--output-len", "2", "--num-runs", "2", "--no-check-client",
        "--quality-tokens", "700", "--result-dir", tmp_path, "--gate", "perplexity<=+20% kl<=0.2",
    ]  # fmt: skip
    given = list(map(str, words))
    code = run_guarded(lambda: app(given, standalone_mode=False), debug=False)
    said = " ".join(capsys.readouterr().out.split())
    assert code == 0, said
    assert "KL ≥ " in said and "lower bound" in said and "all 2 limits are kept" in said
    records = [json.loads(path.read_text()) for path in tmp_path.glob("*/result.json")]
    base, new = sorted(records, key=lambda record: record["llmopt"]["quality"]["reference"] or "")
    assert base["llmopt"]["quality"]["token_sha256"] == new["llmopt"]["quality"]["token_sha256"]
    assert new["llmopt"]["quality"]["reference"] == server.url
    assert all(pq.read_table(path)["nll"] for path in tmp_path.glob("*/quality.parquet"))


def test_distance_by_depth_of_servers(server: RunningServer, other_server: RunningServer) -> None:
    """Prompt log-probabilities of long documents; the window leaves room for a generated token."""
    deep = {"quality_depth": "256,512", "quality_documents": 2, "needles": False}
    deep["quality_tokens"] = 64
    record = served(other_server.url, reference=server.url, **deep).record
    assert record is not None and [*record["depth"]] == ["128", "256", "512"]
    assert all(0 < part["kl_nats"] < 0.2 for part in record["depth"].values())
    assert record["depth_text"]["description"].startswith("2 documents of 511 tokens")
    chosen = checked(BenchOptions, {"base_url": server.url, **TOKENS, **deep}, "option")
    chosen = chosen.model_copy(update={"reference": server.url})
    address, updates = Address.parse(server.url), list[ProgressUpdate]()
    progress = ProgressCallback(updates.append)
    score_served(chosen, address, find_served(chosen, address), progress)
    assert {update.total for update in updates} == {63, 1020}
    assert all(update.done <= update.total for update in updates)
    alone = served(server.url, **deep).record
    assert alone is not None and "depth" not in alone  # without a reference
    with pytest.raises(BadInput, match="leave --base-url"):
        served(server.url, quality_depth="512", quality_kv="int8")


def test_the_context_of_a_slot_of_llama_cpp_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server lists the context of a slot, which `-c` and `-np` give; the model's own is longer."""
    meta = {"n_ctx": 2048, "n_ctx_train": 8192, "n_vocab": 49152}
    card = {"id": "model.gguf", "owned_by": "llamacpp", "meta": meta}
    monkeypatch.setattr(Address, "model_card", lambda *_: card)
    options = BenchOptions(base_url="http://127.0.0.1:1", tokenizer="stories3M")
    address = Address.of(options)
    assert find_served(options, address).max_model_len == 2048
    card["meta"] = None  # a router, before the model is loaded
    assert find_served(options, address).max_model_len == 32768
