"""The load decides: three synthetic cards, on each of which the fastest weights are known by construction."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from llmopt.bench.best.decision import decide, load_words
from llmopt.bench.best.finalists import find_best, question_of
from llmopt.bench.best.search import ORIGINAL, Target, config_point
from llmopt.bench.best.target import BestRequest
from llmopt.cli.best import show_plan
from llmopt.engine.planner import plan_request
from llmopt.engine.planner.catalog import find_model
from llmopt.engine.planner.devices import Device
from llmopt.engine.planner.weights import recipe_for
from rich.console import Console

TERA, GIB = 1e12, 1 << 30
SLOW_MEMORY = Device(
    "slow memory", 80 * GIB, bandwidth=0.05 * TERA, peaks={"bf16": 1e3 * TERA, "fp8": 2e3 * TERA}
)
"""Whatever the load, reading takes the time: the fewest bytes are the fastest."""
WITH_FP8 = Device(
    "with fp8", 80 * GIB, bandwidth=3.3 * TERA, peaks={"bf16": 300 * TERA, "fp8": 3e3 * TERA}
)
"""One client reads; many compute, ten times as fast in fp8."""
WITHOUT_FP8 = Device("without fp8", 80 * GIB, bandwidth=2 * TERA, peaks={"bf16": 300 * TERA})
"""Many compute in 16 bits whatever is stored, and int4 is unpacked on the way."""
LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096,
    "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 131072,
    "torch_dtype": "bfloat16", "tie_word_embeddings": False,
}  # fmt: skip
KL = {"value": 0.02, "low": 0.018, "high": 0.022}


def decided(
    card: Device,
    clients: int,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    speedup: float = 0.5,
    size: int | None = None,
    rate: float | None = None,
) -> dict[str, Any]:
    """The decision among checkpoints that all keep the promises, next to an original of `speedup` times the
    planned speed."""
    monkeypatch.setattr(plan_request, "choose_devices", lambda *_: [card])
    request = BestRequest(
        context="2k", sequences=clients, request_rate=rate, loads_in="vllm", size=size
    )
    target, model = Target(request, str(folder), folder, card, False), find_model(str(folder))
    points, made = [], []
    for name in ("int4", "int8", "fp8"):
        recipe = recipe_for(name, model.shape, plain_bytes=model.plain_bytes)
        num_bytes = int(recipe.bits * 10**9)
        plain = {
            "id": name,
            "lane": name,
            "label": name,
            "bytes": num_bytes,
            "bits_per_weight": 4.0,
        }
        points.append(plain | {"expected_kl": 0.02, **target.planned(recipe, "bf16")})
        verdicts = [{"outcome": "pass", "reason": "", "excess": 0.0}]
        scores = {"kl": KL, "sound": True, "verdicts": verdicts, "speed": points[-1]["speed"]}
        made.append({"id": name, "bytes": num_bytes, **scores})
    original = config_point(target, ORIGINAL, "bf16")
    original["throughput"] = {n: speedup * value for n, value in original["throughput"].items()}
    searched = {"lanes": [], "front": points, "usual": [], "original": original}
    return decide(question_of(target), searched, made)


@pytest.mark.parametrize(
    ("card", "fastest"),
    [
        (SLOW_MEMORY, ("int4", "int4", "int4")),
        (WITH_FP8, ("int4", "fp8", "fp8")),
        (WITHOUT_FP8, ("int4", "int4", "int8")),
    ],
    ids=lambda value: value.name if isinstance(value, Device) else "",
)
def test_the_load_decides(
    card: Device, fastest: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With 1, 32 and 200 clients; with one the fewest bytes are asked for. Both ends are said at each load."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    decisions = [decided(card, clients, tmp_path, monkeypatch) for clients in (1, 32, 200)]
    assert tuple(decision["recommended"] for decision in decisions) == fastest
    for decision in decisions:
        ids = [change["id"] for change in decision["by_load"]]
        assert (ids[0], ids[-1]) == (fastest[0], fastest[-1])
    said = load_words(decisions[0]["by_load"])
    assert said.startswith("int4 is the fastest ") and "with one client" in said
    assert ("at every load" in said) == (fastest[0] == fastest[-1])
    assert "200 clients" in decisions[2]["sentence"]


def test_an_arrival_rate_decides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights that cannot keep up are left out; among the others the shortest requests win."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    slow = decided(WITH_FP8, 1, tmp_path, monkeypatch, rate=0.3)
    assert slow["recommended"] == "int4"
    assert "the shortest mean time of a request at 0.3 requests per second" in slow["sentence"]
    fast = decided(WITH_FP8, 1, tmp_path, monkeypatch, rate=10.0)
    assert fast["recommended"] == "fp8"
    (int4,) = (point for point in fast["front"] if point["id"] == "int4")
    assert int4["keeps"] is False and int4["speed"] is None
    assert re.fullmatch(r"load: [\d.]+ of 10 requests per second on with fp8", int4["breaks"][0])


def test_an_original_that_is_faster_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless it is too large."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    decision = decided(WITH_FP8, 32, tmp_path, monkeypatch, speedup=20.0)
    assert [change["id"] for change in decision["by_load"]] == [ORIGINAL]
    bounded = decided(WITH_FP8, 32, tmp_path, monkeypatch, speedup=20.0, size=10 * GIB)
    assert ORIGINAL not in [change["id"] for change in bounded["by_load"]]


def test_a_dry_run_needs_a_config_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    request = BestRequest(gpu="h100", context="2k", loads_in="vllm", size=6 * GIB)
    plan = find_best(request, str(tmp_path), tmp_path / "out", dry_run=True)
    assert not (tmp_path / "out").exists() and not plan["is_checked"]
    points = {point["id"]: point for point in plan["planned"]}
    assert list(points) == ["original", "awq-int4", "Q4_K_M", "Q5_K_M", "Q8_0", "fp8"]
    assert points["original"]["breaks"] == ["14.96 GiB > 6.00 GiB"]
    assert points["fp8"]["keeps"] is False and points["fp8"]["breaks"] == ["8.46 GiB > 6.00 GiB"]
    assert 4.9 * GIB < points["awq-int4"]["bytes"] < 5.6 * GIB
    ends = plan["by_load"][0]["id"], plan["by_load"][-1]["id"]
    assert ends[1] == "fp8" and ends[0] in ("awq-int4", "Q4_K_M")
    show_plan(plan, Console(width=200))
    said = capsys.readouterr().out
    assert "8.46 GiB > 6.00 GiB" in said and "whether vllm loads these is not checked" in said
