"""Variants of recipes that nothing is quantized for: checkpoints, GGUF files, URLs, and servers to start."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from llmopt.cli.main import main
from llmopt.recipes import MODELS

from ...support.gguf_support import write_model
from ...support.live_server import RunningServer, make_engine, running

TINY = MODELS / "stories260K"
HEAD = """name: mine
model: stories260K
num_threads: 1
bench: {num_prompts: 8, output_len: 4, max_concurrency: 4, num_runs: 1, quality_tokens: 64,
        max_redone_passes: 0, check_client: false, max_model_len: 128}
compare: {gate: false}
"""


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running(make_engine(model="stories260K")) as server:
        yield server


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def run(*words: str) -> int:
    with pytest.raises(SystemExit) as stop:
        main(["run", *words])
    return int(stop.value.code or 0)


def results(names: list[str]) -> dict[str, dict[str, Any]]:
    folder = Path("out")
    return {name: json.loads((folder / name / "result.json").read_text()) for name in names}


def test_checkpoints_gguf_files_urls_and_servers_beside_the_original(
    server: RunningServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gguf = write_model(TINY, tmp_path, "Q4_0")
    Path("mine.yaml").write_text(
        f"""{HEAD}
variants:
  - {{name: folder, model: {TINY}}}
  - {{name: gguf, model: {gguf}}}
  - {{name: url, bench: {{base_url: "{server.url}"}}}}
  - {{name: ours, serve_local: {{max_num_seqs: 3, enforce_eager: true}}}}
  - {{name: cache, bench: {{kv_cache_dtype: fp8}}}}
"""
    )
    names = ["original", "folder", "gguf", "url", "ours", "cache"]
    assert run("mine.yaml", "--output", "out", "--set", "bench.csv=true", "--json") == 0
    record = json.loads(capsys.readouterr().out)
    assert list(record["variants"]) == names[1:]
    assert [one["verified"] for one in record["variants"].values()] == [None] * 5
    found = results(names)
    assert all(one["completed"] == 8 and one["failed"] == 0 for one in found.values())
    ours = {name: one["llmopt"] for name, one in found.items()}
    assert ours["gguf"]["identity"]["quantization"] == "gguf"
    assert ours["cache"]["identity"]["engine"]["kv_cache_dtype"] == "fp8"
    assert ours["url"]["server"]["url"] == server.url
    assert ours["url"]["server"]["started"] is None
    command = ours["ours"]["server"]["started"]["command"]
    assert command[-5:] == ["--num-threads", "1", "--max-num-seqs", "3", "--enforce-eager"]
    assert ours["folder"]["quality"]["kl_nats"] == pytest.approx(0, abs=1e-6)
    assert ours["gguf"]["quality"]["kl_nats"] > 0
    # The same prompts, whoever makes them.
    assert len({one["identity"]["workload_sha256"] for one in ours.values()}) == 1
    report = Path("out/report.html").read_text()
    assert "mine: stories260K and its variants" in report and "Layer error" not in report
    assert all(Path("out", name, "verdict.xml").is_file() for name in names[1:])
    assert all(Path("out", name, "requests.csv").is_file() for name in names)


@pytest.mark.whole
def test_two_servers_in_turns_and_their_distance(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The shape of `ci-regression`: the original and a variant each in a server that is started."""
    Path("mine.yaml").write_text(
        f"""{HEAD.replace("check_client", "serve: llmopt, check_client")}
interleave: true
variants:
  - {{name: candidate, bench: {{serve_program: {sys.executable}}}}}
  - {{name: quantized, quantize: {{method: rtn, bits: 2, group_size: 4, num_samples: 2, seq_len: 64}}}}
"""
    )
    gate = "compare.gate=kl<=0.01 error_rate<=0"
    assert run("mine.yaml", "--output", "out", "--set", gate, "--json") == 1
    record = json.loads(capsys.readouterr().out)
    found = results(["original", "candidate", "quantized"])
    servers = [one["llmopt"]["server"] for one in found.values()]
    assert len({server["url"] for server in servers}) == 3
    kls = [one["llmopt"]["quality"]["kl_nats"] for one in found.values()]
    assert kls[0] is None and kls[1] == pytest.approx(0, abs=1e-6) and kls[2] > 0.01
    outcomes = [one["comparison"]["outcome"] for one in record["variants"].values()]
    assert outcomes == ["pass", "regression"]
    assert record["variants"]["quantized"]["verified"]["ok"]
    assert found["quantized"]["llmopt"]["arms"] is not None


def stand_in(name: str, arguments: str) -> Path:
    """A program of another server's command line that serves with llmopt."""
    program, serve = Path.cwd() / name, f"{sys.executable} -m llmopt.cli.main serve-local"
    program.write_text(
        f'#!/bin/sh\n[ "$1" = --version ] && echo 1.2.3 && exit\nexec {serve} {arguments}\n'
    )
    program.chmod(0o755)
    return program


@pytest.mark.whole
def test_other_servers_are_started_by_their_command_lines() -> None:
    """vLLM's, by its own arguments and by options of serve-local, and llama.cpp's on a GGUF that is made."""
    vllm = stand_in("vllm", '"$2" "$3" "$4" "$5" "$6" "$7" "$8"')
    llama = stand_in("llama-server", '"$2" --served-model-name "$4" "$5" "$6" "$7" "$8"')
    gguf = "{method: rtn, gguf_type: Q8_0, format: gguf, errors: false}"
    Path("mine.yaml").write_text(
        f"""{HEAD}
variants:
  - {{name: args, bench: {{serve: vllm, serve_program: {vllm}, serve_args: "--max-num-seqs 3"}}}}
  - {{name: options, serve_local: {{engine: vllm, max_num_seqs: 3}}, bench: {{serve_program: {vllm}}}}}
  - name: gguf
    model: stories3M
    quantize: {gguf}
    bench: {{serve: llama.cpp, serve_program: {llama}, max_model_len: null}}
"""
    )
    assert run("mine.yaml", "--output", "out", "--json") == 0
    found = results(["args", "options", "gguf"])
    assert all(one["completed"] == 8 and one["failed"] == 0 for one in found.values())
    started = {name: one["llmopt"]["server"]["started"] for name, one in found.items()}
    assert {one["version"] for one in started.values()} == {"1.2.3"}
    for name in ("args", "options"):
        assert started[name]["command"][:2] == [str(vllm), "serve"]
        assert started[name]["command"][-2:] == ["--max-num-seqs", "3"]
    made = started["gguf"]["command"][2]
    assert made.startswith(str(Path("out/checkpoints/gguf").resolve())) and made.endswith(".gguf")


@pytest.mark.parametrize(
    ("variant", "said"),
    [
        ("{name: a, model: nothere}", "no model 'nothere'"),
        ("{name: a, bench: {serve: ollama}}", "'ollama': it is none of vllm"),
        ("{name: a, bench: {serve: llmopt, serve_program: nothere}}", "no program that can be run"),
    ],
)
def test_what_is_not_there_is_said_before_anything_runs(
    variant: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("mine.yaml").write_text(f"{HEAD}variants:\n  - {variant}\n")
    assert run("mine.yaml", "--output", "out") == 2
    assert said in capsys.readouterr().err and not Path("out").exists()
