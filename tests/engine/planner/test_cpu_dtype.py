"""`kv-plan --gpu cpu` plans the dtype that the engine runs on this machine's CPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from llmopt.base.processor import PROFILE_VARIABLE, VARIABLE
from llmopt.engine.planner.answer import answer_of
from llmopt.engine.planner.catalog import find_model
from llmopt.engine.planner.plan_json import plan_as_dict
from llmopt.engine.planner.plan_request import PlanRequest, plan_for
from llmopt.engine.planner.weights import BF16

from ...support.native_paths import needs_x86

# What the engine holds and what a plan says, in a process whose CPU is kept from some instructions.
HELD = """
import json
from llmopt.engine.config.config import EngineConfig
from llmopt.engine.core.engine import Engine
from llmopt.engine.planner.plan_json import plan_as_dict
from llmopt.engine.planner.plan_request import PlanRequest, plan_for
from llmopt.engine.planner.weights import BF16
from llmopt.base.processor import VARIABLE
built = Engine(EngineConfig("stories3M", device="cpu"))
plan = plan_as_dict(plan_for(PlanRequest("stories3M", gpus=("cpu",))))
print(json.dumps([
    built.memory.weight_bytes, plan["weight_bytes_per_rank"], plan["weight_bytes"],
    built.stats.kv_blocks_total, plan["engine_cache"]["num_blocks"],
]))
built.close()
"""


@needs_x86
@pytest.mark.parametrize(
    ("profile", "native"),
    [("native", "auto"), ("avx2", "auto"), ("avx2", "off"), ("generic", "auto")],
)
def test_the_planned_weights_are_those_in_memory(
    profile: str, native: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, native)
    if profile != "native":
        monkeypatch.setenv(PROFILE_VARIABLE, profile)
    done = subprocess.run([sys.executable, "-c", HELD], capture_output=True, text=True, check=True)
    held, planned, stored, blocks, planned_blocks = json.loads(done.stdout)
    assert held == planned
    assert blocks == planned_blocks
    if profile != "native":  # the norms alone are wider than in the file
        assert stored < held < 1.01 * stored


@needs_x86
def test_an_explicit_format_is_planned_as_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PROFILE_VARIABLE, "generic")
    ask = PlanRequest("stories3M", gpus=("cpu",), weights="bf16")
    plan = plan_as_dict(plan_for(ask))
    assert plan["weight_bytes_per_rank"] == plan["weight_bytes"] == 6_166_016
    assert find_model("stories3M").stored_bytes == 6_166_016


def test_a_float32_engine_widens_what_is_no_linear_of_its_own() -> None:
    """A decoder of ours keeps linears and embeddings; transformers' modules hold everything in float32."""
    ours, theirs = find_model("llama-3.1-8b"), find_model("glm-5")
    kept = BF16.as_run(ours.shape, 4).bytes_of(ours.shape.tensors())
    norms = sum(one.num_elements * one.count for one in ours.shape.tensors() if one.role == "norm")
    assert kept == BF16.bytes_of(ours.shape.tensors()) + 2 * norms
    widened = BF16.as_run(theirs.shape, 4)
    assert widened.bytes_of(theirs.shape.tensors()) == 2 * BF16.bytes_of(theirs.shape.tensors())


@pytest.mark.parametrize(
    ("engine", "weights", "bytes_held", "label"),
    [
        ("vllm", None, 2, "float32"),
        ("llmopt", None, 2, "float32"),
        ("sglang", None, 2, "float32"),
        ("llama.cpp", None, 4, "float32"),
        ("vllm", "float32", 4, "float32"),
        ("vllm", "bf16", 2, "bf16"),
    ],
)
def test_a_float32_checkpoint_takes_16_bits_on_a_gpu(
    engine: str, weights: str | None, bytes_held: int, label: str, tmp_path: Path
) -> None:
    """As `--dtype auto` of the engines has it: vLLM's _resolve_auto_dtype narrows float32 models."""
    config = dict(find_model("qwen2.5-7b").config)
    config.pop("dtype", None)
    (tmp_path / "config.json").write_text(json.dumps({**config, "torch_dtype": "float32"}))
    ask = PlanRequest(str(tmp_path), gpus=("l40s",), engine=engine, weights=weights)
    made = plan_for(ask)
    plan = plan_as_dict(made)
    assert plan["weights"] == label
    stored_bytes = 2 if label == "bf16" else 4
    assert plan["weight_bytes"] == stored_bytes * plan["param_count"]
    per_rank = sum(device["weight_bytes_per_rank"] * device["tp"] for device in plan["gpus"])
    assert per_rank == pytest.approx(bytes_held * plan["param_count"], rel=0.01)
    is_narrowed = bytes_held < stored_bytes
    assert any("hold in 16 bits" in warning for warning in made.warnings) == is_narrowed


def test_the_engine_beside_and_cheaper_weights_are_held_in_16_bits_too(tmp_path: Path) -> None:
    config = {**find_model("qwen2.5-7b").config, "torch_dtype": "float32"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    plan = plan_for(PlanRequest(str(tmp_path), gpus=("h100",), context="4k"))
    (device,) = plan.devices
    assert device.beside is not None
    assert device.beside.weight_bytes == device.weight_bytes
    # A change of the weights is compared with 16 bits, as the table's own model is.
    table = plan_for(PlanRequest("qwen2.5-7b", gpus=("h100",), context="4k"))
    assert answer_of(plan).savings == answer_of(table).savings
