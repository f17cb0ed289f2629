"""`bench --serve`: real servers started, measured and stopped; stand-ins only for command lines."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from pathlib import Path

import pytest
from llmopt.base.errors import BadInput
from llmopt.bench.load import started_server
from llmopt.bench.load.started_server import PRESETS, preset, served
from llmopt.bench.options.options import BenchOptions
from llmopt.bench.session.run_sessions import run_bench
from llmopt.recipes import MODELS

from ...support.cli_process import LlmoptProcess

FAKE = Path(__file__).parents[2] / "support" / "fake_server.py"
SMALL = {"num_prompts": 4, "num_runs": 1, "output_len": 6, "max_concurrency": 2}


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def stand_in(folder: Path, script: str) -> Path:
    program = folder / "server"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    return program


def options(serve: str, **more: object) -> BenchOptions:
    return BenchOptions.model_validate({**SMALL, "serve": serve, "check_client": False, **more})


@pytest.mark.whole
def test_a_real_server_is_measured_and_gone_afterwards() -> None:
    with served(options("transformers")) as resolved_options:
        assert resolved_options.serve is None and resolved_options.base_url is not None
        run = run_bench(resolved_options)
    started = run.result["llmopt"]["server"]["started"]
    assert (run.result["completed"], run.result["failed"]) == (4, 0)
    # It scores no prompts, which costs nothing of the rest.
    assert run.result["llmopt"]["quality"] is None
    assert "no logprobs of prompts" in run.result["llmopt"]["quality_reason"]
    assert run.result["total_output_tokens"] == 4 * 6
    assert started["preset"] == "transformers" and started["version"][0].isdigit()
    assert started["command"][-1] == resolved_options.base_url.rpartition(":")[2]
    assert run.result["llmopt"]["name"] == "transformers-stories3M"
    with pytest.raises(BadInput, match="no server answers"):
        run_bench(resolved_options.model_copy(update={"model": None}))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (
            "vllm",
            "serve {model} --served-model-name stories3M --host 127.0.0.1 --port {port} --x y z",
        ),
        ("llama.cpp", "--model {model} --alias m.gguf --host 127.0.0.1 --port {port} --x y z"),
        ("transformers", "serve {model} --host 127.0.0.1 --port {port} --x y z"),
    ],
)
def test_command_lines(tmp_path: Path, name: str, words: str) -> None:
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    is_file = PRESETS[name].needs_gguf
    model = str(tmp_path / "m.gguf") if is_file else str(MODELS / "stories3M")
    program = stand_in(
        tmp_path, f'echo "$@" >> {tmp_path}/seen; echo loading; echo no memory; exit 7'
    )
    given = options(
        name, serve_program=program, serve_args="--x 'y z'", model=model, tokenizer="stories3M"
    )
    with (
        pytest.raises(BadInput, match=r"ended with code 7 .*loading \| no memory"),
        served(given),
    ):
        pass
    version, said = (tmp_path / "seen").read_text().splitlines()
    assert version == " ".join(PRESETS[name].version)
    port = said.split("--port ")[1].split()[0]
    assert said == words.format(model=Path(model).resolve(), port=port)


def test_a_server_that_is_never_ready_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[signal.Signals] = []
    signal_all = started_server._signal_all

    def listed(group: int, number: signal.Signals) -> None:
        sent.append(number)
        signal_all(group, number)

    monkeypatch.setattr(started_server, "_signal_all", listed)
    program = stand_in(
        tmp_path, f'[ "$1" = version ] && exit; echo $$ > {tmp_path}/pid; echo slow; exec sleep 60'
    )
    given = options("transformers", serve_program=program, serve_timeout=2.0)
    heeded = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:  # as a background job of a shell does
        with pytest.raises(BadInput, match=r"not ready after 2 s .*slow"), served(given):
            pass
    finally:
        signal.signal(signal.SIGINT, heeded)
    assert sent == [signal.SIGINT, signal.SIGKILL], "SIGINT was not heeded"
    pid = int((tmp_path / "pid").read_text())
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"serve": "ollama"}, "none of vllm, sglang, trtllm, llama.cpp, transformers, llmopt"),
        ({"serve": "vllm", "base_url": "http://127.0.0.1:1"}, "one server"),
        ({"serve": "vllm", "serve_program": "/nowhere/vllm"}, "no program that can be run"),
        ({"serve": "llmopt", "serve_args": "'open"}, "No closing quotation"),
        ({"serve_args": "--x"}, "needs --serve"),
    ],
)
def test_usage_is_refused(given: dict[str, str], words: str) -> None:
    with pytest.raises(BadInput, match=words), served(BenchOptions.model_validate(given)):
        pass


def test_a_missing_program_says_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    with pytest.raises(BadInput, match=r"no program 'vllm' here: pip install vllm"):
        preset("vllm").find("vllm", None)
    with pytest.raises(BadInput, match=r"no program 'llama-server' here: install llama.cpp"):
        preset("llama.cpp").find("llama.cpp", None)
    program = stand_in(tmp_path, "exit 0")
    for more, words in (
        ({}, "give a .gguf file"),
        ({"model": str(MODELS / "stories3M")}, "give a .gguf file"),
    ):
        given = options("llama.cpp", serve_program=program, **more)
        with pytest.raises(BadInput, match=words), served(given):
            pass


@pytest.mark.whole
def test_an_interrupt_writes_what_finished_and_stops_the_server(tmp_path: Path) -> None:
    words = "--no-check-client --num-prompts 60000 --num-runs 1 --output-len 8"
    rate = ("--request-rate", "100")  # a pass of ten minutes, on any machine
    serve = ("bench", "--serve", f"{sys.executable} {FAKE} --port {{port}}")
    with LlmoptProcess(*serve, *words.split(), *rate, "--result-dir", tmp_path) as process:
        port = ""
        for line in process.stderr:
            if line.startswith("starting "):
                port = line.split("--port ")[1].split()[0]
            if re.search(r"pass 1 of 1, [1-9]\d*/60000 requests", line):
                break
        process.send_signal(signal.SIGINT)
        process.stderr.read()
        assert process.wait(30) == 130
    (folder,) = tmp_path.iterdir()
    result = json.loads((folder / "result.json").read_text())
    assert result["llmopt"]["interrupted"] and result["completed"] > 0
    assert port
    for process_folder in Path("/proc").glob("[0-9]*"):
        try:
            said = (process_folder / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        assert port.encode() not in said


def test_a_command_line_is_a_server() -> None:
    made = preset("srv --m {model} --n {name} -p {port} --j '{\"a\": {}}'")
    words = made.arguments("/m/x", "x", 81)
    assert made.program == "srv" and words == [
        *("--m", "/m/x", "--n", "x", "-p", "81"),
        *("--j", '{"a": {}}'),
    ]
    assert not made.has_no_name and preset("srv {port}").has_no_name
