"""Roofline points against values worked out by hand."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from llmopt.base.memory import peak_memory_bytes
from llmopt.bench.machine import roofline
from llmopt.bench.machine.environment import checkpoint_hash
from llmopt.bench.machine.roofline import (
    ByteSizes,
    Ceilings,
    decode_point,
    explain,
    measure_ceilings,
    name_bound,
    prefill_point,
    roofline_part,
)
from llmopt.bench.metrics.trace import StepRecord
from llmopt.quant.families.config import model_shape

SHAPE = model_shape(
    {
        "model_type": "llama",
        "hidden_size": 8,
        "intermediate_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "vocab_size": 10,
        "max_position_embeddings": 64,
        "tie_word_embeddings": True,
    }
)
ROOFS = Ceilings(
    far_bandwidth=1e9, near_bandwidth=2e9, near_bytes=1000, peak_flops={"float32": 1e10}
)
SIZES = ByteSizes(weight_bytes=4000.0, kv_bytes_per_element=4, unquantized_bytes=4)


def step(seconds: float, **values: int | bool) -> StepRecord:
    return StepRecord(
        **{
            "start": 1.0,
            "end": 1.0 + seconds,
            "num_sequences": 2,
            "num_first": 0,
            "decode_only": True,
            "context_tokens": 20,
            "computed_tokens": 2,
            **values,
        }  # pyright: ignore[reportArgumentType]
    )


def test_decode_bytes_by_hand() -> None:
    found = decode_point([step(0.001), step(0.003)], SHAPE, ROOFS, SIZES)
    assert found is not None
    # Weights once, and K and V of 20 tokens: 2 layers x 2 x 1 head x 4 wide x 4 bytes.
    assert found.bytes_per_step == pytest.approx(4000 + 20 * 2 * 2 * 4 * 4)
    assert found.num_steps == 2 and found.seconds == pytest.approx(0.004)
    assert found.achieved_bandwidth == pytest.approx(2 * found.bytes_per_step / 0.004)
    assert found.mbu == pytest.approx(found.achieved_bandwidth / 2e9)
    assert found.of_roof < 1 and found.bound == "overhead"
    assert "not from the bytes saved" in explain(found)
    assert decode_point([step(0.1, decode_only=False)], SHAPE, ROOFS, SIZES) is None


def test_prefill_takes_the_other_steps() -> None:
    steps = [step(0.001), step(0.002, decode_only=False, num_first=1, computed_tokens=30)]
    found = prefill_point(steps, SHAPE, ROOFS, SIZES)
    assert found is not None and found.num_steps == 1
    assert found.intensity > 1
    part = roofline_part(steps, SHAPE, ROOFS, SIZES)
    assert [point["phase"] for point in part["points"]] == ["prefill", "decode"]
    assert part["bytes_per_decoded_token"] == pytest.approx((4000 + 20 * 64) / 2)


def test_bounds_are_named() -> None:
    # The ridge is at 5 FLOP a byte.
    assert name_bound(1.0, mbu=0.8, mfu=0.1, ceilings=ROOFS) == "memory"
    assert name_bound(50.0, mbu=0.1, mfu=0.6, ceilings=ROOFS) == "compute"
    assert name_bound(1.0, mbu=0.1, mfu=0.1, ceilings=ROOFS) == "overhead"


def test_ceilings_are_work_by_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roofline, "best_seconds", lambda work, _: (work(), 0.5)[1])
    found = measure_ceilings(torch.device("cpu"), torch.bfloat16, 1 << 20)
    assert found.far_bandwidth == roofline.FAR_BYTES / 0.5
    assert found.near_bandwidth == (1 << 20) / 0.5 and found.near_bytes == 1 << 20
    assert found.bandwidth == max(found.far_bandwidth, found.near_bandwidth)
    rate = 2 * roofline.MATRIX_SIDE["cpu"] ** 3 / 0.5
    assert found.peak_flops == {"float32": rate, "bfloat16": rate} and found.flops == rate


def test_the_best_repetition_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    now, lasts = 0.0, iter((9.0, 0.06, 0.04, 0.12, 0.01))

    def work() -> None:
        nonlocal now
        now += next(lasts)

    monkeypatch.setattr("time.perf_counter", lambda: now)
    # The first is a warm-up, and those after the second fill 0.15 s.
    assert roofline.best_seconds(work, torch.device("cpu")) == pytest.approx(0.04)
    assert next(lasts) == 0.01


def test_checkpoint_hash_covers_every_byte(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(bytes(1000))
    first = checkpoint_hash(tmp_path)
    weights.write_bytes(bytes(500) + b"\x01" + bytes(499))
    assert first.startswith("sha256:") and checkpoint_hash(tmp_path) != first


def test_peak_memory_is_that_of_this_process() -> None:
    assert 1 << 20 < peak_memory_bytes() < 1 << 40
