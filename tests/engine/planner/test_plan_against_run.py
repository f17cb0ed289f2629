"""The engine's own cache, and a whole benchmark, held against the plan that was made for them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from llmopt.cli.main import main
from llmopt.engine.config import EngineConfig
from llmopt.engine.engine import Engine
from llmopt.engine.planner.ask import Ask, plan_for
from llmopt.engine.planner.cache_size import CacheRequest, num_blocks_for, size_cache
from llmopt.engine.planner.catalog import find_model
from llmopt.engine.planner.host import host_dtype
from llmopt.engine.planner.plan_json import plan_as_dict
from llmopt.quant.errors import BadInput

DTYPES = {
    torch.bfloat16: "bf16",
    torch.float32: "float32",
    torch.float8_e4m3fn: "fp8_per_token_head",
    torch.int8: "int8",
}


def planned(**options: Any) -> dict[str, Any]:
    return plan_as_dict(plan_for(Ask(model="stories3M", gpus=("cpu",), **options)))


def engine(**options: Any) -> Engine:
    return Engine(EngineConfig("stories3M", device="cpu", **options))


@pytest.mark.parametrize(
    ("of_plan", "of_engine"),
    [
        ({}, {}),
        ({"block_size": 16}, {"block_size": 16}),
        ({"context": "200"}, {"max_model_len": 200}),
        ({"max_num_seqs": 3}, {"max_num_seqs": 3}),
        ({"kv_cache_memory": "1MiB"}, {"kv_cache_memory_bytes": 2**20}),
        ({"kv_dtype": "float32"}, {"kv_cache_dtype": "float32"}),
        ({"kv_dtype": "int8"}, {"kv_cache_dtype": "int8"}),
        (
            {"kv_dtype": "fp8_per_token_head", "kv_cache_memory": "3MB"},
            {"kv_cache_dtype": "fp8", "kv_cache_memory_bytes": 3_000_000},
        ),
        (
            {"kv_dtype": "bf16", "kv_cache_memory": "3MB", "block_size": 8, "context": "64"},
            {
                "kv_cache_dtype": "bfloat16",
                "kv_cache_memory_bytes": 3_000_000,
                "block_size": 8,
                "max_model_len": 64,
            },
        ),
    ],
)
def test_planned_tokens_are_those_that_the_engine_allocates(
    of_plan: dict[str, Any], of_engine: dict[str, Any]
) -> None:
    plan, built = planned(**of_plan), engine(**of_engine)
    size = built.scheduler.config.block_size
    assert DTYPES[built.runner.cache.dtype] == plan["kv_dtype"]
    assert plan["engine_cache"]["kv_tokens"] == built.stats.kv_blocks_total * size
    assert plan["engine_cache"]["kv_bytes"] == built.memory.kv_cache_bytes
    assert plan["max_concurrent_sequences"] <= built.scheduler.config.max_num_seqs


def test_the_host_computes_in_what_the_engine_chooses() -> None:
    assert host_dtype() == DTYPES[engine().dtype]


def test_the_rule_takes_the_smaller_of_share_and_demand() -> None:
    shape = find_model("stories3M").shape

    def blocks(free: int, **changes: Any) -> int:
        values: dict[str, Any] = {
            "kind": "cpu",
            "bytes_per_element": 2,
            "block_size": 32,
            "max_model_len": 512,
            "max_num_seqs": 16,
        }
        return size_cache(shape, CacheRequest(**{**values, **changes}), free).num_blocks

    assert blocks(2**30) == 16 * 16
    assert blocks(2**23) == num_blocks_for(2**21, shape, 32, 2) == 25
    assert blocks(2**23, kind="cuda") == num_blocks_for(int(0.9 * 2**23), shape, 32, 2)
    assert blocks(0, num_blocks=7) == 7
    with pytest.raises(BadInput, match="lower max_model_len"):
        blocks(2**20)
    with pytest.raises(BadInput, match="does not hold one block"):
        blocks(2**30, memory_bytes=100)


def test_other_engines_and_types_have_no_cache_of_ours() -> None:
    assert planned(engine="vllm")["engine_cache"] is None
    assert planned(kv_dtype="fp8")["engine_cache"] is None
    assert planned()["gpus_needed"] == 1


def call(*arguments: str) -> int:
    with pytest.raises(SystemExit) as stop:
        main(list(arguments))
    return stop.value.code  # type: ignore[return-value]


BENCH = [
    "bench",
    "--dataset",
    "random",
    "--random-input-len",
    "16",
    "--random-output-len",
    "8",
    "--num-prompts",
    "3",
]
BENCH += [
    "--num-runs",
    "1",
    "--num-warmups",
    "1",
    "--max-concurrency",
    "2",
    "--no-quality",
    "--num-threads",
    "1",
]


def test_a_benchmark_shows_the_residuals(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Plan, measure, plan again with what was measured, and measure against that."""
    monkeypatch.chdir(tmp_path)
    plan = ["kv-plan", "--model", "stories3M", "--gpu", "cpu", "--block-size", "32", "--out"]
    assert call(*plan, "first.json") == 0
    capsys.readouterr()
    assert call(*BENCH, "--plan", "first.json", "--json") == 0
    result = json.loads(capsys.readouterr().out)
    rows = {row["quantity"]: row for row in result["llmopt"]["plan"]["rows"]}
    assert rows["weights in the checkpoint"]["residual"] == 0
    assert rows["KV cache"]["residual"] == 0
    assert rows["KV cache"]["measured"] == 8192
    assert (rows["TTFT"]["predicted"], rows["TPOT"]["residual"]) == (None, None)
    assert rows["TPOT"]["measured"] > 0
    assert result["llmopt"]["plan"]["differs"] == []

    (run,) = Path("runs").iterdir()
    again = [
        "kv-plan",
        "--model",
        "stories3M",
        "--concurrency",
        "2",
        "--out",
        "second.json",
        "--measured",
    ]
    assert call(*again, str(run)) == 0
    second = json.loads(Path("second.json").read_text())
    assert second["gpu"] == "cpu"
    assert second["tpot_ms"] > 0
    ceilings = result["llmopt"]["roofline"]["ceilings"]
    assert second["gpu_bandwidth"] == ceilings["bandwidth"]
    capsys.readouterr()
    assert call(*BENCH, "--plan", "second.json", "--block-size", "16") == 0
    out, err = capsys.readouterr()
    assert "against the plan" in out
    assert "tokens of a block: 32 in the plan, 16 here (--block-size)" in err
    line = next(line for line in out.splitlines() if "TPOT, ms" in line)
    assert "%" in line
    assert "-  " not in line.split("%")[0]


def test_a_plan_for_another_model_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "plan.json"
    assert call("kv-plan", "--model", "llama-8b", "--out", str(path)) == 0
    assert call(*BENCH, "--plan", str(path)) == 2
    assert "a plan for llama-3.1-8b with 8,030,261,248 parameters" in capsys.readouterr().err
    path.write_text('{"model": "stories3M"}')
    assert call(*BENCH, "--plan", str(path)) == 2
    assert "is no plan (param_count is missing)" in capsys.readouterr().err
