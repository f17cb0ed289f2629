"""Our own server as a process, measured over HTTP: tokens, lengths and times as they are."""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import typer
from llmopt.cli.bench import bench
from llmopt.cli.compare import compare
from llmopt.cli.main import run_guarded

from ...support.cli_process import LlmoptProcess


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with LlmoptProcess("serve-local", "--port", "0", "--json") as process:
        yield json.loads(process.stdout.readline())["url"]


def llmopt(*words: str | Path) -> int:
    app = typer.Typer(pretty_exceptions_enable=False)
    for command in (bench, compare):
        app.command()(command)
    return run_guarded(lambda: app(list(map(str, words)), standalone_mode=False), debug=False)


FAST = [
    "--no-quality", "--num-prompts", "12", "--num-runs", "2", "--output-len", "10",
    "--max-concurrency", "4",
]  # fmt: skip


def test_completions_have_exact_lengths(url: str, tmp_path: Path) -> None:
    assert (
        llmopt("bench", *FAST, "--base-url", url, "--result-dir", tmp_path, "--client-workers", "2")
        == 0
    )
    (folder,) = tmp_path.iterdir()
    result = json.loads((folder / "result.json").read_text())
    ours = result["llmopt"]
    assert (result["model_id"], result["endpoint_type"], result["failed"]) == (
        "stories3M",
        "openai",
        0,
    )
    assert result["total_output_tokens"] == 24 * 10
    assert result["total_input_tokens"] == 2 * ours["workload"]["prompt_tokens"]
    assert ours["client"]["token_counts_by"] == {"server, per chunk": 24}
    # How many connections are late depends on the load: a server closes those that wait too long.
    assert ours["client"]["workers"] == 2
    assert ours["identity"]["target"] == "http" and ours["quality"] is None
    assert ours["identity"]["hardware"] == {"gpu": "none"}
    assert ours["identity"]["server"] == {"model": "stories3M", "version": version("llmopt")}
    # Each pass has prompts of its own, so only what the prompts share among themselves is cached.
    assert ours["prefix_cache_hit_rate"] < 0.2
    # On a busy machine all chunks of an answer may be read at once.
    assert 0 < result["median_ttft_ms"] <= result["median_e2el_ms"]
    assert ours["peaks"]["requests_in_flight"] <= 4
    table = pq.read_table(folder / "requests.parquet").to_pydict()
    assert set(table["output_len"]) == {10} and all(table["text"])
    assert all(sorted(times) == times for times in table["chunk_times_s"])
    report = (folder / "report.html").read_text()
    assert "The client" in report and "Weights" not in report.split("How each number")[0]


def test_chats_and_other_ways_to_count(url: str, tmp_path: Path) -> None:
    words = [
        "--backend",
        "openai-chat",
        "--extra-body",
        '{"stream_options": null}',
        "--no-check-client",
    ]
    words += ["--request-rate", "50", "--num-warmups", "0"]
    assert (
        llmopt("bench", *FAST[:-2], *words, "--base-url", f"{url}/v1", "--result-dir", tmp_path)
        == 0
    )
    (folder,) = tmp_path.iterdir()
    result = json.loads((folder / "result.json").read_text())
    ours = result["llmopt"]
    assert result["failed"] == 0 and result["backend"] == "openai-chat"
    # The server was not asked for its usage, so the text was tokenized again.
    assert ours["client"]["token_counts_by"] == {"re-tokenized": 24}
    assert 0.7 * 240 <= result["total_output_tokens"] <= 1.3 * 240
    # Nor did it say its cache hits there: they are of its metrics.
    hits = [each["prefix_cache_hit_rate"] for each in ours["server_metrics"]["runs"]]
    assert ours["prefix_cache_hit_rate"] == pytest.approx(sum(hits) / 2)
    assert ours["metrics"]["ttft_from_schedule"]["mean"] >= ours["metrics"]["ttft"]["mean"]


def test_it_is_no_run_of_an_engine_in_process(url: str, tmp_path: Path, capsys) -> None:
    assert (
        llmopt(
            "bench", *FAST, "--base-url", url, "--no-check-client", "--result-dir", tmp_path / "a"
        )
        == 0
    )
    assert llmopt("bench", *FAST, "--num-threads", "1", "--result-dir", tmp_path / "b") == 0
    (a,), (b,) = (tmp_path / "a").iterdir(), (tmp_path / "b").iterdir()
    first, second = (json.loads((one / "result.json").read_text()) for one in (a, b))
    assert first.keys() == second.keys()
    same = "workload_sha256"
    assert first["llmopt"]["identity"][same] == second["llmopt"]["identity"][same]
    capsys.readouterr()
    assert llmopt("compare", b, a) == 3
    assert "not the same machine and its limits" in capsys.readouterr().out


def test_the_server_refuses_a_wrong_model(url: str, tmp_path: Path) -> None:
    words = [
        "--model",
        "someone-else",
        "--tokenizer",
        "stories3M",
        "--save-detailed",
        "--no-check-client",
    ]
    assert llmopt("bench", *FAST, *words, "--base-url", url, "--result-dir", tmp_path) == 1
    (folder,) = tmp_path.iterdir()
    result = json.loads((folder / "result.json").read_text())
    assert result["failed"] == 24 and "HTTP 404: no model 'someone-else'" in result["errors"][0]


def test_two_servers_are_measured_in_pairs(url: str, tmp_path: Path, capsys) -> None:
    words = ["--no-check-client", "--gpu-hour-price", "2"]
    code = llmopt(
        "bench", *FAST, *words, "--base-url", url, "--against", url.replace("127.0.0.1", "localhost"),
        "--name", "new", "--result-dir", tmp_path, "--json",
    )  # fmt: skip
    said = capsys.readouterr()
    # An uncertified client proves nothing, so there is no verdict on a speed.
    assert code == 3, said.err
    ours = json.loads(said.out)["llmopt"]
    port = url.rpartition(":")[2]
    assert (ours["verdict"]["base"], ours["verdict"]["new"]) == (f"localhost-{port}-base", "new")
    assert "the client was not checked" in ours["verdict"]["reasons"][0]
    results = [json.loads((one / "result.json").read_text()) for one in tmp_path.iterdir()]
    assert len(results) == 2 and len({r["llmopt"]["arms"] for r in results}) == 1
    assert len({r["llmopt"]["identity"]["workload_sha256"] for r in results}) == 1
    # The server is on this machine: its counters count, and its processor time is not background load.
    assert ours["energy"]["gpu_reason"] and "cpu_joules" in ours["energy"]
    assert ours["cost"]["usd_per_million_output_tokens"] > 0
    assert [run["other_load"] for run in ours["runs"]] == [None, None]
    assert all(0 <= run["client_machine_load"] <= 1 for run in ours["runs"])


def test_a_ramp_records_its_steps(url: str, tmp_path: Path) -> None:
    words = "--num-prompts 12 --num-runs 1 --output-len 4 --no-check-client --num-warmups 0"
    ramp = "--ramp-up-strategy linear --ramp-up-start-rps 20 --ramp-up-end-rps 24 --burstiness 1000"
    common = ["--base-url", url, "--result-dir", tmp_path]
    assert llmopt("bench", *words.split(), *ramp.split(), *common) == 0
    (folder,) = tmp_path.iterdir()
    events = json.loads((folder / "result.json").read_text())["rps_change_events"]
    assert [event["rps"] for event in events] == [20, 21, 22, 23, 24]
    assert events == sorted(events, key=lambda event: event["timestamp"])
    assert events[0]["timestamp"].startswith("20")
