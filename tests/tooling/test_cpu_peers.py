"""Speed beside peers: repeated layers are whole copies, and ratios are of the same file, cache and round."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path

import pytest
from llmopt.quant.gguf.container import GgufFile, TensorToWrite, write_gguf

from tools.cpu_peers import chosen_rows, measure_loads
from tools.peers.models import repeat_in_gguf
from tools.peers.plan import BESIDE, CASES, Row, ratios_of, rows_of
from tools.peers.record import TORCH, loads_table, over, roof_share, seconds, spread
from tools.start_table import goals_table

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


def test_ours_stands_beside_the_same_file_and_the_same_kv_cache() -> None:
    found = set(ratios_of(rows_of("X", FILE), list(CASES)))
    for case in ("alone", "batch 16", "prefill 512", "batch 8 at 2048"):
        assert ("llmopt X", "llamacpp X", case) in found
    assert ("llmopt X fastest", "llamacpp X 8-bit KV", "batch 8 at 2048") in found
    assert ("llmopt X fastest", "llamacpp X", "batch 8 at 2048") not in found
    assert ("llmopt X", "openvino X", "batch 16") not in found


def test_another_checkout_is_a_peer_of_ours_alone() -> None:
    rows = [*rows_of("X", FILE), Row("llmopt", "X", FILE, BESIDE)]
    found = {(ours, theirs) for ours, theirs, _ in ratios_of(rows, ["alone"])}
    assert ("llmopt X", "llmopt X beside") in found
    assert not any(ours == "llmopt X beside" for ours, _ in found)


def test_ratios_are_taken_within_a_round() -> None:
    seen = over({0: 2.9, 1: 5.8, 2: 1.45}, {0: 1.0, 1: 1.0, 2: 1.0, 3: 9.0})
    assert seen is not None and spread(seen) == "2.90 (1.45-5.80)" and seen["rounds"] == 3
    loading = {"ours": "a", "theirs": "b", "column": "load_seconds", **seen}
    assert loads_table([], [loading])[-1] == "| a / b | loading | 2.90 (1.45-5.80) |"
    assert over({0: 1.0}, {1: 1.0}) is None


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


def test_goals_of_a_start_are_marked() -> None:
    common = {"round": 0, "load_seconds": 1.0, "first_token_seconds": 1.5, "started_rss": 5e8}
    loads = [
        {"round": 0, "row": TORCH, "process_seconds": 2.0},
        {**common, "row": "llmopt X", "process_seconds": 3.6, "weight_bytes": 1e8},
        {**common, "row": "llamacpp X", "process_seconds": 0.5, "load_seconds": 0.4},
    ]
    assert seconds(loads, "llmopt X", "import_seconds") == {0: pytest.approx(2.1)}
    marks = [line.split(" | ")[-2:] for line in goals_table(loads)[2:]]
    assert marks == [
        ["3.50", "**missed** |"],
        ["0.80", "**missed** |"],
        ["476.84", "met |"],
    ]


@pytest.mark.parametrize(
    ("without", "left"),
    [
        ("", ["llmopt m", "llamacpp m", "openvino m"]),
        ("openvino,llmopt m", ["llamacpp m"]),
        ("fastest,llmopt,openvino", ["llamacpp m"]),
    ],
)
def test_rows_are_left_out_by_package_label_or_name_and_none_by_default(
    without: str, left: list[str], tmp_path: Path
) -> None:
    (tmp_path / "m.gguf").touch()
    given = Namespace(files=[tmp_path / "m.gguf"], beside=None, without=without)
    assert [row.name for row in chosen_rows(given, ["alone"])] == left
