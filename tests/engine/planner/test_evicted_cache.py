"""`kv-plan --kv-budget`: bytes and capacity of sequences that are compacted, checked by a run."""

from __future__ import annotations

import json
from typing import Any

import pytest
from llmopt.base.errors import BadInput
from llmopt.cli.main import main
from llmopt.engine.base.sampling_params import SamplingParams
from llmopt.engine.config.config import EngineConfig
from llmopt.engine.core.engine import Engine
from llmopt.engine.planner.plan_request import PlanRequest, plan_for
from llmopt.recipes import MODELS

MODEL = str(MODELS / "stories260K")


def planned(capsys: Any, *words: str) -> dict[str, Any]:
    command = ["kv-plan", "--model", MODEL, "--gpu", "cpu", "--json", "--block-size", "8"]
    with pytest.raises(SystemExit) as ended:
        main([*command, *words])
    assert ended.value.code == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("method", ["snapkv", "h2o"])
def test_a_run_holds_what_the_plan_says(capsys, method) -> None:
    options = ["--kv-budget", "64", "--kv-eviction", method, "--kv-dtype", "float32"]
    plan = planned(capsys, *options, "--ctx", "200", "--output-tokens", "60")["kv_eviction"]
    assert (plan["method"], plan["budget"]) == (method, 64)
    engine = Engine(
        EngineConfig(
            MODEL,
            dtype="float32",
            block_size=8,
            num_blocks=40,
            kv_budget=64,
            kv_eviction=method,
        )
    )
    block_bytes = engine.memory.kv_cache_bytes // 41
    # The last token is never computed: one more than planned.
    params = SamplingParams(max_tokens=61, ignore_eos=True)
    engine.add_request("r", [1, *range(300, 439)], params)
    engine.step()
    held = []
    while engine.has_unfinished():
        engine.step()
        held.append(engine.stats.kv_blocks_used * block_bytes)
    assert max(held) == plan["kv_bytes_per_sequence"]
    assert plan["kv_bytes_of_prompt"] == 18 * block_bytes
    assert plan["kv_tokens_per_sequence"] == (124 if method == "snapkv" else 72)


def test_more_sequences_fit_and_one_of_them_is_in_its_prompt(capsys) -> None:
    words = ["--ctx", "400", "--kv-cache-memory-bytes", "1MiB", "--max-num-seqs", "4000"]
    whole = planned(capsys, *words)
    evicted = planned(capsys, *words, "--kv-budget", "40", "--kv-eviction", "h2o")
    one = evicted["kv_eviction"]
    left = 2**20 - one["kv_bytes_of_prompt"]
    assert one["max_concurrent_sequences"] == 1 + left // one["kv_bytes_per_sequence"]
    assert one["max_concurrent_sequences"] > 3 * whole["max_concurrent_sequences"]
    assert whole["kv_eviction"] is None


def test_a_plan_refuses_what_the_engine_would(capsys) -> None:
    for model, line in (
        ("gemma-3-27b", "KV eviction and sliding windows do not go together"),
        ("deepseek-v3", "KV eviction and latent attention do not go together"),
    ):
        with pytest.raises(BadInput, match=line):
            plan_for(PlanRequest(model, kv_budget=1024))
    with pytest.raises(BadInput, match="an option of llmopt's engine, not of vllm"):
        plan_for(PlanRequest("llama-3.1-8b", kv_budget=1024, engine="vllm"))
    with pytest.raises(SystemExit) as ended:
        main(["kv-plan", "--model", MODEL, "--kv-budget", "8"])
    printed = " ".join(capsys.readouterr().err.split())
    assert ended.value.code == 2 and "kv_budget = 8 is below a block of 16 tokens" in printed
