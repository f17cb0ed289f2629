"""`serve-local --engine vllm`: every word held against the options of the version that is named."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from llmopt.base.errors import BadInput
from llmopt.cli.main import main
from llmopt.engine.deploy.engine_commands import VLLM

OPTIONS = Path(__file__).with_name(f"vllm-{VLLM.version}-options.txt").read_text().split()


def adapter(folder: Path, rank: int) -> str:
    folder.mkdir()
    settings = {"peft_type": "LORA", "r": rank, "lora_alpha": 8, "target_modules": ["q_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return f"{folder.name}={folder}"


def everything(tmp_path: Path) -> dict[str, Any]:
    return {
        "host": "0.0.0.0",
        "port": 9000,
        "cors_origin": ["https://app.example"],
        "drain_seconds": 30.0,
        "dtype": "bfloat16",
        "max_model_len": 4096,
        "max_num_seqs": 64,
        "max_num_batched_tokens": 8192,
        "scheduling_policy": "priority",
        "async_scheduling": True,
        "kv_cache_memory_bytes": "4GiB",
        "kv_cache_dtype": "int8",
        "gpu_memory_utilization": 0.8,
        "block_size": 16,
        "enable_prefix_caching": False,
        "enforce_eager": True,
        "trust_remote_code": True,
        "seed": 7,
        "num_blocks": 100,
        "prefill_chunk_size": 256,
        "tensor_parallel_size": 4,
        "pipeline_parallel_size": 2,
        "ray": True,
        "lora": [adapter(tmp_path / "poet", 4), adapter(tmp_path / "clerk", 9)],
        "served_model_name": "name",
        "chat_template": "template.jinja",
        "tool_call_parser": "hermes",
        "reasoning_parser": "think",
        "api_key": ["sesame"],
        "ssl_certfile": "tls.crt",
        "ssl_keyfile": "tls.key",
        "ssl_ca_certs": "ca.crt",
        "ssl_cert_reqs": 2,
        "max_header": "16KiB",
        "speculative": "ngram",
        "num_speculative_tokens": 3,
        "prompt_lookup_min": 1,
        "prompt_lookup_max": 2,
    }


def test_every_word_is_an_option_of_that_version(tmp_path: Path) -> None:
    command = VLLM.command("org/model", everything(tmp_path))
    assert command[:3] == ["vllm", "serve", "org/model"]
    used = {word.split("=")[0] for word in command if word.startswith("--")}
    assert len(used) >= 25
    assert used <= set(OPTIONS)
    assert "sesame" not in command


def test_values_mean_the_same(tmp_path: Path) -> None:
    words = VLLM.command("m", everything(tmp_path))

    def after(option: str, count: int = 1) -> list[str]:
        return words[words.index(option) + 1 :][:count]

    assert after("--kv-cache-memory-bytes") == [str(4 << 30)]
    assert after("--kv-cache-dtype") == ["int8_per_token_head"]
    assert after("--gpu-memory-utilization") == ["0.8"]
    assert after("--max-lora-rank") == ["16"]
    assert "--no-enable-prefix-caching" in words and "--async-scheduling" in words
    assert after("--lora-modules", 2) == [f"poet={tmp_path}/poet", f"clerk={tmp_path}/clerk"]
    assert json.loads(after("--speculative-config")[0]) == {
        "method": "ngram",
        "num_speculative_tokens": 3,
        "prompt_lookup_min": 1,
        "prompt_lookup_max": 2,
    }
    assert json.loads(after("--allowed-origins")[0]) == ["https://app.example"]


def test_the_defaults_of_our_server_are_passed_to_vllm() -> None:
    assert VLLM.command("m", {}) == shlex.split(
        "vllm serve m --host 127.0.0.1 --port 8000 --allowed-origins '[]' --shutdown-timeout 5"
    )


@pytest.mark.parametrize(
    ("asked", "named"),
    [
        ({"window": 100, "max_body": "1MiB"}, "--window, --max-body"),
        ({"swap_space": "4GiB"}, "--swap-space"),
        ({"scheduling_policy": "shortest-prefill"}, "shortest-prefill"),
        ({"kv_cache_dtype": "float32"}, "float32"),
        ({"speculative": "medusa"}, "--draft-model"),
        ({"speculative": "draft"}, "--draft-model"),
        ({"api_key": ["one", "two"]}, "--api-key"),
        ({"as_json": True}, "--as-json"),
    ],
)
def test_what_vllm_has_nothing_for_is_refused_by_name(asked: dict[str, Any], named: str) -> None:
    with pytest.raises(BadInput, match=named):
        VLLM.command("m", asked)


def run(capfd: pytest.CaptureFixture[str], *words: str) -> tuple[object, str, str]:
    with pytest.raises(SystemExit) as stopped:
        main(["serve-local", *words])
    out, err = capfd.readouterr()
    return stopped.value.code, out, err


def test_the_command_line_prints_what_it_would_run(capfd: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(
        capfd, "--engine", "vllm", "--print-command", "--api-key", "sesame", "--max-num-seqs", "8"
    )
    assert code == 0 and out.count("\n") == 1
    assert out.startswith("VLLM_API_KEY=... vllm serve /") and "sesame" not in out
    assert "--max-num-seqs 8" in out and "--served-model-name stories3M" in out
    code, _, err = run(capfd, "--engine", "vllm", "--window", "64")
    assert code == 2 and "--window" in err
    for words in (["--ray"], ["--pipeline-parallel-size", "2"], ["--print-command"]):
        code, _, err = run(capfd, *words)
        assert code == 2 and words[0] in err
    code, _, err = run(capfd, "--engine", "sglang")
    assert code == 2 and "sglang" in err


def test_it_becomes_vllm_with_the_key_in_the_environment(tmp_path: Path) -> None:
    program = tmp_path / "vllm"
    program.write_text('#!/bin/sh\necho "$VLLM_API_KEY" "$@"\n')
    program.chmod(0o755)
    done = subprocess.run(
        [sys.executable, "-m", "llmopt.cli.main", "serve-local", "org/model", "--engine", "vllm"],
        env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "LLMOPT_API_KEY": "sesame"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout.startswith("sesame serve org/model --host 127.0.0.1"), done.stderr
    assert "handing over: VLLM_API_KEY=... vllm serve org/model" in done.stderr
