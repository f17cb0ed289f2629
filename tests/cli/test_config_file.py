"""`--config FILE`: names and values of a command's options, and who wins."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import typer.main
from llmopt.cli import main, serve_local
from llmopt.engine.config.config import EngineConfig
from llmopt.engine.server.protocol.server_options import ServerOptions, ServingOptions

Served = tuple[EngineConfig, ServerOptions, ServingOptions]


class Stopped(Exception):
    """The command has come as far as its options."""

    def __init__(self, served: Served) -> None:
        self.served = served


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """What `serve-local` makes of a file and an argument list."""

    def stop(
        config: EngineConfig,
        folder: Path,
        served: str,
        options: ServerOptions,
        serving: ServingOptions,
    ) -> None:
        raise Stopped((config, options, serving))

    monkeypatch.setattr(serve_local, "_serve", stop)
    monkeypatch.delenv("LLMOPT_API_KEY", raising=False)

    def served(text: str, *words: str) -> Served:
        path = tmp_path / "serve.yaml"
        path.write_text(text)
        group: Any = typer.main.get_command(main.application("serve-local"))
        with pytest.raises(Stopped) as stopped:
            arguments = ["serve-local", *words, "--config", str(path)]
            group.main(arguments, "llmopt", standalone_mode=False)
        return stopped.value.served

    return served


FILE = """
model: stories260K      # the argument, too
port: 9001
max_model_len: 64       # or max-model-len
kv-cache-memory: 4GiB   # vLLM's other spelling
enable-prefix-caching: false
enforce-eager: true
api-key: [one, two]
cors-origin: https://app.example
request-timeout: 12.5
log-format: json
served-model-name: null
"""


def test_a_file_has_the_names_of_the_command_line(serve) -> None:
    config, options, serving = serve(FILE)
    assert (config.model, config.max_model_len) == ("stories260K", 64)
    assert config.kv_cache_memory_bytes == 4 << 30
    assert (config.enable_prefix_caching, config.enforce_eager) == (False, True)
    assert (options.api_keys, options.cors_origins) == (("one", "two"), ("https://app.example",))
    assert (options.request_timeout_seconds, options.log_format) == (12.5, "json")
    assert (serving.port, serving.served_model_name) == (9001, None)


@pytest.mark.parametrize("model", [["stories3M"], ["--model", "stories3M"]])
def test_the_command_line_wins(serve, model: list[str]) -> None:
    words = ["--port", "7", "--enable-prefix-caching", "--api-key", "three", *model]
    config, options, serving = serve(FILE, *words, "--kv-cache-memory-bytes", "1GiB")
    assert (config.model, config.enable_prefix_caching) == ("stories3M", True)
    assert config.kv_cache_memory_bytes == 1 << 30  # by another spelling than the file's
    assert (options.api_keys, serving.port, config.max_model_len) == (("three",), 7, 64)


def test_the_environment_wins(serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLMOPT_API_KEY", "env")
    assert serve(FILE)[1].api_keys == ("env",)


def test_texts_are_as_they_are_written(serve) -> None:
    _, options, serving = serve("api-key: [0123, 12:34:56]\nserved-model-name: 1_000")
    assert options.api_keys == ("0123", "12:34:56")
    assert serving.served_model_name == "1_000"


def test_switches_have_both_names(serve) -> None:
    assert serve("no-enable-prefix-caching: true")[0].enable_prefix_caching is False
    assert serve("no-prefix-caching: true")[0].enable_prefix_caching is False
    assert serve("")[0].enable_prefix_caching is True


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("max-modl-len: 3", "max-modl-len is no option; the nearest is max-model-len"),
        ("9: 3", "9 is no option"),
        ("help: true", "help is no option"),
        ("config: other.yaml", "config is no option"),
        ("port: many", "port: "),
        ("port: 70000", "port: "),
        ("port: 1.5", "port: "),
        ("max-body: {a: b}", "max-body: give a number or a text"),
        ("port: [1, 2]", "port: give a number or a text"),
        ("host: on", "host: give a number or a text"),
        ("enforce-eager: 1", "enforce-eager: give true or false"),
        ("port: 1\nport: [", "not YAML at line"),
        ("- port", "one option a line"),
        ("max-model-len: 1\nmax_model_len: 2", "are the same option"),
        (b"\xff\xfe\x00", "not YAML"),
        (None, "No such file"),
    ],
)
def test_a_bad_file_is_one_line(
    tmp_path: Path, text: str | bytes | None, named: str, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "serve.yaml"
    if text is not None:
        path.write_bytes(text.encode() if isinstance(text, str) else text)
    with pytest.raises(SystemExit) as stopped:
        main.main(["serve-local", "--config", str(path)])
    out, err = capfd.readouterr()
    assert (stopped.value.code, out, err.count("\n")) == (2, "", 1), err
    assert f"--config {path}: " in err and named in err


def test_another_engine_gets_the_file_s_options(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "serve.yaml"
    path.write_text("model: org/model\nengine: vllm\nprint-command: true\nmax-num-seqs: 8\n")
    with pytest.raises(SystemExit) as stopped:
        main.main(["serve-local", "--config", str(path)])
    out, _ = capfd.readouterr()
    assert stopped.value.code == 0
    assert "serve org/model" in out and "--max-num-seqs 8" in out
