"""The engine's own cache, and a whole benchmark, held against the plan that was made for them."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from llmopt.base.errors import BadInput
from llmopt.cli.main import main
from llmopt.engine.base.sampling_params import SamplingParams
from llmopt.engine.config.config import EngineConfig
from llmopt.engine.core.engine import Engine
from llmopt.engine.execution.model_runner import ModelRunner
from llmopt.engine.kernels.attention.paged_tensor import CacheDtype
from llmopt.engine.planner.cache_size import CacheRequest, KvCacheBudget, num_blocks_for, size_cache
from llmopt.engine.planner.catalog import find_model
from llmopt.engine.planner.plan_json import plan_as_dict, read_plan
from llmopt.engine.planner.plan_request import PlanRequest, plan_for
from llmopt.engine.scheduling.step_plan import StepPlan

DTYPES: dict[CacheDtype, str] = {
    torch.bfloat16: "bf16",
    torch.float32: "float32",
    torch.float8_e4m3fn: "fp8_per_token_head",
    torch.int8: "int8",
}


def planned(**options: Any) -> dict[str, Any]:
    return plan_as_dict(plan_for(PlanRequest(model="stories3M", gpus=("cpu",), **options)))


def engine(**options: Any) -> Engine:
    return Engine(EngineConfig("stories3M", device="cpu", **options))


@pytest.mark.sweep(4)
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


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("context", "many", "context is 'many'"),
        ("gpu_peaks", {"bf16": "x"}, "gpu_peaks.bf16 is 'x'"),
        ("engine_cache", {"a": 1}, "'kv_tokens'"),
        ("reserve", {"a": 1}, "unexpected keyword argument 'a'"),
    ],
)
def test_a_damaged_plan_is_one_line(key: str, value: Any, said: str, tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    file.write_text(json.dumps(planned() | {key: value}))
    with pytest.raises(BadInput, match=r"plan\.json") as raised:
        read_plan(file, find_model("stories3M"))
    assert said in str(raised.value) and "\n" not in str(raised.value)


def test_the_rule_takes_the_smaller_of_budget_and_demand() -> None:
    shape = find_model("stories3M").shape

    def blocks(budget: KvCacheBudget, **changes: Any) -> int:
        values: dict[str, Any] = {
            "bytes_per_element": 2,
            "block_size": 32,
            "max_model_len": 512,
            "max_num_seqs": 16,
        }
        return size_cache(shape, CacheRequest(**{**values, **changes}), budget).num_blocks

    assert blocks(KvCacheBudget.on_cpu(2**30)) == 16 * 16
    assert blocks(KvCacheBudget.on_cpu(2**23)) == num_blocks_for(2**21, shape, 32, 2) == 25
    on_cuda = KvCacheBudget.on_cuda(2**24, 0.9, 2**20, 2**21, 2**22)
    left = int(0.9 * 2**24) - 2**20 - 2**21 - 2**22
    assert blocks(on_cuda) == num_blocks_for(left, shape, 32, 2)
    assert blocks(KvCacheBudget(0), num_blocks=7) == 7
    with pytest.raises(BadInput, match=r"256 KiB is available: lower max_model_len to 96 or less$"):
        blocks(KvCacheBudget.on_cpu(2**20))
    with pytest.raises(BadInput, match="does not hold one block"):
        blocks(KvCacheBudget(0), memory_bytes=100)


def test_where_it_does_not_fit_the_message_has_the_numbers() -> None:
    """8 GiB of weights on a card of 10 GiB: one sequence needs 4 GiB, and 0.5 GiB is left."""
    shape = find_model("llama-3.1-8b").shape
    budget = KvCacheBudget.on_cuda(10 * 2**30, 0.95, 8 * 2**30, 2**29, 2**29)
    with pytest.raises(BadInput) as refused:
        size_cache(shape, CacheRequest(2, 16, 32768, 4), budget)
    assert str(refused.value) == (
        "a sequence of 32768 tokens needs 4.00 GiB of KV cache, but 512.00 MiB is left of 9.50 GiB "
        "(weights 8.00 GiB, peak activations 512.00 MiB, runtime and other processes 512.00 MiB): lower "
        "max_model_len to 4096 or less, lower max_num_batched_tokens, raise gpu_memory_utilization "
        "(0.95 of 10.00 GiB) or store the cache in 8 bits"
    )


class Card:
    """A device with so much memory, of which a process elsewhere holds 100,000 bytes."""

    def __init__(self, total: int, weights: int, peak: int) -> None:
        self.total, self.used, self.peak = total, weights + 100_000, peak
        self.num_steps = 0

    def free_and_total(self) -> tuple[int, int]:
        return self.total - self.used, self.total

    def peak_of(self, work: Callable[[], object]) -> int:
        work()
        self.num_steps += 1
        return self.peak


@pytest.mark.parametrize("options", [{}, {"gpu_memory_utilization": 0.5}], ids=str)
@pytest.mark.parametrize("loop", [False, True])
def test_on_a_card_the_cache_gets_what_is_left(
    options: dict[str, Any], loop: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # In bfloat16 on a CPU without it as well: the sizes are of a card that holds these weights.
    weights = engine(dtype="bfloat16").memory.weight_bytes
    card = Card(24_000_000, weights, 2_000_000)
    monkeypatch.setattr("llmopt.engine.core.build.memory_of", lambda device: card)
    built = engine(max_num_seqs=64, dtype="bfloat16", async_scheduling=loop, **options)
    share = options.get("gpu_memory_utilization", 0.9)
    left = int(share * card.total) - weights - 100_000 - card.peak
    assert built.memory.kv_cache_bytes // 2**20 == left // 2**20  # and a null block
    shape, size = find_model("stories3M").shape, built.scheduler.config.block_size
    assert built.stats.kv_blocks_total == num_blocks_for(left, shape, size, 2)
    assert card.num_steps == 1, "the largest step is tried once"
    built.add_request("a", [1, 403, 407], SamplingParams(max_tokens=3, temperature=0))
    while built.has_unfinished():
        built.step()
    built.close()


def test_the_largest_step_is_not_tried_where_the_size_is_given(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    card = Card(2**40, 2**20, 0)
    monkeypatch.setattr("llmopt.engine.core.build.memory_of", lambda device: card)
    assert engine(num_blocks=20).stats.kv_blocks_total == 20
    assert card.num_steps == 0


@pytest.mark.sweep(4)
@pytest.mark.parametrize(
    "options",
    [
        {"max_num_seqs": 3, "max_num_batched_tokens": 700},
        {"max_num_seqs": 1, "max_num_batched_tokens": 4096},
        {"max_num_seqs": 5, "prefill_chunk_size": 3},
        {"max_model_len": 40, "window": 8, "attention_sinks": 4},
        {"window": 8, "attention_sinks": 4, "max_num_batched_tokens": 256},
        {"tensor_parallel_size": 2},
        {"kv_cache_dtype": "fp8"},
    ],
    ids=str,
)
def test_the_largest_step_is_as_large_as_the_limits_allow(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    plans: list[StepPlan] = []
    execute = ModelRunner.execute

    def noting(runner: ModelRunner, plan: StepPlan) -> Any:
        plans.append(plan)
        return execute(runner, plan)

    monkeypatch.setattr(ModelRunner, "execute", noting)
    card = Card(2**30, 2**20, 0)
    monkeypatch.setattr("llmopt.engine.core.build.memory_of", lambda device: card)
    built = engine(**options)
    limits = built.scheduler.config
    prompts, decodes = plans
    assert len(prompts.rows) == len(decodes.rows) == limits.max_num_seqs
    longest = min(limits.chunk, limits.max_model_len)
    whole = limits.max_blocks(limits.max_model_len) * limits.block_size
    assert {row.end for row in decodes.rows} == {min(limits.max_model_len, whole)}
    assert prompts.num_tokens == min(limits.max_num_batched_tokens, longest * limits.max_num_seqs)
    built.close()


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"gpu_memory_utilization": 0.5}, "0.5 is for CUDA"),
        ({"gpu_memory_utilization": 0.0}, "in \\(0, 1\\]"),
        ({"gpu_memory_utilization": 0.5, "num_blocks": 9}, "has no use"),
    ],
)
def test_a_utilization_without_a_meaning_is_refused(options: dict[str, Any], line: str) -> None:
    with pytest.raises(BadInput, match=line):
        engine(**options)


def test_a_plan_for_a_card_follows_the_rule() -> None:
    """What `kv-plan` expects of a GPU is what the engine does there: its own numbers in the same sum."""
    plan = plan_for(
        PlanRequest(model="llama-3.1-8b", gpus=("h100",), context="8k", max_num_seqs=256)
    )
    (device,) = plan.devices
    assert device.engine_cache is not None
    limits = replace(device.reserve, chunk_tokens=8192, max_num_seqs=256)
    left = int(0.9 * device.device.memory_bytes) - device.weight_bytes - device.overhead_bytes
    left -= device.deployment.activation_bytes(limits)
    assert device.engine_cache.num_blocks == num_blocks_for(left, plan.model.shape, 16, 2)


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
    assert rows["weights in memory"]["residual"] == 0
    assert rows["weights in memory"]["load"] == ""
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
