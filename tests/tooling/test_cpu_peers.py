"""Of tools/cpu_peers.py: repeated layers are whole copies, and each ratio is judged by its own goal."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from llmopt.quant.gguf.container import GgufFile, TensorToWrite, write_gguf

from tools.peers_loading import loads_table, measure_loads
from tools.peers_models import repeat_in_gguf
from tools.peers_plan import CASES, ratios_of, rows_of
from tools.peers_record import asked, over, roof_share

FILE = Path("model.gguf")


def test_repeated_layers_are_copies_with_the_types_of_a_mix(tmp_path: Path) -> None:
    sizes = {"blk.0.w": ("Q4_K", 144), "blk.1.w": ("Q6_K", 210), "token_embd.w": ("F32", 1024)}
    tensors = [
        TensorToWrite(name, (1, 256), kind, lambda fill=fill, size=size: [bytes([fill]) * size])
        for fill, (name, (kind, size)) in enumerate(sizes.items())
    ]
    keys = {"general.architecture": "llama", "llama.block_count": 2}
    write_gguf(tmp_path / "few.gguf", keys, tensors)

    repeat_in_gguf(tmp_path / "few.gguf", tmp_path / "made.gguf", 22)

    made = GgufFile(tmp_path / "made.gguf")
    assert made.metadata["llama.block_count"] == 22
    assert set(made.tensors) == {"token_embd.w", *(f"blk.{layer}.w" for layer in range(22))}
    # llama.cpp's use_more_bits: an eighth at both ends, and every third between.
    more = {0, 1, 4, 7, 10, 13, 16, 19, 20, 21}
    for layer in range(22):
        name = f"blk.{layer}.w"
        assert made.tensors[name].type == ("Q6_K" if layer in more else "Q4_K")
        assert set(made.data(name).tolist()) == {1 if layer in more else 0}


def test_ours_is_judged_beside_the_same_file_and_the_same_kv_cache() -> None:
    found = list(ratios_of(rows_of("X", FILE), list(CASES), is_judged=True))
    goals = {(one.ours, one.theirs, one.case): one.goal for one in found}
    assert goals["llmopt X", "llamacpp X", "alone"] == 1.0
    assert goals["llmopt X", "llamacpp X", "batch 16"] == 3.0
    assert goals["llmopt X", "llamacpp X", "prefill 512"] == 4.0
    assert goals["llmopt X fastest", "llamacpp X 8-bit KV", "batch 8 at 2048"] == 1.5
    assert goals["llmopt X", "llamacpp X", "batch 8 at 2048"] is None
    assert ("llmopt X fastest", "llamacpp X", "batch 8 at 2048") not in goals
    assert ("llmopt X", "openvino X", "batch 16") not in goals
    unjudged = ratios_of(rows_of("X", FILE), list(CASES), is_judged=False)
    assert {one.goal for one in unjudged} == {None}


@pytest.mark.parametrize(("rate", "said"), [(2.9, "3.00, missed"), (3.0, "3.00, met")])
def test_a_median_below_its_goal_is_missed(rate: float, said: str) -> None:
    seen = over({0: rate, 1: rate * 2, 2: rate / 2}, {0: 1.0, 1: 1.0, 2: 1.0, 3: 9.0})
    assert seen is not None
    assert asked({"goal": 3.0, **seen}) == said
    loading = {"ours": "a", "theirs": "b", "column": "load_seconds", "goal": 2.95, **seen}
    met = "missed" if rate > 2.95 else "met"
    assert loads_table([], [loading])[-1].endswith(f"| at most 2.95, {met} |")


def test_the_roof_is_the_slower_of_bytes_and_operations() -> None:
    record = {"read_bytes_per_second": [5.0, 10.0], "int8_operations_per_second": [100.0]}
    reading = {"bytes": 20.0, "operations": 100.0, "tokens": 4}
    assert roof_share(record, reading, rate=1.0) == pytest.approx(2 / 4)
    assert roof_share(record, {**reading, "bytes": 0.0}, rate=1.0) == pytest.approx(1 / 4)
    assert roof_share(record, None, rate=1.0) is None


def test_checkpoints_without_gguf_files_are_not_started_alone() -> None:
    assert measure_loads({}, rounds=2) == []


def test_checkpoints_of_other_formats_have_rows(tmp_path: Path) -> None:
    stored = {"quantization_config": {"quant_method": "awq", "bits": 4}}
    (tmp_path / "config.json").write_text(json.dumps(stored))
    names = [row.name for row in rows_of("X", tmp_path)]
    assert names == ["llmopt X", "llmopt X fastest", "vllm X"]
