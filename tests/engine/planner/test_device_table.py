"""Every row of the device table: what it must say, and its peak from the cores where they are known."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from llmopt.base.errors import BadInput
from llmopt.cli.main import main
from llmopt.engine.planner.devices import devices, find_device

ROWS: list[dict[str, Any]] = json.loads(
    (Path(find_device.__code__.co_filename).parent / "devices.json").read_text()
)
# Their cores or clocks are not known well enough to be asserted.
NOT_RECOMPUTED = {"B200", "GB200", "B300", "GB300", "H20", "RTX PRO 6000"}
NOT_RECOMPUTED |= {f"M5{size}" for size in ("", " Pro", " Max", " Ultra")}
# The L4's sheet rounds down to a clock that it holds; the L40S' to a whole number of sparse FLOP.
TOLERANCE = {"L4": 0.04, "L40S": 0.015}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["name"])
def test_a_row_is_complete(row: dict[str, Any]) -> None:
    assert row["date"]
    assert row["bandwidth_gb_s"]["value"] > 0
    assert row["visible_bytes"]["source"] and row["bandwidth_gb_s"]["source"]
    if sizes := row["visible_bytes"].get("by_gb"):
        # The GPU's share of unified memory: from two thirds of a small one to five sixths of a large one.
        assert all(0.66 < size / (int(gb) * 2**30) <= 0.85 for gb, size in sizes.items())
        assert row["unified"] and not row["nvlink_gb_s"] and row["label_gb"] == max(map(int, sizes))
    else:
        # A process sees less than the label in GiB; an estimate says that it is one.
        assert 0.85 < row["visible_bytes"]["value"] / (row["label_gb"] * 2**30) <= 1
    assert row["visible_bytes"].get("estimated", False) == (
        "estimated" in row["visible_bytes"]["source"]
    )
    assert row["peaks"]
    for peak in row["peaks"].values():
        assert peak["dense"] is True
        assert peak["accumulate"] in ("fp32", "fp16", "int32")
        assert peak["source"]
    assert {"bf16", "fp16"} & set(row["peaks"])


def test_rows_without_cores_are_the_ones_that_are_named() -> None:
    assert {row["name"] for row in ROWS if row["cores"] is None} == NOT_RECOMPUTED


@pytest.mark.parametrize("row", [row for row in ROWS if row["cores"]], ids=lambda row: row["name"])
def test_the_peak_is_cores_times_operations_times_clock(row: dict[str, Any]) -> None:
    """Tensor cores x FMA per clock x 2 x boost clock: dense, with float32 accumulation."""
    cores = row["cores"]
    assert cores["source"]
    computed = cores["count"] * cores["fma_per_clock"] * 2 * cores["clock_ghz"] / 1e3
    stated = row["peaks"].get("bf16") or row["peaks"]["fp16"]
    assert stated["value"] == pytest.approx(computed, rel=TOLERANCE.get(row["name"], 0.005))


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["name"])
def test_narrower_types_are_as_much_faster_as_they_are_narrower(row: dict[str, Any]) -> None:
    peaks = {name: peak["value"] for name, peak in row["peaks"].items()}
    if "fp8" in peaks:
        assert peaks["fp8"] / peaks["bf16"] == pytest.approx(2, rel=0.015)
    if "fp16_fp16acc" in peaks:
        assert peaks["fp16_fp16acc"] / peaks["bf16"] == pytest.approx(2, rel=0.005)
    if "fp4" in peaks and row["name"] not in ("B300", "GB300"):  # more fp4 units than of others
        # GeForce accumulates all but fp4 in float32 at half the rate, as `fp16_fp16acc` tells.
        ratio = 4 if "fp16_fp16acc" in peaks else 2
        assert peaks["fp4"] / peaks["fp8"] == pytest.approx(ratio, rel=0.005)


def test_estimates_are_marked_on_the_device() -> None:
    estimated = {device.name for device in devices() if device.memory_is_estimated}
    assert estimated == {row["name"] for row in ROWS if row["visible_bytes"].get("estimated")}
    assert find_device("h100").memory_bytes == int(79.18 * 2**30)


@pytest.mark.parametrize(
    ("name", "means", "gib"),
    [
        # Names as drivers, shops and people write them.
        ("NVIDIA A100-SXM4-40GB", "A100 40GB SXM", 39.5),
        ("NVIDIA RTX 6000 Ada Generation", "RTX 6000 Ada", 44.43),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "RTX PRO 6000", 95.59),
        ("Tesla V100-SXM2-16GB", "V100 SXM2 16GB", 15.04),
        ("NVIDIA GB10", "DGX Spark", 121.69),
        ("rtx 5060 ti", "RTX 5060 Ti 16GB", 15.48),
        ("l40", "L40", 44.99),
        ("a6000", "RTX A6000", 47.99),
        ("B300 270GB", "B300", 268.59),
        # Of unified memory the GPU has a share, by the size that is named, or of the largest.
        ("m4 max", "M4 Max 128GB", 107.52),
        ("Apple M4 Max 64 GB", "M4 Max 64GB", 51.84),
        ("m2-16gb", "M2 16GB", 10.67),
        ("ryzen ai max+ 395", "Strix Halo 128GB", 96),
    ],
)
def test_names_of_cards(name: str, means: str, gib: float) -> None:
    device = find_device(name)
    assert (device.name, device.memory_bytes / 2**30) == (means, pytest.approx(gib, abs=0.005))
    assert find_device(device.name) == device


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("rtx 5060 ti 8gb", "RTX 5060 Ti 16GB has 16 GB, not 8"),
        ("m4 max 100gb", "M4 Max has 48, 64, 128 GB, not 100"),
        ("gtx 1080", "near are RTX 5080"),
        ("rtx 5090 ti", "RTX 3090 Ti, RTX 5090;"),
        ("H20-3e", "near are H20"),
    ],
)
def test_another_memory_is_another_card(name: str, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        find_device(name)


def test_what_apple_gives_its_gpu_is_what_llama_cpp_logs() -> None:
    """`recommendedMaxWorkingSetSize`, in MB of 10^6 bytes."""
    for name, megabytes in (
        *(("m2 16gb", 11_453.25), ("m2 24gb", 17_179.89), ("m2 ultra 128gb", 103_079.22)),
        *(("m4 16gb", 12_713.12), ("m4 24gb", 19_069.67), ("m5 max 48gb", 40_200.90)),
        *(("m4 pro 64gb", 55_662.79), ("m4 max 128gb", 115_448.73)),  # macOS 26 and 27
    ):
        device = find_device(name)
        assert device.memory_bytes / 1e6 == pytest.approx(megabytes, rel=1e-4)


def test_a_machine_by_itself_is_planned_alone_and_in_an_engine_that_runs_on_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    limits = [*("--input-len", "256", "--output-len", "64", "--slo", "ttft:9s tpot:900ms")]
    with pytest.raises(SystemExit):
        main(["kv-plan", "qwen3-30b-a3b", *limits, "--gpu", "strix-halo", "--json"])
    (device,) = json.loads(capsys.readouterr().out)["gpus"]
    assert (device["tp"], device["ep"], device["attention_dp"]) == (1, 1, 1)
    for gpu, engine in (("m4-max-64gb", "llama.cpp"), ("strix-halo", "vllm")):
        with pytest.raises(SystemExit):
            main(["kv-plan", "llama-405b", "--ctx", "4k", "--gpu", gpu, "--json"])
        (device,) = json.loads(capsys.readouterr().out)["gpus"]
        assert (device["engine"], device["tp"], device["pp"], device["fits"]) == (
            engine,
            1,
            1,
            False,
        )
    with pytest.raises(SystemExit) as stop:
        main(["kv-plan", "llama-8b", "--gpu", "dgx-spark", "--ram", "64GB"])
    assert stop.value.code == 2
    assert "DGX Spark has the host's memory already" in capsys.readouterr().err
    with pytest.raises(SystemExit) as stop:
        main(["kv-plan", "llama-8b", "--gpu", "m4-max", "--engine", "vllm"])
    assert stop.value.code == 2
    assert "--engine vllm does not run on M4 Max 128GB" in capsys.readouterr().err
