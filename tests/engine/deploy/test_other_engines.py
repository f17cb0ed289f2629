"""`serve-local --engine sglang|trtllm`: every word held against the options of the version that is named.

SGLang's list was read from the fields of its package's argument groups, TensorRT-LLM's from
`tensorrt_llm/commands/serve.py` of github.com/NVIDIA/TensorRT-LLM (both in November 2026).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from llmopt.base.errors import BadInput
from llmopt.bench.load.started_server import PRESETS
from llmopt.engine.deploy.engine_commands import ENGINES, ServerCommand, server_command

from ...support.cli_process import run_llmopt

OTHERS = [engine for engine in ENGINES.values() if engine.name != "vllm"]
VALUES: dict[str, Any] = {
    "host": "0.0.0.0", "port": 9000, "dtype": "bfloat16", "max_model_len": 4096, "max_num_seqs": 64,
    "max_num_batched_tokens": 8192, "prefill_chunk_size": 512, "scheduling_policy": "priority",
    "async_scheduling": False, "enforce_eager": True, "trust_remote_code": True, "seed": 7, "kv_cache_dtype": "auto", "block_size": 16,
    "enable_prefix_caching": True, "tensor_parallel_size": 4, "pipeline_parallel_size": 2,
    "served_model_name": "name", "chat_template": "template.jinja", "tool_call_parser": "hermes",
    "ssl_certfile": "tls.crt", "ssl_keyfile": "tls.key", "ssl_ca_certs": "ca.crt",
}  # fmt: skip


def options(engine: ServerCommand) -> list[str]:
    path = Path(__file__).with_name(f"{engine.name}-{engine.version}-options.txt")
    return path.read_text().split()


def adapter(folder: Path) -> str:
    folder.mkdir()
    settings = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return f"{folder.name}={folder}"


@pytest.mark.parametrize("engine", OTHERS, ids=lambda engine: engine.name)
def test_every_word_is_an_option_of_that_version(engine: ServerCommand, tmp_path: Path) -> None:
    asked = {name: value for name, value in VALUES.items() if name in engine.table}
    if "lora" in engine.table:
        asked["lora"] = [adapter(tmp_path / "poet")]
    assert set(asked) == set(engine.table)
    command = engine.command("org/model", asked)
    named = [word for word in command if word.startswith("--")]
    assert set(named) <= set(options(engine))
    assert len(named) == len(set(named))
    assert {"0.0.0.0", "9000", "4096", "4", "org/model"} <= set(command)


@pytest.mark.parametrize("method", ["ngram", "draft", "eagle"])
def test_sglang_speculates_with_a_chain(method: str) -> None:
    engine = server_command("sglang")
    asked = {"speculative": method, "num_speculative_tokens": 3, "draft_model": "draft"}
    command = engine.command("m", asked)
    assert {word for word in command if word.startswith("--")} <= set(options(engine))
    count = command[command.index("--speculative-num-draft-tokens") + 1]
    assert count == ("3" if method == "ngram" else "4")


@pytest.mark.parametrize(
    ("engine", "asked", "words"),
    [
        ("sglang", {"api_key": ["k"]}, "--api-key"),
        (
            "sglang",
            {"kv_cache_dtype": "int8"},
            "--kv-cache-dtype int8: SGLang has auto, bfloat16, fp8",
        ),
        ("sglang", {"speculative": "medusa"}, "--speculative medusa"),
        ("trtllm", {"seed": 1}, "--seed: TensorRT-LLM's server has nothing that means the same"),
        ("trtllm", {"kv_cache_dtype": "fp8"}, "--kv-cache-dtype fp8"),
        ("trtllm", {"enable_prefix_caching": False}, "--enable-prefix-caching False"),
    ],
)
def test_what_an_engine_lacks_is_refused(engine: str, asked: dict[str, Any], words: str) -> None:
    with pytest.raises(BadInput, match=words):
        server_command(engine).command("m", asked)


@pytest.mark.parametrize("name", ["sglang", "trtllm"])
def test_the_command_is_printed_or_the_program_is_missing(name: str, tmp_path: Path) -> None:
    model = ("serve-local", "stories3M", "--engine", name, "--max-model-len", "256")
    done = run_llmopt(*model, "--print-command")
    assert done.returncode == 0 and done.stdout.startswith(server_command(name).program), (
        done.stderr
    )
    done = run_llmopt(*model, env={"PATH": str(tmp_path)})
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "pip install" in done.stderr


@pytest.mark.parametrize("engine", OTHERS, ids=lambda engine: engine.name)
def test_a_benchmark_starts_it(engine: ServerCommand) -> None:
    words = PRESETS[engine.name].arguments("org/model", "name", 9000)
    assert {word for word in words if word.startswith("--")} <= set(options(engine))
    assert "9000" in words


def test_an_unknown_engine_is_named() -> None:
    with pytest.raises(BadInput, match="choose llmopt, vllm, sglang, trtllm"):
        server_command("orca")
