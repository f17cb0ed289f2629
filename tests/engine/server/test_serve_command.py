"""`llmopt serve-local` as a process."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from typing import Annotated, Any

import httpx
import pytest
import typer
from llmopt.base.option import keywords_of_words
from llmopt.cli.main import main
from llmopt.cli.options.command import From, Words, with_options
from llmopt.engine.base.image_input import MediaLimits
from llmopt.engine.config.config import EngineConfig
from llmopt.engine.core.engine import Engine
from llmopt.engine.server.app import create_app
from llmopt.engine.server.launch import base_url, bind, serve
from llmopt.engine.server.protocol.server_options import ServerOptions

from ...support.cli_process import ForkedProcess, LlmoptProcess, run_llmopt
from ...support.live_server import HANG_SECONDS


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


@contextlib.contextmanager
def serving(*options: str) -> Iterator[tuple[LlmoptProcess, str]]:
    """The process and its first line on stdout."""
    with LlmoptProcess("serve-local", *options, env=environment()) as process:
        yield process, process.stdout.readline()


def stop(process: LlmoptProcess, number: signal.Signals) -> tuple[str, str]:
    """Rest of stdout, and stderr, of a process that must end well."""
    process.send_signal(number)
    out, err = process.communicate(timeout=HANG_SECONDS)
    assert process.returncode == 0, err
    assert "Traceback" not in err
    return out, err


def client(url: str) -> httpx.Client:
    return httpx.Client(base_url=url, trust_env=False, timeout=HANG_SECONDS)


def test_with_json_it_serves_and_drains_on_sigterm() -> None:
    secret = "Lily kept a secret garden"
    drain = ("--drain-seconds", str(HANG_SECONDS))
    with serving("--json", "--port", "0", "--dtype", "float32", *drain) as (process, line):
        ready: dict[str, Any] = json.loads(line)
        assert ready == {"url": ready["url"], "model": "stories3M", "pid": process.pid}
        body = {"prompt": secret, "max_tokens": 300, "ignore_eos": True, "stream": True}
        with client(ready["url"]) as http:
            assert http.get("/health").json() == {"status": "ok"}
            with http.stream("POST", "/v1/completions", json=body) as response:
                lines = response.iter_lines()
                next(lines)
                process.send_signal(signal.SIGTERM)
                rest = [text for text in lines if text]
        out, err = process.communicate(timeout=HANG_SECONDS)
        assert process.returncode == 0, err
        assert rest[-1] == "data: [DONE]"
        assert len(rest) == 300
        assert out == ""
        assert "POST /v1/completions" in err and secret not in err


def test_it_says_where_it_is_and_ends_on_ctrl_c() -> None:
    options = (
        "stories260K",
        "--port",
        "0",
        "--served-model-name",
        "small",
        "--max-model-len",
        "64",
    )
    with serving(*options) as (process, line):
        assert line.startswith("ready: small at http://127.0.0.1:")
        assert "context 64 tokens" in line and "chat template: plain" in line
        # 16 sequences of 64 tokens in blocks of 32, and the null block: 5 layers of 2 x 4 heads of 8 elements.
        assert "KV cache: up to 660 KiB (1,024 tokens in bfloat16), 0 used" in line
        url = line.split()[3].removesuffix("/v1")
        with client(url) as http:
            (card,) = http.get("/v1/models").json()["data"]
        assert (card["id"], card["max_model_len"]) == ("small", 64)
        out, err = stop(process, signal.SIGINT)
        assert f"curl {url}/v1/completions" in out + err


def slow_step() -> None:
    """What a server's step waits for."""
    time.sleep(0.05)


def failing_step() -> None:
    raise ZeroDivisionError


def slow_server(before_step: Callable[[], None], drain_seconds: float) -> None:
    engine = Engine(EngineConfig(model="stories260K", num_threads=1))
    step = engine.step
    engine.step = lambda: before_step() or step()  # pyright: ignore[reportAttributeAccessIssue]
    listener = bind("127.0.0.1", 0)
    app = create_app(engine, model_name="slow", options=ServerOptions(drain_seconds=drain_seconds))
    serve(app, listener, on_ready=lambda: print(base_url(listener), flush=True))


@contextlib.contextmanager
def slow_stream(drain_seconds: float = 60) -> Iterator[tuple[ForkedProcess, Iterator[str]]]:
    """A slow server, and the lines of a stream from it after its first event."""
    body = {"prompt": "Once", "max_tokens": 400, "ignore_eos": True, "stream": True}
    with ForkedProcess(slow_server, slow_step, drain_seconds, env=environment()) as process:
        with (
            client(process.stdout.readline().strip()) as http,
            http.stream("POST", "/v1/completions", json=body) as response,
        ):
            lines = response.iter_lines()
            next(lines)
            yield process, (text for text in lines if text)
        _, err = process.communicate(timeout=HANG_SECONDS)
        assert process.returncode == 0 and "Traceback" not in err


def told(last: str) -> dict[str, Any]:
    return json.loads(last.removeprefix("data: "))["error"]


def test_a_second_signal_ends_the_drain_and_tells_the_client() -> None:
    with slow_stream() as (process, lines):
        process.send_signal(signal.SIGINT)
        for _ in range(20):  # the drain lets it go on
            assert "error" not in next(lines)
        process.send_signal(signal.SIGINT)
        rest = list(lines)
    assert len(rest) < 300
    assert told(rest[-1])["message"] == "the server is stopping"


def test_requests_that_outlast_the_drain_get_an_event() -> None:
    with slow_stream(drain_seconds=1) as (process, lines):
        process.send_signal(signal.SIGTERM)
        rest = list(lines)
    error = told(rest[-1])
    assert (error["message"], error["type"]) == ("the server is stopping", "server_error")


def test_an_engine_that_fails_while_it_warms_up_ends_the_server() -> None:
    with ForkedProcess(slow_server, failing_step, 60, env=environment()) as process:
        out, err = process.communicate(timeout=HANG_SECONDS)
    assert out == ""
    assert err.splitlines()[-1].endswith(
        "the engine failed (ZeroDivisionError): restart the server"
    )


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--api-key", ""], "API key"),
        (["--max-body", "none"], "none"),
        (["no-such-model"], "no-such-model"),
        (["--kv-cache-memory", "plenty"], "plenty"),
        (["--dtype", "int3"], "int3"),
        (["stories3M", "--model", "stories260K"], "two models"),
        (["--host", "203.0.113.7"], "203.0.113.7"),
    ],
)
def test_bad_options_are_one_line(
    options: list[str], named: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["serve-local", "--port", "0", *options])
    out, err = capfd.readouterr()
    assert (stopped.value.code, out) == (2, "")
    assert err.count("\n") == 1 and named in err


def test_a_port_in_use_is_one_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = run_llmopt(
            "serve-local", "--port", str(port), env=environment(), timeout=HANG_SECONDS
        )
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.count("\n") == 1 and f"port {port}" in result.stderr


@pytest.mark.parametrize(
    ("option", "value", "count"),
    [
        ("--limit-mm-per-prompt", '{"image": 4}', 4),
        ("--limit-mm-per-prompt", '{"image": {"count": 5}, "video": 0}', 5),
        ("--limit-mm-per-prompt.image", "6", 6),
    ],
)
def test_images_per_prompt_are_said_as_in_vllm(option: str, value: str, count: int) -> None:
    limits: list[MediaLimits] = []

    def keep(media: Annotated[Words, From(MediaLimits)]) -> None:
        limits.append(MediaLimits(**keywords_of_words(MediaLimits, media)))

    app = typer.Typer()
    app.command()(with_options(keep))
    typer.main.get_command(app).main([option, value], standalone_mode=False)
    assert limits[0].max_images == count
